"""What more would buy: what is searched from known degrees on is what whole searches find, and prices less."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.comm import Reach
from shoal.planner.bought import bought, with_more
from shoal.planner.cluster import Cluster, Link
from shoal.planner.costs import Prices
from shoal.planner.degrees import Spread
from shoal.planner.estimates import Estimates
from shoal.planner.explain import explain, fits
from shoal.planner.profile import Cut, Message, Profile
from shoal.planner.search import Search
from shoal.planner.task import Choice, Found, Offload, Probed, Task
from tests.planner.models import GIB, MIB, cluster, model, task

EXAMPLES = 8
FACTORS = (1, 1.0, 1.0, 1.0, 1.0), (4, 2.0, 1.5, 3.0, 0.5), (16, 1.1, 3.0, 1.2, 1.3)
"""Tasks that are drawn: 400 were, when this was written."""


def plain(asked: Task) -> dict[str, Found]:
    """Whole searches of the task with more."""
    return {what: Search(other).run() for what, other in with_more(asked).items()}


def with_experts(profile: Profile) -> Profile:
    """Half of each block is experts, whose rows travel."""
    sent = Message("experts", "all_to_all", 2, 3 * MIB, 1.0)
    parts = [
        replace(each, experts=Cut(each.weights.value / 2, {"experts": 1.0}), messages=(*each.messages, sent))
        if each.is_block
        else each
        for each in profile.parts
    ]
    return replace(profile, parts=tuple(parts))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Hosts that are alike or not, with fast and slow links, with and without a disk, devices or cores."""
    some = st.sampled_from
    plain = cluster(
        draw(st.integers(1, 3)), draw(some([1, 2, 4])), draw(some([0.5, 0.8, 1.3, 8])) * GIB, draw(some([1e9, 5e10]))
    )
    host = plain.hosts[0]
    device = replace(host.device, on_host=draw(st.integers(0, 5)) == 0, bandwidth=draw(some([5e9, 5e11])))
    inside = host.inside
    if draw(st.booleans()):
        ways = ("all_reduce", 2), ("all_gather", 4), ("all_to_all", 2)
        inside = replace(inside, reached=tuple(Reach(how, ranks, 3e-5, inside.bandwidth / 2) for how, ranks in ways))
    host = replace(
        host,
        device=device,
        inside=inside,
        memory=draw(some([2, 8, 64])) * GIB,
        to_host=draw(some([2e8, 1e10, 1e12])),
        disk=draw(some([0.0, 2e9])),
    )
    fast = replace(host, device=replace(device, name="fast", flops={"bf16": draw(some([1e13, 2.5e13]))}))
    hosts = [draw(some([host, fast])) for _ in plain.hosts]
    return replace(plain, hosts=tuple(hosts), between=Link(2e-5, draw(some([1e8, 2e9, 1e11]))))


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    """Small tasks."""
    some = st.sampled_from
    profile = model(draw(st.integers(2, 6)), draw(some([1e6, 1e7])), draw(some([2, 32])) * MIB)
    legal = {"parts": 4, "tokens": 2, "ring": draw(some([0, 1])), "heads": 8}
    if draw(st.booleans()):
        profile, legal = with_experts(profile), {**legal, "experts": 2}
    pins = draw(some([{}, {}, {}, {"pp": 2}, {"zero": 1}, {"recompute": "selective"}, {"memory": None}, {"tp": 1}]))
    return task(
        profile,
        draw(clusters()),
        draw(some([4, 6, 16])),
        legal=legal,
        pins=pins,
        compiled=draw(st.booleans()),
        steps=draw(some([None, 1000])),
        probed=draw(some([(), (), tuple(Probed(*each) for each in FACTORS)])),
        schedules=draw(some([(("1f1b", 1),), (("1f1b", 1), ("interleaved", 2), ("zb1p", 1))])),
        exchanges=draw(some([("allreduce",), ("allreduce", "bf16")])),
    )


def saved(asked: Task, found: Found) -> dict[str, float]:
    """What whole searches say of what more would save."""
    return {
        what: max(0.0, found.best[0].seconds - more.best[0].seconds) if more.best else 0.0
        for what, more in plain(asked).items()
    }


def any_fits(asked: Task) -> bool:
    """Whether a choice fits under which ranks share what they can, and compute blocks again, of all of them."""
    given = {"microbatch": asked.microbatch or 1, "compiled": False, "exchanges": ("allreduce",)}
    search = Search(replace(asked, **given, recompute=("full",), schedules=(("1f1b", 1),)))
    every = [each for spread in search.spreads() for each in search.choices(spread)]
    zero = {spread: max(each.zero for each in every if each.spread == spread) for spread in search.spreads()}
    left = (each for each in every if each.zero == zero[each.spread])
    return any(search.fits(each, search.begun(each, search.counts(each)).fullest) for each in left)


@settings(deadline=None, max_examples=2 * EXAMPLES)
@given(tasks(), st.sampled_from([0.1, 0.2, 0.4, 1.0]))
def test_what_fits_is_what_all_choices_say(asked: Task, share: float) -> None:
    asked = replace(asked, limit=share * asked.most)
    assert fits(asked) == any_fits(asked)


