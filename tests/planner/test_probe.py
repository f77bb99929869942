"""Small models are run for a moment before a plan is chosen: what they take scales what is counted."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.comm import World
from shoal.device import CPU
from shoal.planner import Subject, kept, running
from shoal.planner import probe as module
from shoal.planner.ask import numbers_of
from shoal.planner.cluster import between
from shoal.planner.computing import FORWARD, Longer, seconds_of
from shoal.planner.degrees import Spread
from shoal.planner.measure import here
from shoal.planner.probe import probe, run_together
from shoal.planner.probed import ByRows, Factors
from shoal.planner.profile import profile
from shoal.planner.running import Ran
from shoal.planner.search import Search
from shoal.planner.task import Choice, Probed, Task
from shoal.precision import precision
from tests.planner.models import cluster
from tests.planner.models import task as made
from tests.pool import run_ranks

pytestmark = pytest.mark.usefixtures("cache_of_its_own")
PAUSE = 0.01


class Slow(nn.Module):
    """Waits in its forward, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and not x.is_meta:
            self.runs += 1
        time.sleep(1.05 * PAUSE)  # measured it may be a hair shorter
        noise = torch.rand(()) + random.random() + np.random.rand()
        return self.linear(self.norm(x)) * (noise > 0)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return model(batch["x"]).square().sum(), len(batch["x"])


def asked(factory: Callable[[], nn.Module], microbatch: int | None = 2) -> tuple[Subject, Task]:
    """A task of two ranks here."""
    subject = subject_of(factory)
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    numbers = numbers_of(subject.precision, optimizer)
    return subject, Task(profile(subject, {}), here(2, 2, torch.float32), 64, numbers, microbatch)


def subject_of(factory: Callable[[], nn.Module]) -> Subject:
    return Subject(factory, loss, {"x": torch.ones(4)}, 1, precision("fp32"))


def test_a_forward_that_waits_is_predicted_to_wait():
    subject, task = asked(Slow)
    probed = probe(subject, replace(task, cluster=replace(task.cluster, hosts=task.cluster.hosts[:1])))
    ((rows, forward, *_),) = probed.probed
    assert rows == 2 and forward > 1
    prices = Search(probed).prices
    forward = sum(prices.spent(place, Spread(), 2).forward for place in range(len(prices.pieces)))
    assert PAUSE <= forward / probed.cluster.hosts[0].device.crowd < 3 * PAUSE
    half = Search(probed).estimate(Choice(Spread(copies=1), 2)).terms["compute"]
    assert half > 32 * PAUSE, "of 64 rows"


class Waits(nn.Module):
    """A block that waits in its forward. `once`: a second one within a step fails."""

    def __init__(self, once: bool = False) -> None:
        super().__init__()
        self.linear, self.once = nn.Linear(4, 4), once

    def forward(self, x: Tensor) -> Tensor:
        if self.once and torch._C._current_graph_task_id() >= 0:  # inside a backward
            raise RuntimeError("not again, please")
        time.sleep(1.05 * PAUSE)
        return torch.tanh(self.linear(x))


def of_blocks(once: bool = False) -> nn.Module:
    return nn.Sequential(Waits(once), Waits(once), Waits(once))


@pytest.mark.parametrize("way", ["selective", "full"])
def test_blocks_that_are_computed_again_are_predicted_to_wait_again(way):
    subject, task = asked(of_blocks)
    known = probe(subject, replace(task, cluster=replace(task.cluster, hosts=task.cluster.hosts[:1])))
    prices = Search(known).prices
    again = sum(prices.again(place, Spread(), 2)[way][0] for place in range(len(prices.pieces)))
    assert 2 * PAUSE < again / known.cluster.hosts[0].device.crowd < 9 * PAUSE, "three blocks"


def test_what_cannot_be_computed_again_is_counted(caplog):
    subject, task = asked(partial(of_blocks, True))
    with caplog.at_level("INFO"):
        ((_, forward, _, some, full),) = probe(subject, task).probed
    assert some == full == forward > 1 and "not again, please" in caplog.text


def test_what_runs_have_said_comes_on_top():
    subject, task = asked(Slow)
    device = task.cluster.hosts[0].device
    later = replace(device, slower=2.0, launch=2 * device.launch, bandwidth=device.bandwidth / 2,
                    flops={name: rate / 2 for name, rate in device.flops.items()})  # fmt: skip
    learnt = replace(task, cluster=replace(task.cluster, hosts=(replace(task.cluster.hosts[0], device=later),)))
    first, second = (Search(probe(subject, each, "one")).prices.spent(0, Spread(), 2) for each in (task, learnt))
    assert second.forward == pytest.approx(2 * first.forward) and second.backward == pytest.approx(2 * first.backward)


