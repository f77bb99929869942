"""Why a plan: what binds it, what more memory or bandwidth would buy, which error of a term would change the winner,
and how far the machine reaches. All from the prices of the search, nothing is traced again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from shoal.errors import UserError
from shoal.planner.bought import bought
from shoal.planner.choices import island, with_tier
from shoal.planner.cluster import Host
from shoal.planner.degrees import Spread
from shoal.planner.held import resting
from shoal.planner.longer import longer
from shoal.planner.no_room import more_room
from shoal.planner.profile import Profile, deepened
from shoal.planner.search import Search, search
from shoal.planner.sizes import together
from shoal.planner.task import EXACT, NAMES, TERMS, Choice, Estimate, Found, Task

MOST = 1 << 12
"""Times as long a row, at most, that is asked for, and blocks, but for eight times as many as there are: each further
one takes its time to be dealt out to stages."""
NEAR = 5
"""Alternatives that are shown, and near which it is searched again."""
SIZES = 16
"""Numbers of hosts that are tried beside divisors: each is a search."""


@dataclass(frozen=True)
class Explanation:
    """What is said of a choice.

    - `binding`: what it is held back by, in words
    - `bought`: seconds of a step that one more GB, or GB/s, would save, by what it is of
    - `fragile`: terms of which an error of 10% would make another candidate the fastest, with that one's number
    - `blocks`: of the largest model of this width that fits, None where it has none; `rows`: how many times as long a
      row could be; `more_blocks`, `more_rows`: whether larger ones may fit, which were not asked for
    - `devices`: of the smallest part of this machine that would do
    """

    binding: str
    bought: Mapping[str, float]
    fragile: Mapping[str, int]
    blocks: int | None
    more_blocks: bool
    parameters: int
    rows: float
    more_rows: bool
    devices: int


def explain(
    task: Task, chosen: Estimate, others: Sequence[Estimate], margins: bool = True, refused: Sequence[Estimate] = ()
) -> Explanation:
    """Explains `chosen` of `task`; `others`: the next best. `margins`: also what more of something would buy, for which
    it is searched again. `refused`: what would be faster, but for what a dry run has counted."""
    return Explanation(
        binding(task, chosen),
        bought(task, chosen, others[:NEAR], refused) if margins else {},
        fragile(chosen, others),
        *largest(task),
        *longest(task),
        smallest(task),
    )


def binding(task: Task, chosen: Estimate) -> str:
    """What holds a choice back: memory where most of it is taken, else the largest term."""
    share = chosen.bytes / task.most
    shown = {what: seconds for what, seconds in chosen.terms.items() if seconds}
    term = max(shown, key=lambda what: shown[what])
    said = f"{NAMES[term]}, {shown[term] / chosen.seconds:.0%} of a step"
    return f"memory ({share:.0%} of what a rank may use is taken), then {said}" if share > 0.9 else said


def why_not(chosen: Estimate, other: Estimate) -> str:
    """Where `other` loses its time."""
    more = {what: other.terms.get(what, 0.0) - chosen.terms.get(what, 0.0) for what in TERMS}
    worst = sorted(more, key=lambda what: -more[what])[:2]
    parts = [f"{NAMES[what]} +{more[what]:.3g} s" for what in worst if more[what] > 0]
    gained = min(more, key=lambda what: more[what])
    saved = f", {NAMES[gained]} {more[gained]:.3g} s" if more[gained] < -1e-3 * chosen.seconds else ""
    slower = other.seconds / chosen.seconds - 1
    sure = "; compiling is to spare more" if other.choice.compile and slower < 0 and not chosen.choice.compile else ""
    return f"{slower:+.1%}: {', '.join(parts) or 'no term is larger'}{saved}{sure}"


def fragile(chosen: Estimate, others: Sequence[Estimate]) -> dict[str, int]:
    """The terms of which an error of 10%, either way, would have another candidate win, and which one. Those that are
    faster as it is were passed over for another reason."""
    found: dict[str, int] = {}
    passed_over = [each.seconds < chosen.seconds for each in (chosen, *others)]
    for what in TERMS:
        for factor in (1.1, 0.9):
            off = [each.seconds + (factor - 1) * each.terms.get(what, 0.0) for each in (chosen, *others)]
            seconds = [math.inf if passed else each for each, passed in zip(off, passed_over, strict=True)]
            best = min(range(len(seconds)), key=seconds.__getitem__)
            if best and seconds[best] < seconds[0] * (1 - 1e-9):
                found.setdefault(what, best)
    return found


def fits(task: Task) -> bool:
    """Whether any choice fits."""
    return roomy(task) is not None


def roomy(task: Task, first: Spread | None = None) -> Spread | None:
    """Degrees under which a choice fits, None where there are none: those that need least are asked first, or `first`,
    where these are legal; last the one that is short of least with other stages. Rows of a forward are as few as can
    be; what is compiled, and how replicas agree, changes no memory that is counted."""
    asked = replace(task, microbatch=task.microbatch or 1, compiled=False, exchanges=(EXACT,))
    schedules = task.schedules if "stages" in task.pins else (("1f1b", 1),)  # whose stages may be several of a rank
    search = Search(replace(asked, recompute=("full",), schedules=schedules))
    spreads = search.spreads()[::-1]
    spreads.sort(key=lambda each: each != first)
    least, nearest = math.inf, None
    for one in (one for each in spreads if _may_have_room(search, each) for one in search.firsts(each)):
        for lacks, choice in _lacking(search, one):
            if lacks <= 0:
                return choice.spread
            if choice.spread.stages > 1 and lacks < least:
                least, nearest = lacks, choice
    return nearest.spread if nearest is not None and search.recut(nearest) else None


def _may_have_room(search: Search, spread: Spread) -> bool:
    """Whether the state alone has room, on the device and on the host, at the mean of the stages: one of them holds no
    less. A disk takes masters and the optimizer's state."""
    pieces = search.prices.alike(range(len(search.prices.pieces)))
    whole = together([(search.prices.sizes(place, spread), number) for place, number in pieces])
    first, tied = next(search.firsts(spread), None), search.tied(spread)
    for choice in (with_tier(first, tier) for tier in search.tiers(spread)) if first else ():
        state, away = resting(search.prices, choice, whole, tied), choice.offload
        if away and away.disk is not None:
            state = {role: nbytes for role, nbytes in state.items() if role in ("weights", "gradients")}
        on_host = search.on_host(choice) if away and not search.prices.slowest.on_host else 0.0
        if (1 - 1e-9) * math.fsum(state.values()) / spread.stages <= search.most(choice) + on_host:
            return True
    return False


