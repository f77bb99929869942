"""Why a plan: what binds it, what more memory or bandwidth would buy, which error of a term would change the winner,
and how far the machine reaches. All from the prices of the search, nothing is traced again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.errors import UserError
from shoal.planner.cluster import Link
from shoal.planner.profile import Cut, Profile, deepened
from shoal.planner.search import Search
from shoal.planner.task import TERMS, Estimate, Found, Task

GB = 10**9
MOST = 1 << 12
"""Times as much, at most, that is asked for."""


@dataclass(frozen=True)
class Explanation:
    """What is said of a choice.

    - `binding`: what it is held back by, in words
    - `bought`: seconds of a step that one more GB, or GB/s, would save, by what it is of
    - `fragile`: terms of which an error of 10% would make another candidate the fastest, with that one's number
    - `blocks`: of the largest model of this width that fits, None where it has none; `rows`: how many times as long a
      row could be; `devices`: of the smallest part of this machine that would do
    """

    binding: str
    bought: Mapping[str, float]
    fragile: Mapping[str, int]
    blocks: int | None
    parameters: int
    rows: float
    devices: int


def explain(task: Task, chosen: Estimate, others: Sequence[Estimate], margins: bool = True) -> Explanation:
    """Explains `chosen` of `task`; `others`: the next best. `margins`: also what more of something would buy, for which
    it is searched again, four times."""
    blocks, parameters = largest(task)
    return Explanation(
        binding(task, chosen),
        bought(task, chosen) if margins else {},
        fragile(chosen, others),
        blocks,
        parameters,
        longest(task),
        smallest(task),
    )


def binding(task: Task, chosen: Estimate) -> str:
    """What holds a choice back: memory where most of it is taken, else the largest term."""
    share = chosen.bytes / task.most
    shown = {what: seconds for what, seconds in chosen.terms.items() if seconds}
    term = max(shown, key=lambda what: shown[what])
    said = f"{term} is {shown[term] / chosen.seconds:.0%} of a step"
    return f"memory ({share:.0%} of what a rank may use is taken); {said}" if share > 0.9 else said


def why_not(chosen: Estimate, other: Estimate) -> str:
    """Where `other` loses its time."""
    more = {what: other.terms.get(what, 0.0) - chosen.terms.get(what, 0.0) for what in TERMS}
    worst = sorted(more, key=lambda what: -more[what])[:2]
    parts = [f"{what} +{more[what]:.3g} s" for what in worst if more[what] > 0]
    gained = min(more, key=lambda what: more[what])
    saved = f", {gained} {more[gained]:.3g} s" if more[gained] < -1e-3 * chosen.seconds else ""
    slower = other.seconds / chosen.seconds - 1
    sure = "; compiling is to spare more" if other.choice.compile and slower < 0 and not chosen.choice.compile else ""
    return f"{slower:+.1%}: {', '.join(parts) or 'no term is larger'}{saved}{sure}"


def fragile(chosen: Estimate, others: Sequence[Estimate]) -> dict[str, int]:
    """The terms of which an error of 10%, either way, would have another candidate win, and which one. Those that are
    faster as it is were passed over for another reason."""
    found: dict[str, int] = {}
    least = [each.seconds if each.seconds < chosen.seconds else 0.0 for each in (chosen, *others)]
    for what in TERMS:
        for factor in (1.1, 0.9):
            off = [each.seconds + (factor - 1) * each.terms.get(what, 0.0) for each in (chosen, *others)]
            seconds = [math.inf if passed else each for each, passed in zip(off, least, strict=True)]
            best = min(range(len(seconds)), key=seconds.__getitem__)
            if best and seconds[best] < seconds[0] * (1 - 1e-9):
                found.setdefault(what, best)
    return found


def bought(task: Task, chosen: Estimate) -> dict[str, float]:
    """Seconds of a step that more would save: 1 GB of each device, 1 GB/s in hosts, between them, to the host."""

    def more(link: Link) -> Link:
        return link.times(1 + GB / link.bandwidth)

    cluster = task.cluster
    inside = replace(cluster, hosts=tuple(replace(host, inside=more(host.inside)) for host in cluster.hosts))
    to_host = replace(cluster, hosts=tuple(replace(host, to_host=host.to_host + GB) for host in cluster.hosts))
    others = {
        "GB of memory": replace(task, limit=task.most + GB),
        "GB/s inside hosts": replace(task, cluster=inside),
        "GB/s between hosts": replace(task, cluster=replace(cluster, between=more(cluster.between))),
        "GB/s to the host": replace(task, cluster=to_host),
    }
    found = {}
    for what, other in others.items():
        if what == "GB/s between hosts" and len(cluster.hosts) == 1:
            continue
        best = Search(other).run().best
        found[what] = max(0.0, chosen.seconds - best[0].seconds) if best else 0.0
    return found


def fits(task: Task) -> bool:
    """Whether any choice fits: those that need least are asked first."""
    search = Search(replace(task, recompute=("full",), schedules=(("1f1b", 1),)))
    for spread in reversed(search.spreads()):
        for choice in search.choices(spread):
            if choice.microbatch > (task.microbatch or 1) or choice.zero < min(3, 3 * (spread.replicas > 1)):
                continue
            if search.fits(search.estimate(choice)):
                return True
    return False


def largest(task: Task) -> tuple[int | None, int]:
    """Blocks and parameters of the largest model of this width that fits."""
    profile = task.profile
    if profile.blocks < 1:
        return None, profile.parameters
    least = profile.blocks

    def of(blocks: int) -> Profile:
        return deepened(profile, blocks, least // 2)

    blocks = _most(lambda blocks: fits(replace(task, profile=of(blocks))), least)
    return (blocks, of(blocks).parameters) if blocks else (None, 0)


def longest(task: Task) -> float:
    """How many times as long a row could be; memory grows with its tokens."""

    def longer(times: float) -> Profile:
        def cut(value: Cut) -> Cut:
            return replace(value, value=value.value * times)

        parts = tuple(
            replace(part, saved=cut(part.saved), results=cut(part.results), boundary=cut(part.boundary))
            for part in task.profile.parts
        )
        return replace(task.profile, parts=parts, temporaries=cut(task.profile.temporaries))

    return _most(lambda quarters: fits(replace(task, profile=longer(quarters / 4))), 4) / 4


def smallest(task: Task) -> int:
    """Devices of the smallest part of the cluster that would do: some of a host, or some hosts."""
    cluster, best = task.cluster, task.cluster.size
    first = cluster.hosts[0]
    sizes = [each for each in range(1, first.count + 1) if first.count % each == 0]
    sizes += [first.count * hosts for hosts in range(2, len(cluster.hosts)) if len(cluster.hosts) % hosts == 0]
    for size in sizes:
        hosts = (replace(first, count=size),) if size <= first.count else cluster.hosts[: size // first.count]
        if first.device.on_host and size < first.count:
            hosts = (replace(first, count=size, memory=first.memory),)
        if fits(replace(task, cluster=replace(cluster, hosts=hosts), limit=None)):
            best = size
            break
    return best


def _most(possible: Callable[[int], bool], start: int) -> int:
    """The largest number for which it is possible, near enough: by doubling, then by halves to 2%. 0 for none."""
    if not possible(start):
        low, high = 0, start
    else:
        low = start
        while low < MOST * start and possible(2 * low):
            low *= 2
        high = 2 * low
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low


def front(found: Found) -> list[Estimate]:
    """The candidates that no other one beats in both time and memory, from the fastest on."""
    best: list[Estimate] = []
    for each in sorted(found.best, key=lambda each: (each.seconds, each.bytes)):
        if not best or each.bytes < best[-1].bytes:
            best.append(each)
    return best


def within_budget(task: Task, budget: float, seconds: Callable[[Estimate], float]) -> Task:
    """The task on as many hosts as keep the price of the whole job within `budget`, the most that do. Raises UserError
    where none does."""
    cluster = task.cluster
    if not cluster.price:
        raise UserError(
            f"--budget needs prices, and {cluster.name} has none: describe the machine in a cluster file with price "
            "(of an hour of a host) in [[hosts]]"
        )
    numbers = sorted(
        {len(cluster.hosts), *(each for each in range(1, len(cluster.hosts)) if len(cluster.hosts) % each == 0)}
    )
    cheapest = float("inf")
    for number in reversed(numbers):
        other = replace(task, cluster=cluster.with_hosts(number))
        best = Search(other).run().best
        if not best:
            continue
        price = seconds(best[0]) / 3600 * other.cluster.price
        cheapest = min(cheapest, price)
        if price <= budget:
            return other
    said = "no plan fits" if cheapest == float("inf") else f"the cheapest takes {cheapest:,.0f} {cluster.currency}"
    raise UserError(f"--budget {budget:,.0f}: {said}. Train fewer steps, or take devices that cost less")