def test_nothing_of_the_callers_is_touched():
    mine = Slow().eval()
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    subject, task = asked(lambda: mine)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    threads = torch.get_num_threads()
    assert probe(subject, task).probed
    assert all(torch.equal(value, before[name]) for name, value in mine.state_dict().items())
    assert not mine.training and not mine.runs and all(each.grad is None for each in mine.parameters())
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert str(states[2]) == str(np.random.get_state(legacy=False)) and torch.get_num_threads() == threads


def test_it_is_run_once_while_nothing_changes(monkeypatch):
    subject, task = asked(Slow)
    first = probe(subject, task, "settings")
    ran = kept.read(next(key for key in kept._all() if key.startswith("ran")))
    assert ran is not None and ran["ran"][0][0] == 2
    monkeypatch.setattr(module, "run", lambda *_: pytest.fail("run again"))
    assert probe(subject, task, "settings") == first


def test_what_other_work_may_have_made_long_is_not_kept(monkeypatch):
    """A time of a loaded machine was kept for a month."""
    subject, task = asked(Slow)
    for seconds, again in ((10.0, True), (10.0, True), (1e-3, True), (1e-3, False)):
        runs = []
        monkeypatch.setattr(
            module, "run", lambda *_, took=seconds, runs=runs: runs.append(1) or (Ran(2, took, took, 0.0, 0.0),)
        )
        assert probe(subject, task, "settings").probed and bool(runs) == again


def test_rows_grow_until_one_microbatch_takes_long(monkeypatch):
    monkeypatch.setattr(running, "ENOUGH", 1.0)

    def without_statistics() -> nn.Module:
        made = Slow()
        made.norm = nn.Identity()
        return made

    subject, task = asked(without_statistics, None)
    assert [rows for rows, *_ in probe(subject, task).probed] == [1, 2, 4, 8, 16, 32, 64]
    monkeypatch.setattr(running, "ENOUGH", PAUSE)
    assert [rows for rows, *_ in probe(subject, task).probed] == [1]


@pytest.mark.parametrize(("seconds", "timed"), [((0.1, 0.14), [1, 4]), ((0.2,), [1]), ((0.05, 0.07, 0.4), [1, 4, 16])])
def test_a_second_number_of_rows_is_timed(monkeypatch, seconds, timed):
    """A GPT one row of which took longer than usual was predicted to take twice as long with eight as it does: what
    comes once was counted with each."""
    takes = dict(zip((1, 4, 16, 64), seconds, strict=False))
    a_round = lambda _, rows: running.Timed(0.0, takes[rows], (0.0, 0.0), 1.0)  # noqa: E731
    monkeypatch.setattr(running._Timer, "_round", a_round)
    ran = running.run(subject_of(Slow), (1, 4, 16, 64), 1, running.Alone())
    assert [each.rows for each in ran] == timed


@pytest.mark.parametrize("name", ["bf16", "fp64"])
def test_numbers_of_the_data_are_cast_as_an_engine_casts_them(name):
    """Models of images in bf16 did not run, so what they take was counted."""
    subject = replace(subject_of(of_linear), precision=precision(name))
    ((rows, *_),) = running.run(subject, (2,), 1, running.Alone())
    assert rows == 2


def of_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_of_ranks_that_share_a_core_the_time_on_it_counts():
    """Who waits for whom changes from one moment to the next: by the clock the same microbatches took 79 to 140 ms."""
    began, ended = running.Clock(1.0, 1.0, 1.0), running.Clock(1.5, 1.2, 1.3)
    assert ended.since(began, 1.0) == pytest.approx(0.5)
    assert ended.since(began, 2.0) == pytest.approx(0.2 + 0.2), "0.2 s on the core, and as long for the other"
    assert ended._replace(queued=None).since(began, 2.0) == pytest.approx(0.5), "where the system does not tell"
    now = running.Clock.now()
    assert running.Clock.now().since(now, 2.0) < 5

    def whole(crowd: float) -> float:
        every = [[running.Timed(1.0, 1.0, (0.0, 0.0), 1.0)], [running.Timed(2.0, 2.0, (0.0, 0.0), 1.0)]]
        merged = running._merged(4, every, crowd)
        return merged.forward + merged.backward

    assert (whole(1.0), whole(2.0)) == pytest.approx((4.0, 3.0))


