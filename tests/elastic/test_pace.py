"""Which ranks count as slow, and what becomes of their node."""

from __future__ import annotations

import random
import statistics
import time
from types import SimpleNamespace

import pytest

from shoal.comm.ledger import Ledger
from shoal.elastic import pace as room
from shoal.elastic.events import SAVE, Draining, Limits, Say, Slow, Stop, Tick
from shoal.elastic.membership import RUNNING
from shoal.elastic.messages import Paces
from shoal.elastic.pace import STALE, Company, Pace, Stragglers, paces_of
from shoal.jobs.pace import OUTLIERS, SKIPPED, WINDOW, OwnPace
from shoal.launch.board import BUSY, STEP, Progress
from shoal.mesh import Mesh
from shoal.plan import Plan
from tests.elastic.clock import in_a_loop
from tests.elastic.cluster import Member, close, generation, until
from tests.elastic.test_membership import apply, ended, formed, joined, running

pytestmark = pytest.mark.fast


def told(*nows: float, parts: tuple[int, ...] = (), best: float = 0.1, number: int = 1) -> Paces:
    places = list(parts) or [0] * len(nows)
    return Paces(number, list(range(len(nows))), places, list(nows), [best] * len(nows))


@pytest.mark.parametrize(
    "pace, others, times",
    [
        (Pace(0, 0, 1.0, 0.1), [], 1.0),  # nobody to compare with
        (Pace(0, 0, 1.0, 1.0), [Pace(1, 0, 0.1, 0.1)], 10.0),
        (Pace(0, 0, 1.0, 0.1), [Pace(1, 0, 1.0, 0.1)], 1.0),  # all are as slow
        (Pace(0, 0, 1.0, 1.0), [Pace(1, 0, 0.1, 0.1), Pace(2, 0, 1.0, 1.0)], 10.0),  # one of two is fast
        (Pace(0, 0, 1.0, 1.0), [Pace(1, 1, 0.1, 0.1)], 1.0),  # a longer stage, as ever
        (Pace(0, 0, 1.0, 0.1), [Pace(1, 1, 0.2, 0.1), Pace(2, 1, 0.1, 0.1)], 10 / 1.5),  # a stage that has become slow
        (Pace(0, 0, 1.0, 0.1), [Pace(1, 1, 5.0, 0.5)], 1.0),  # all stages have
    ],
)
def test_a_rank_is_compared_with_those_of_its_part_else_with_its_own_past(pace, others, times):
    assert Company([[pace], others]).times_of(pace, [pace]) == pytest.approx(times)


def test_each_of_many_is_compared_with_all_others_and_not_with_itself():
    """Beside the plain way: for each member, the figures of all others."""
    draw = random.Random(1)
    for _ in range(200):
        members = [
            [Pace(0, draw.choice((0, 0, 1)), draw.randint(1, 9), 1.0) for _ in range(draw.randint(1, 3))]
            for _ in range(draw.randint(1, 7))
        ]
        company = Company(members)
        for number, own in enumerate(members):
            others = [pace for other, theirs in enumerate(members) if other != number for pace in theirs]
            for pace in own:
                peers = [each.now for each in others if each.part == pace.part]
                grown = max(1.0, statistics.median(each.now for each in others)) if others else pace.now
                times = pace.now / (statistics.median_low(peers) if peers else grown)
                assert company.times_of(pace, own) == pytest.approx(times)


def test_a_member_is_slow_once_it_was_so_for_seconds_and_what_is_old_does_not_count():
    found = Stragglers()
    for second in range(7):
        found.take("a", told(0.1, 0.1), second)
        found.take("b", told(0.1, 0.5 if second != 1 else 0.2), second)
        straggler = found.look(1, ["a", "b"], second)
        assert (straggler is not None) == (second == 7)
    found.take("b", told(0.1, 0.5), 7.0)
    straggler = found.look(1, ["a", "b"], 7.0)
    assert straggler is not None and straggler.text == "rank 1 of b is 5.0 times as slow as others"
    assert found.look(2, ["a", "b"], 7.0) is None and found.look(1, ["b"], 7.0) is None
    assert found.look(1, ["a", "b"], 7.1 + STALE) is None


def test_a_member_tells_of_the_slowest_rank_of_each_part_that_trains():
    def shown(part: int, pace: float, training: bool = True) -> Progress:
        return Progress(9, STEP if training else BUSY, 0.0, 0.0, 0.0, "", part, pace, 0.1)

    boards = {4: shown(0, 0.3), 5: shown(0, 0.4), 6: shown(1, 0.2), 7: shown(1, 9.0, training=False), 8: Progress()}
    assert paces_of(3, boards) == Paces(3, [5, 6], [0, 1], [0.4, 0.2], [0.1, 0.1])
    assert paces_of(3, {8: Progress()}) is None


@pytest.mark.parametrize("wrong", [told(0.0), told(-1.0), told(float("inf")), Paces(1, [0], [0, 0], [1.0], [1.0])])
def test_what_cannot_be_a_pace_is_refused(wrong):
    with pytest.raises(ValueError, match="above 0"):
        Stragglers().take("a", wrong, 0.0)