def _lacking(search: Search, one: Choice) -> Iterator[tuple[float, Choice]]:
    """Yields the choices that differ from `one` in their tiers alone, each with the bytes for which it has no room.
    What waits on the host takes as much room on the device as less can: where that is too much of the device, no other
    one of the tier is asked."""
    tiers = list(search.tiers(one.spread))
    zero = max((zero for zero, *_ in tiers), default=0)
    tiers = [tier for tier in tiers if tier[0] == zero]
    for shard in dict.fromkeys(shard for _, shard, *_ in tiers):
        offloads = [away for _, own, away, _ in tiers if own == shard]
        for away in sorted(offloads, key=lambda away: away.activations if away else math.inf, reverse=True):
            choice = one._replace(zero=zero, shard=shard, offload=away)
            has = search.holds(choice)
            yield search.lacks(choice, has), choice
            if away and has.bytes > (1 + 1e-9) * search.most(choice):
                break  # as are those of which more waits on the device


def largest(task: Task) -> tuple[int | None, bool, int]:
    """Blocks of the largest model of this width that fits, whether a larger one may fit, and its parameters."""
    profile = task.profile
    if profile.blocks < 1:
        return None, False, profile.parameters
    least = profile.blocks

    def of(blocks: int) -> Profile:
        return deepened(profile, blocks, least // 2)

    pins = {key: value for key, value in task.pins.items() if key != "stages"}  # which are those of so many blocks
    most = max(MOST, 8 * least)
    blocks, more = _most(lambda blocks: replace(task, profile=of(blocks), pins=pins), least, most)
    return (blocks, more, of(blocks).parameters) if blocks else (None, False, 0)


def longest(task: Task) -> tuple[float, bool]:
    """How many times as long a row could be, and whether a longer one may fit; memory grows with its
    tokens, and so do learned positions."""
    quarters, more = _most(lambda quarters: replace(task, profile=longer(task.profile, quarters / 4)), 4, 4 * MOST)
    return quarters / 4, more


def smallest(task: Task) -> int:
    """Devices of the smallest part of the cluster that would do: some of a host, or some hosts, those with most memory
    before others. Where devices are parts of their host, fewer have more memory each, up to the task's limit."""
    cluster = task.cluster
    hosts = sorted(cluster.hosts, key=lambda host: (replace(cluster, hosts=(host,)).memory, host.memory), reverse=True)
    first = hosts[0]
    parts: list[tuple[Host, ...]] = [
        (replace(first, count=count),) for count in range(1, first.count) if first.count % count == 0
    ]
    parts += [tuple(hosts[:number]) for number in numbers_of_hosts(len(hosts))]
    for part in parts:
        smaller = replace(task, cluster=replace(cluster, hosts=part))
        if island(smaller) == island(task) and fits(smaller):  # else nothing is left that would train apart
            return smaller.cluster.size
    return cluster.size


def numbers_of_hosts(most: int) -> list[int]:
    """The numbers of hosts that are tried of so many, ascending: all up to SIZES, of more their divisors and each
    further one of SIZES equal steps."""
    step = math.ceil(most / SIZES)
    return [each for each in range(1, most + 1) if each % step == 0 or most % each == 0]


def _most(asked: Callable[[int], Task], start: int, most: int) -> tuple[int, bool]:
    """The largest number for which what is asked fits, near enough: by doubling, then by halves to 2%, 0 for none; and
    whether larger ones may fit, as from `most` on none is asked for."""
    last: Spread | None = None

    def possible(number: int) -> bool:
        nonlocal last
        found = roomy(asked(number), last)
        last = found or last
        return found is not None

    if not possible(start):
        low, high = 0, start
    else:
        low = start
        while low < most and possible(2 * low):
            low *= 2
        high = 2 * low
    if low >= most:
        return low, True
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low, False


def front(found: Found) -> list[Estimate]:
    """The candidates that no other one beats in both time and memory, from the fastest on."""
    best: list[Estimate] = []
    for each in sorted(found.best, key=lambda each: (each.seconds, each.bytes)):
        if not best or each.bytes < best[-1].bytes:
            best.append(each)
    return best


class TooDear(UserError):
    """No plan keeps to a budget. `cheapest`: the task whose price is the least, None where that is confirmed."""

    def __init__(self, message: str, cheapest: Task | None) -> None:
        super().__init__(message)
        self.cheapest = cheapest


def within_budget(
    task: Task,
    budget: float,
    seconds: Callable[[Estimate], float],
    currency: str = "",
    known: Mapping[int, float] = MappingProxyType({}),
) -> Task:
    """The task on the number of hosts, of the first ones of the cluster, whose plan is the fastest of those that keep
    the price of the whole job within `budget` (see `numbers_of_hosts`). `seconds`: of the whole job; `currency`: of the
    budget, "" for the cluster's; `known`: the price on so many hosts, where dry runs have shown that it is more. Raises
    TooDear where no plan keeps to it."""
    cluster = task.cluster
    if not cluster.price:
        raise UserError(
            f"--budget needs prices above 0, and no host of {cluster.name} has one: give price (of an hour of a host) "
            "in [[hosts]] of a cluster file, or leave out --budget"
        )
    if currency and currency.upper() != cluster.currency.upper():
        raise UserError(
            f'--budget is in "{currency}", prices of {cluster.name} in "{cluster.currency}": give an amount in these, '
            f'such as "40000{cluster.currency}"'
        )
    cheapest, least, found, fastest = min(known.values(), default=math.inf), None, task, math.inf
    for number in reversed(numbers_of_hosts(len(cluster.hosts))):
        tried = Search(replace(task, cluster=cluster.with_hosts(number)))
        if number in known or island(tried.task) != island(task):
            continue  # nothing would train apart there
        if min(map(tried.bound, tried.spreads()), default=math.inf) >= fastest or not (best := tried.run().best):
            continue
        price = seconds(best[0]) / 3600 * tried.task.cluster.price
        if price < cheapest:
            cheapest, least = price, tried.task
        if price <= budget and best[0].seconds < fastest:
            found, fastest = tried.task, best[0].seconds
    if fastest < math.inf:
        return found
    if cheapest == math.inf:
        search(task)  # which says why nothing fits
        raise TooDear(f"no plan fits on any number of hosts of {cluster.name}. {more_room(task)}", None)
    raise TooDear(
        f"--budget {cluster.money(budget)}: the cheapest takes {cluster.enough(cheapest)}. Give as much, train for "
        "fewer steps or seconds, or take devices that cost less",
        least,
    )