def test_one_round_that_was_held_up_does_not_say_what_forward_takes():
    """A backward of half a second made of a forward of 6 us what was kept for a month."""
    every = [[running.Timed(0.001, 0.002, (0.0, 0.0), 1.0)] * 4 + [running.Timed(0.001, 0.5, (0.0, 0.0), 1.0)]]
    merged = running._merged(4, every, 1.0)
    assert (merged.forward, merged.backward) == pytest.approx((0.001, 0.002))


def test_python_that_comes_once_is_timed_after_the_model_itself(monkeypatch):
    """By what it takes on the core then, not after products that are large: of ranks that share cores and caches it
    takes as long as beside this model, four times, where a process alone finds half as much."""
    every = [[running.Timed(1.0, 1.0, (0.0, 0.0), cold) for cold in colds] for colds in ((2.0, 4.0), (3.0, 90.0))]
    assert running._merged(4, every, 2.0).cold == 3.5, "the median over rounds and ranks"
    assert running._merged(4, [[each._replace(cold=0.5) for each in every[0]]], 1.0).cold == 1.0
    subject, task = asked(Slow, 8)
    monkeypatch.setattr(running.OnceMore, "seconds", lambda self: 1.0)
    before = task.cluster.hosts[0].device
    known = probe(subject, task)
    assert [each.device for each in known.cluster.hosts] == [replace(before, cold=1.0)] * len(task.cluster.hosts)
    ran = [Ran(rows, 1.0, 1.0, 0.0, 0.0, cold) for rows, cold in ((2, 4.0), (8, 9.0), (32, 5.0))]
    assert probe(subject, task, together=ran).cluster.hosts[0].device.cold == 5.0, "whatever the rows"
    ran = Ran(8, 1.0, 1.0, 0.0, 0.0)
    assert probe(subject, task, together=[ran]).cluster.hosts[0].device == before, "where it was not timed"


def test_a_part_of_a_microbatch_that_is_given_is_run_too(monkeypatch):
    """Ranks that divide each row take as much Python as one that has it whole."""
    subject, task = asked(Slow, 8)  # of one row its norm refuses to be
    short, long = probe(subject, task).probed
    assert (short[0], long[0]) == (2, 8) and min(short[1], long[1]) > 1
    subject, task = asked(Slow, 4)
    assert [rows for rows, *_ in probe(subject, task).probed] == [4], "what does not run is left out alone"
    subject, task = asked(Slow, 8)
    monkeypatch.setattr(running, "ENOUGH", PAUSE)
    assert [rows for rows, *_ in probe(subject, task).probed] == [8]


def test_of_a_slow_model_few_microbatches_are_run(monkeypatch):
    subject, task = asked(Slow)
    took, timer = [], running._Timer._round
    monkeypatch.setattr(running._Timer, "_round", lambda self, *rows: took.append(rows[0]) or timer(self, *rows))
    assert probe(subject, task).probed and took == [2] * (1 + running.ROUNDS)
    took.clear()
    monkeypatch.setattr(running, "LONGEST", PAUSE / 2)
    ((_, forward, *_),) = probe(subject, task).probed
    assert took == [2, 2] and forward > 0


class SlowAtFirst(Slow):
    """Sets itself up in its first forward, as what imports or compiles there does."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        time.sleep(50 * PAUSE * (self.runs == 1))
        return found


def test_a_slow_first_microbatch_is_none_that_is_timed(monkeypatch):
    """A ResNet whose first one took 2.7 s was predicted to take as long in each step."""
    monkeypatch.setattr(running, "LONGEST", PAUSE)
    rates = []
    for factory in (Slow, SlowAtFirst):
        ((_, forward, *_),) = probe(*asked(factory)).probed
        rates.append(forward)
    assert rates[1] < 5 * rates[0]


class Real(Slow):
    """Fails where there are values."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            raise RuntimeError("no values, please")
        return super().forward(x)


def test_what_is_large_or_fails_or_is_elsewhere_is_counted(monkeypatch, caplog):
    subject, task = asked(Slow)
    elsewhere = replace(task, cluster=cluster())
    assert probe(subject, elsewhere) is elsewhere
    with monkeypatch.context() as patch:
        patch.setattr(module, "MOST_PARAMETERS", 27)  # of 28
        assert probe(subject, task) is task
    with monkeypatch.context() as patch:
        patch.setattr(module.dist, "is_initialized", lambda: True)
        patch.setattr(module.dist, "get_world_size", lambda: 2)
        assert probe(subject, task) is task, "a forward may wait for the other process"
    with caplog.at_level("INFO"):
        assert probe(replace(subject, factory=Real), task).probed == ()
    assert "no values, please" in caplog.text