def test_a_slow_member_is_put_aside_longer_each_time_and_comes_back_on_trial():
    machine = running("a", "b", "c")
    now, asides = 10.0, []
    for number in (1, 3, 5):
        decisions = machine.apply(Slow(now, "b", number, "rank 1 of b is slow"))
        assert Stop(number, SAVE, "b is slow") in decisions
        (said,) = [each.text for each in decisions if isinstance(each, Say)]
        asides.append(float(said.rpartition("for ")[2].removesuffix(" s")))
        assert said.startswith("rank 1 of b is slow: b is put aside")
        for name in "abc":
            decisions = apply(machine, ended(now, name, number, step=number, holds=True))
        assert formed(decisions).names == ["a", "c"] and formed(decisions).live
        assert not machine.due(now + asides[-1] - 0.1)
        now += asides[-1]
        assert machine.due(now)
        stop = apply(machine, Tick(now))
        assert [each.why for each in stop] == ["b joins"]
        apply(machine, ended(now, "a", number + 1, step=number + 1, holds=True))
        assert formed(apply(machine, ended(now, "c", number + 1, step=number + 1))).names == ["a", "b", "c"]
        now += 20.0
    assert asides == [8, 16, 32]
    now += machine.limits.window
    machine.apply(Slow(now, "b", 7, ""))
    for name in "abc":
        apply(machine, ended(now, name, 7, step=9))
    assert machine.roster.backoff.left("b", now) == 8  # it was fast for long


def test_a_slow_member_stays_where_too_few_would_be_left_and_serves_where_another_one_goes():
    machine = running("a", "b", limits=Limits(minimum=2))
    assert not machine.can_spare("b") and apply(machine, Slow(5.0, "b", 1, "")) == []
    apply(machine, joined(6.0, "c"), Tick(8.0), ended(8.1, "a", 1))
    assert formed(apply(machine, ended(8.1, "b", 1))).names == ["a", "b", "c"]
    apply(machine, Draining(8.5, "c"))
    assert not machine.can_spare("b")
    machine = running("a", "b", "c", limits=Limits(minimum=2))
    assert apply(machine, Slow(5.0, "b", 7, "")) == [] and apply(machine, Slow(5.0, "d", 1, "")) == []
    apply(machine, Slow(5.0, "b", 1, ""), ended(5.1, "a", 1), ended(5.1, "b", 1))
    assert formed(apply(machine, ended(5.1, "c", 1))).names == ["a", "c"]
    assert machine.phase == RUNNING
    apply(machine, ended(6.0, "c", 2, "killed", 4, ranks=0))
    assert formed(apply(machine, ended(6.0, "a", 2, "lost"))).names == ["a", "b"]


def test_supervisors_tell_the_pace_of_their_ranks_and_the_slow_one_trains_no_more(monkeypatch):
    monkeypatch.setattr(room, "SECONDS", 0.5)

    def member(name: str, seconds: float) -> Member:
        return Member(name, paces=lambda start: told(seconds, number=start.generation))

    @in_a_loop
    async def run() -> None:
        a = member("a", 0.1).lead(Limits(minimum=3, settle=0.1))
        b, c = member("b", 0.1).join(a), member("c", 1.0).join(a)
        await until(lambda: generation(a, b, c) == 1)
        await until(lambda: any("and stays: less than 3 node(s)" in line for line in a.said))
        d = member("d", 0.1).join(a)
        await until(lambda: generation(a, b, d))
        assert any("rank 0 of c is 10.0 times as slow as others: c is put aside for 8 s" in line for line in a.said)
        assert a.runs.events[-1].endswith("c is put aside for 8 s") and a.runs.why == "c is slow" and a.runs.live
        await close(a, b, c, d)

    run()


def test_what_a_rank_measures_is_its_own_work_for_a_sample():
    ledger, shares = Ledger(), [[0, 1], [2, 3]]
    dealing = SimpleNamespace(cut=lambda ids: SimpleNamespace(microbatches=shares))
    parts = SimpleNamespace(mesh=Mesh(Plan(dp=2, tp=2), 3, 4), runner=SimpleNamespace(dealing=dealing))
    own = OwnPace(SimpleNamespace(ledger=ledger, parts=parts))
    assert own.part == Mesh(Plan(dp=2, tp=2), 1, 4).part != Mesh(Plan(dp=2, tp=2), 2, 4).part
    experts = [Mesh(Plan(dp=4, ep=2), rank, 4).part for rank in range(4)]
    assert experts[0] == experts[2] != experts[1] == experts[3]

    def step(seconds: float, waits: float) -> None:
        with own.step(SimpleNamespace(ids=None)):
            time.sleep(seconds)
            ledger.wait(waits)

    for _ in range(SKIPPED - 1):
        step(0.02, 0.0)
    for number in range(WINDOW):
        assert own.seconds == 0.0
        step(0.05 if number < OUTLIERS else 0.004, -0.036)  # as if it had computed for 0.036 s more
    assert own.seconds == own.best == pytest.approx(0.01, rel=0.3)
    shares.clear()
    before = own.seconds
    step(0.02, 0.0)
    assert own.seconds == before  # it had no sample