def test_a_pinned_zero_stage_fits_where_it_was_found_to() -> None:
    asked = task(pins={"zero": 1, "dp": 8})
    told = explain(asked, Search(asked).run().best[0], (), margins=False)
    assert fits(asked) and told.blocks is not None and told.rows >= 1


@settings(deadline=None, max_examples=EXAMPLES)
@given(tasks(), st.integers(0, 4))
def test_degrees_that_are_known_change_no_answer(asked: Task, known: int) -> None:
    found = Search(asked).run()
    if not found.best:
        return
    known, near = Search(asked), [each.choice.spread for each in found.best[:known]]
    for other in with_more(asked).values():
        some, whole = Search(other, known).run(near), Search(other).run()
        assert some.best == whole.best and some.spreads == whole.spreads and some.bounded >= whole.bounded


@settings(deadline=None, max_examples=4 * EXAMPLES)  # of few none has its best plan on the host
@given(tasks())
def test_what_is_left_out_changes_no_answer(asked: Task) -> None:
    class Whole(Search):
        """All choices are priced of the degrees that are not left out."""

        def _may_win(self, first: Choice) -> bool:
            return True

        def _is_slow(self, choice: Choice) -> bool:
            return False

        def _is_full(self, choice: Choice) -> bool:
            return False

        def _hopes(self, first: Choice, away: Offload) -> tuple[bool, bool]:
            return True, True

    assert Search(asked).run().best == Whole(asked).run().best


def test_degrees_that_are_none_of_a_task_change_no_answer() -> None:
    asked = task(schedules=(("1f1b", 1),))
    near = [Spread(copies=16), Spread(copies=4, parts=2), Spread(copies=4, parts=2)]
    assert Search(asked).run(near).best == Search(asked).run().best


def test_what_is_searched_again_prices_little(monkeypatch: pytest.MonkeyPatch) -> None:
    on = cluster(4, 4, 8 * GIB, between=2e10)
    asked = task(model(12, 1e6), on, 128, schedules=(("1f1b", 1), ("interleaved", 2)), compiled=True)
    counts = Counter[str]()

    def counted(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def called(*args: Any) -> Any:
            counts[name] += 1
            return method(*args)

        monkeypatch.setattr(kind, name, called)

    for kind, name in ((Search, "run"), (Estimates, "begun"), (Prices, "_compute"), (Prices, "_spend")):
        counted(kind, name)
    found = Search(asked).run()
    counts.clear()
    whole = saved(asked, found)
    plainly = counts.copy()
    counts.clear()
    assert bought(asked, found.best[0], found.best[1:6]) == whole and any(whole.values())
    assert plainly["run"] == counts["run"] == 4
    assert counts["_compute"] <= plainly["_compute"] / 4 and counts["_spend"] < 0.6 * plainly["_spend"], counts
    assert counts["begun"] < 0.7 * plainly["begun"], (counts, plainly)


def test_stages_that_send_over_the_same_links_are_found_once() -> None:
    asked = task(pins={"pp": 2})
    first = Search(asked)
    first.run()
    choice = Choice(Spread(stages=2, copies=2, parts=2), 2)
    for what, same in {
        "GB of memory": True,
        "GB/s to the host": True,
        "GB/s inside hosts": False,
        "GB/s between hosts": False,
    }.items():
        other = Search(with_more(asked)[what], first)
        assert (other.lane(choice) is first.lane(choice)) == same, what
    alone = choice._replace(spread=Spread(stages=1, copies=4, parts=2))
    between = Search(with_more(asked)["GB/s between hosts"], first)
    assert between.lane(alone) is first.lane(alone), "copies alone send between hosts"


def test_experts_that_no_ranks_share_are_as_the_rest_of_a_model() -> None:
    """The engine has them in the same chunks; they were counted as chunks of their own, also with ep = 1."""
    for zero in (1, 2, 3):
        plain, mixed = (Search(task(each)) for each in (model(), with_experts(model())))
        choice = Choice(Spread(copies=8), 2, zero=zero)
        one, other = plain.simulated(plain.estimate(choice)), mixed.simulated(mixed.estimate(choice))
        assert (other.wire, other.memory) == (one.wire, one.memory)
        assert {**other.terms, "copies": 0.0} == {**one.terms, "copies": 0.0}


@pytest.mark.parametrize("blocks", [2, 8])
def test_gradients_of_stacked_experts_follow_a_backward_a_block_at_once(blocks) -> None:
    """Those of the last block wait for all of it: of two blocks on a stage of a Mixtral nearly all was hidden."""
    asked = task(with_experts(model(blocks)), replace(cluster(hosts=1, count=2), contention=0.0))
    search, choice = Search(asked), Choice(Spread(copies=2), 8)
    own = search._own(choice.spread, search.cuts(choice), 0)
    seconds = asked.cluster.hosts[0].inside.seconds("all_reduce", 4 * own.trained, 2)
    dense, mixed = (Search(replace(asked, profile=each)).estimate(choice).terms["copies"]
                    for each in (model(blocks), asked.profile))  # fmt: skip
    assert dense < seconds / (blocks + 2) <= mixed < seconds, "a block of as many, and two ends"