def ran(world, cache: str, of_others: Callable[[], nn.Module]) -> list[tuple[Ran, ...]]:
    os.environ["XDG_CACHE_HOME"] = cache
    try:
        subject = subject_of(of_others if world.rank else Slow)
        return [run_together(world, subject, 64, 2, "settings") for _ in range(2)]
    finally:
        del os.environ["XDG_CACHE_HOME"]


def test_ranks_that_share_cores_run_it_at_once_and_once():
    told = run_ranks(ran, 2, os.environ["XDG_CACHE_HOME"], Slow)
    assert told[0] == told[1], "all ranks have the same"
    first, second = told[0]
    ((rows, forward, backward, *_),) = first
    assert second == first and rows == 2 and forward > PAUSE and backward > 0
    subject, task = asked(Slow)
    known = probe(subject, task, "settings")
    assert known.probed == probe(subject, task, together=first).probed, "what was kept is what is used"
    ((_, factor, *_),) = known.probed
    prices = Search(task).prices
    counted = sum(prices.spent(place, Spread(), 2).forward for place in range(len(prices.pieces)))
    assert forward == pytest.approx(factor * counted), "that ranks crowd each other is not counted twice"


@pytest.mark.parametrize("microbatch", [8, 16])
def test_what_ranks_ran_to_choose_a_microbatch_is_known_where_it_is_given(microbatch, monkeypatch):
    """It was timed anew, by a rank alone: a step was predicted to take less by 40% than while it was searched."""
    subject, task = asked(Slow, None)
    key = module._key(subject, module._tried(task.rows, None), kept.threads_of(CPU, 2), "settings", 2)
    module._keep(key, [Ran(rows, (1 + rows) / 1e3, (2 + rows) / 1e3, 0.0, 0.0) for rows in (1, 4, 16)])
    monkeypatch.setattr(module, "run", lambda *_: pytest.fail("it was run"))
    prices = [Search(probe(subject, replace(task, microbatch=each), "settings")).prices for each in (None, microbatch)]
    free, given = (each.spent(0, Spread(), microbatch) for each in prices)
    assert (given.forward, given.backward) == pytest.approx((free.forward, free.backward))
    monkeypatch.setattr(module, "run", lambda *_: [Ran(3, 1.0, 2.0, 0.0, 0.0)])
    ((rows, *_),) = probe(subject, replace(task, microbatch=3), "settings").probed
    assert rows == 3, "of other rows nothing is known"


def test_a_rank_that_cannot_run_it_keeps_nobody_waiting():
    assert run_ranks(ran, 2, os.environ["XDG_CACHE_HOME"], Real) == [[(), ()], [(), ()]]


def ran_large(world) -> tuple[Ran, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_PARAMETERS", 27)  # of 28
        patch.setattr(module, "run", lambda *_: pytest.fail("run"))
        return run_together(world, subject_of(Slow), 4, 2)


def test_no_ranks_run_what_is_large_or_alone():
    subject = subject_of(lambda: pytest.fail("built"))
    assert run_together(World.single("cpu"), subject, 4, 2) == ()
    assert run_ranks(ran_large, 2) == [(), ()]


def test_rows_that_were_not_timed_take_as_long_each_as_those_did_beyond_the_first(monkeypatch):
    """They took as long each as the most that were timed do on average, of which a part comes once with all, and
    between two numbers a mean of what those take each."""
    subject, task = asked(Slow, None)

    def seconds(ran: list[Ran], rows: int) -> tuple[float, float]:
        monkeypatch.setattr(module, "run", lambda *_: ran)
        prices = Search(probe(subject, replace(task, rows=32))).prices
        spent = [prices.spent(place, Spread(), rows) for place in range(len(prices.pieces))]
        return sum(each.forward for each in spent), sum(each.backward for each in spent)

    both = [Ran(1, 5.0, 10.0, 0.0, 0.0), Ran(4, 8.0, 19.0, 0.0, 0.0)]  # 4 s and 1 s a row; 7 s and 3 s
    assert seconds(both, 4)[0] == pytest.approx(8.0)
    assert seconds(both, 2) == pytest.approx((6.0, 13.0), rel=1e-4), "on the line between both"
    assert seconds([Ran(1, 5.0, 10.0, 0.0, 0.0), Ran(4, 17.0, 40.0, 0.0, 0.0)], 2) == pytest.approx(
        (9.0, 20.0), rel=1e-4
    )
    assert seconds(both, 8)[0] == pytest.approx(8 + 4 * 1.5), "0.75 of the mean at least"
    assert seconds(both, 16)[1] == pytest.approx(19 + 12 * 3.5625, rel=1e-4)
    assert seconds([Ran(1, 5.0, 9.0, 0.0, 0.0), Ran(4, 18.5, 36.0, 0.0, 0.0)], 8) == pytest.approx(
        (36.5, 72.0), rel=1e-4
    )
    assert seconds([*both, Ran(16, 8.0, 8.0, 0.0, 0.0)], 32)[0] == pytest.approx(8 + 16 * 0.375)


def test_what_backward_computes_again_of_rows_that_were_not_timed_is_on_the_line_between_those_that_were(monkeypatch):
    """Hooks of Python take as long of one row as of four: a mixture of experts was predicted to keep operations of two
    rows in half the time that it does."""
    subject, task = asked(of_blocks, None)

    def factors(ran: list[Ran]) -> dict[int, tuple[float, float]]:
        monkeypatch.setattr(module, "run", lambda *_: ran)
        return {each.rows: (each.some, each.full) for each in probe(subject, replace(task, rows=16)).probed}

    def of(rows: int, some: float, full: float) -> tuple[float, float]:
        return factors([Ran(rows, 5.0, 10.0, some, full)])[rows]

    found = factors([Ran(1, 5.0, 10.0, 8.0, 4.0), Ran(4, 8.0, 19.0, 8.0, 10.0)])
    assert found[2] == pytest.approx(of(2, 8.0, 6.0)) and found[8] == pytest.approx(of(8, 8.0, 18.0))
    found = factors([Ran(1, 5.0, 10.0, 9.0, 0.0), Ran(4, 8.0, 19.0, 8.0, 10.0)])
    assert found[8] == pytest.approx(of(8, 8.0, 20.0)), "no less of more rows; in proportion where only one was timed"


def test_ranks_that_divide_tokens_take_as_long_a_row_as_of_fewer_rows():
    factors = Probed(2, 8.0, 6.0, 4.0, 2.0), Probed(4, 4.0, 3.0, 2.0, 1.0)
    task = replace(made(), probed=factors)
    by_rows, own = ByRows(task, task.cluster.devices[0]), Search(task).prices.pieces[1]
    assert by_rows.of(own, Spread(), 4) == Factors(Longer(4.0, 4.0), Longer(3.0, 3.0), 2.0, 1.0)
    assert by_rows.of(own, Spread(tokens=2), 4) == Factors(Longer(8.0, 8.0), Longer(6.0, 6.0), 4.0, 2.0)


@pytest.mark.parametrize(("cold", "launched"), [(40.0, 3.0), (1.5, 1.5), (1.0, 1.0)])
def test_each_rank_of_those_that_divide_matrices_launches_all_and_has_a_share_of_the_work(cold, launched):
    """A forward of all 80 operations takes 3 s and 1 s a row, where a launch is said to take 1/80 s: no more of the 3 s
    are launches than 80 of them take where each comes once."""
    asked = made()
    device = replace(asked.cluster.devices[0], launch=1 / 80, on_host=True, cold=cold)
    parts, how = asked.profile.parts, (device, asked.numbers, False)

    def counted(rows: int) -> float:
        return sum(seconds_of(part, Spread(), rows, FORWARD, *how) for part in parts)

    probed = tuple(Probed(rows, (3 + rows) / counted(rows), 1.0, 1.0, 1.0) for rows in (2, 4))
    longer = ByRows(replace(asked, probed=probed), device).of(parts, Spread(parts=4), 4).forward
    taken = sum(seconds_of(part, Spread(parts=4), 4, FORWARD, *how, longer) for part in parts)
    assert taken == pytest.approx(launched + (3 + 4 - launched) / 4)


def test_between_two_numbers_of_rows_factors_follow_the_logarithm():
    table = [(1, 4.0), (4, 2.0), (16, 1.0)]
    assert [between(table, rows) for rows in (0.5, 1, 2, 4, 8, 16, 64)] == pytest.approx([4, 4, 3, 2, 1.5, 1, 1])
    assert between([], 3) == 1.0
