"""State that only one rank had goes on from its buddy's memory, as the run would have gone that was never disturbed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shoal import Plan
from shoal.checkpoint.buddy.ring import PURPOSE, Ring, buddies
from shoal.comm.world import World
from shoal.engine import Engine
from shoal.errors import CheckpointError, LaunchError, UserError
from shoal.models import GPT, MLP, GPTConfig, MoEConfig, causal_lm, regression
from shoal.optim.buddy import steps_between
from shoal.precision import precision
from tests.assembly.test_regroup import FAILS, SOON, STEPS, Row, _trains, _whole, again, at, die, weights
from tests.assembly.test_replan import plan_of
from tests.parity.cases import CASES
from tests.pool import disposable_ranks, reference, run_ranks


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        ("ab", [1, 0]),
        ("aaa", [1, 2, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("aabbc", [2, 3, 4, 0, 1]),
        ("aaab", [3, 0, 1, 2]),  # one host has more than half of them
    ],
)
def test_a_buddy_is_on_another_host(hosts, found):
    """Found by hand: each rank with the ranks of its host, then on by as many places as the largest host has."""
    assert buddies(hosts) == found


def _same(old: dict[str, Any], dead: dict[int, str], **more: Any) -> Row:
    """A rank comes for each that dies: the order of sums stays the same, and so do all bits."""
    old = {"buddy": 2, **old}
    return Row("", old, old, dead, joins=len(dead), **more)


_SMALL = {"dp": 3, "zero": 3, "exchange": {"name": "allreduce", "chunk_bytes": 4096}}  # several chunks
_HOST, _DISK = {"host": "1GiB"}, {"host": "1GiB", "disk": "a directory"}
SAME = {
    "zero 1": _same({"dp": 2, "zero": 1}, {1: "backward"}),
    "zero 2": _same({"dp": 2, "zero": 2}, {0: "before the ballot"}),
    "zero 3": _same({"dp": 3, "zero": 3}, {1: "after the ballot"}),
    "all have updated": _same({"dp": 3, "zero": 1}, {2: "after its update"}, precision="bf16"),
    "a stage": _same({"pp": 2}, {0: "backward"}),
    "the last stage": _same({"pp": 2}, {1: "after the ballot"}),
    "two copies of stages": _same({"pp": 2, "dp": 2, "zero": 1}, {1: "after its update"}),
    "a part of layers": _same({"tp": 2}, {0: "after the ballot"}),
    "parts that are cut": _same({"dp": 2, "tp": 2, "zero": 3}, {3: "after the ballot"}),
    "experts": _same({"dp": 2, "ep": 2}, {1: "before the ballot"}, case="moe"),
    "fp16": _same({"dp": 2, "zero": 2}, {1: "after the ballot"}, precision="fp16"),
    "half masters": _same({"dp": 2, "zero": 1}, {0: "after the ballot"}, precision={"name": "bf16", "master": "split"}),
    "rounded at random": _same(
        {"dp": 2, "zero": 1}, {0: "after the ballot"}, precision={"name": "bf16", "master": "stochastic"}
    ),
    "each element is clipped": _same({"dp": 2, "zero": 1}, {0: "after the ballot"}, more={"clip_value": 1e-3}),
    "on the host": _same({"dp": 2, "zero": 3, "memory": _HOST}, {1: "after the ballot"}, precision="bf16"),
    "on the disk": _same({"dp": 2, "zero": 3, "memory": _DISK}, {0: "before the ballot"}),
    "updates made later": _same({"dp": 2, "zero": 3, "memory": {**_HOST, "update": "deferred"}}, {1: "backward"}),
    "statistics": _same({"pp": 2}, {0: "after the ballot"}, case="resnet-batchnorm"),
    "some frozen, some never reached": _same({"dp": 2, "zero": 3}, {1: "after the ballot"}, case="unused-frozen"),
    "frozen where weights pass": _same(
        {"dp": 2, "zero": 3, "memory": _HOST}, {0: "after its update"}, case="unused-frozen"
    ),
    "compiled": _same({"dp": 2, "zero": 1, "compile": "aot_eager"}, {1: "after the ballot"}),
    "a snapshot each step": _same({"dp": 2, "zero": 3, "buddy": 1}, {1: "after its update"}),
    "a log from the beginning": _same({"dp": 2, "zero": 3, "buddy": 100}, {1: "after its update"}),
    "a snapshot on its way": _same({"dp": 3, "zero": 3}, {1: "on its way to a buddy"}, hosts="abc"),
    "gradients on their way": _same({"dp": 3, "zero": 3, "buddy": 100}, {1: "on its way to a buddy"}, hosts="abc"),
    "a snapshot half written": _same({"dp": 3, "zero": 3}, {1: "as it writes for its buddy"}),
    "gradients half written": _same({**_SMALL, "buddy": 100}, {1: "as it writes for its buddy"}),
    "a snapshot that is not told": _same({"dp": 3, "zero": 3}, {1: "on its way to a buddy"}),
    "gradients that are not told": _same({"dp": 3, "zero": 3, "buddy": 100}, {1: "on its way to a buddy"}),
    "its buddy is on its host": _same({"dp": 3, "zero": 3}, {1: "after the ballot"}, hosts="aab"),
    "its buddy is on another host": _same({"dp": 3, "zero": 3}, {0: "after the ballot"}, hosts="aab"),
}
"""Which ranks die where, under plans by which they have state that no other has; all in step FAILS."""

SUITE = ["zero 1", "zero 3", "the last stage", "a part of layers", "experts", "fp16", "statistics", "one is behind"]
SUITE += ["a snapshot on its way", "gradients half written", "its buddy is on its host", "on the disk", "a function"]


def shown(names: Iterator[str]) -> list[Any]:
    """The names, of which those beyond SUITE are left to the matrix."""
    return [name if name in SUITE else pytest.param(name, marks=pytest.mark.matrix) for name in names]


def _undisturbed(world: World, row: Row, disk: str) -> Any:
    running = row.engine(world, plan_of({**row.old, "buddy": 0}, disk))
    losses = [running.step(batch).loss for batch in running.batches(row.data, steps=STEPS)]
    found = weights(running) if running.plan.tp == 1 else {}
    running.close()
    return losses, found


@pytest.mark.parametrize("name", shown(iter(SAME)))
def test_not_a_bit_is_lost_where_another_rank_comes(name, tmp_path):
    row = SAME[name]
    expected = run_ranks(_undisturbed, row.size, row, str(tmp_path / "undisturbed"))
    with disposable_ranks(_trains, row.size + row.joins, row, str(tmp_path)) as ranks:
        answers = [rank.result(timeout=SOON) for number, rank in enumerate(ranks) if number not in row.dead]
    assert set().union(*(losses for losses, _ in answers)) >= set(range(STEPS))
    for losses, _ in answers:
        for step, loss in losses.items():
            assert loss == expected[0][0][step], step
    for (_, found), (_, whole) in zip(answers, expected, strict=True):
        for title, value in found.items():
            assert torch.equal(value, whole[title]), title


FEWER = {
    "fewer": Row("", {"dp": 3, "zero": 3, "buddy": 2}, {"dp": 2, "zero": 3, "buddy": 2}, {1: "after the ballot"}),
    "one is behind": Row(
        "", {"dp": 3, "zero": 1, "buddy": 2}, {"dp": 2}, {1: "after its update"}, fails={2: "after the ballot"}
    ),
    "one is in its update": Row(
        "", {"dp": 3, "zero": 1, "buddy": "auto"}, {"dp": 2}, {2: "after its update"}, fails={0: "in its update"}
    ),
    "other stages": Row("", {"pp": 3, "buddy": 2}, {"pp": 2, "buddy": 2}, {1: "after the ballot"}, case="gpt-deep"),
    "two are gone": Row("", {"dp": 4, "zero": 2, "buddy": 2}, {"dp": 2}, {0: "backward", 2: "before the ballot"}),
    "a second one later": Row(
        "", {"dp": 4, "zero": 3, "buddy": 2}, {"dp": 2}, {3: "after the ballot", 1: "while it goes on"}
    ),
    "dropout": Row("", {"dp": 3, "zero": 3, "buddy": 2}, {"dp": 2}, {1: "backward"}, case="gpt-rotary-dropout"),
}


@pytest.mark.parametrize("name", shown(iter(FEWER)))
def test_fewer_go_on(name, tmp_path):
    row = FEWER[name]
    expected, whole = reference(_whole, 1, Row("", {}, {}, {}, row.case, row.precision))[0]
    with disposable_ranks(_trains, row.size, row, str(tmp_path)) as ranks:
        answers = [rank.result(timeout=SOON) for number, rank in enumerate(ranks) if number not in row.dead]
    for losses, found in answers:
        for step, loss in losses.items():
            assert loss == pytest.approx(expected[step], rel=2e-5), step
        for title, value in found.items():
            torch.testing.assert_close(value, whole[title], rtol=2e-4, atol=2e-5)
    assert set().union(*(losses for losses, _ in answers)) >= set(range(STEPS))


def _one_after_the_other(world: World) -> dict[int, float]:
    """Rank 2 dies in step 2 and rank 1 in step 3, the first one after the ranks have met anew."""
    row, losses = FEWER["fewer"], dict[int, float]()
    running = row.engine(World(world.rank, 3, seat=None, store=world._given, device="cpu"), Plan(dp=3, zero=3, buddy=2))
    for plan, dies, step in ((Plan(dp=2, zero=3, buddy=2), 2, 2), (Plan(), 1, 3)):
        now = partial(lambda dies, step: world.rank == dies and running.step_index == step, dies, step)
        with at("backward", die, now), pytest.raises(LaunchError):
            for batch in running.batches(row.data, steps=STEPS):
                losses[batch.step] = running.step(batch).loss
        running.regroup(plan, running.world.without([dies]))
    for batch in running.batches(row.data, steps=STEPS - running.step_index):
        losses[batch.step] = running.step(batch).loss
    return losses


def test_one_after_the_other_dies():
    row = Row("", {}, {}, {})
    expected, _ = reference(_whole, 1, row)[0]
    with disposable_ranks(_one_after_the_other, 3) as ranks:
        losses = ranks[0].result(timeout=SOON)
    assert [losses[step] for step in range(STEPS)] == pytest.approx(expected, rel=2e-5)


def _both_are_gone(world: World, directory: str) -> tuple[str, list[float]]:
    row = FEWER["fewer"]
    running = row.engine(world, Plan(dp=3, zero=3, buddy=2))
    batches = running.batches(row.data)
    losses = [running.step(next(batches)).loss for _ in range(FAILS)]
    running.save(directory)
    losses.append(running.step(next(batches)).loss)
    if world.rank:
        return "", []
    with pytest.raises(CheckpointError) as error:
        running.regroup(Plan(), again(world, 0, 1))
    anew = row.engine(again(world, 0, 1, "anew"), Plan())
    anew.load(directory)
    losses[FAILS:] = [anew.step(batch).loss for batch in anew.batches(row.data, steps=STEPS - FAILS)]
    return str(error.value), losses


def test_a_rank_and_its_buddy_that_are_gone_are_named_and_the_remedy_helps(tmp_path):
    expected, _ = reference(_whole, 1, Row("", {}, {}, {}))[0]
    said, losses = run_ranks(_both_are_gone, 3, str(tmp_path))[0]
    assert "what only rank 1 had was kept by its buddy, rank 2, and both are gone. Go on from a checkpoint" in said
    assert losses == pytest.approx(expected, rel=2e-5)


def _sent(world: World, fields: dict[str, Any], case: str) -> tuple[list[int], int]:
    """Bytes that this rank sends its buddy in each of seven steps, and the elements that it owns."""
    running = Row("", fields, fields, {}, case).engine(world, Plan(**fields))
    sent, before = [], 0
    for batch in running.batches(CASES[case].data(), steps=7):
        running.step(batch)
        now = running.ledger.total(purpose=PURPOSE).wire
        sent, before = [*sent, now - before], now
    return sent, sum(chunk.owned.size for chunk in running.parts.chunks)


def test_bytes_are_those_of_what_no_other_rank_has():
    """AdamW in fp32, a snapshot each third step. Before the first update there is no optimizer state, so the second
    snapshot is described anew; the third one is like it."""
    (sent, owned), _ = run_ranks(_sent, 2, {"dp": 2, "zero": 3, "buddy": 3}, "gpt")
    described = [4, 1, 1, 4, 1, 1, 1]  # units of 4 KiB that are told beside tensors, at most
    for step, (nbytes, state) in enumerate(zip(sent, [1, 0, 0, 3, 0, 0, 3], strict=True)):
        assert 4 * owned * (1 + state) <= nbytes <= 4 * owned * (1 + state) + 2**12 * described[step], step
    assert [nbytes for nbytes, _ in run_ranks(_sent, 2, {"dp": 2, "buddy": 3}, "gpt")] == [[0] * 7] * 2


def _written_over(world: World, every: int) -> tuple[int, list[int], list[int]]:
    """How often something came for this rank to keep, the steps in which that changed what it kept already, and the
    steps of the snapshots for which it let go of something."""
    fields = {"dp": 2, "zero": 3, "buddy": every}
    running = Row("", fields, fields, {}).engine(world, Plan(**fields))
    deliver, confirm, came, changed, snapshots = Ring.deliver, Ring.confirm, [0], list[int](), list[int]()

    def delivered(ring: Ring, *given: Any) -> Any:
        kept = running.parts.buddy._kept
        before = [] if kept is None else [(each, each.clone()) for room in kept.rooms for each in room.theirs]
        found = deliver(ring, *given)
        came[0] += 1
        changed.extend(running.step_index for each, was in before if not torch.equal(each, was))
        return found

    def confirmed(ring: Ring) -> None:
        snapshots.append(running.parts.buddy._kept.step)
        confirm(ring)

    with patch.object(Ring, "deliver", delivered), patch.object(Ring, "confirm", confirmed):
        for batch in running.batches(CASES["gpt"].data(), steps=7):
            running.step(batch)
    running.close()
    return came[0], changed, snapshots


@pytest.mark.parametrize("every", [1, 2])
def test_nothing_is_written_over_what_a_buddy_keeps(every):
    due = list(range(0, 7, every))
    for came, changed, snapshots in run_ranks(_written_over, 2, every):
        assert came == 7 + len(due) + 1, "a log each step, snapshots, and frozen chunks once"
        assert changed == [] and snapshots == due


def _balanced() -> GPT:
    return GPT(GPTConfig(61, 12, 2, 16, 4, moe=MoEConfig(4, d_ff=16, balance_loss=0.0, balance_rate=0.1)))


_ADAMW, _MLP = partial(torch.optim.AdamW, lr=1e-2), partial(MLP, (8, 8, 8, 3))
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no flush": ({"pp": 2, "schedule": "2bw"}, {}, "has no flush|under which updates are always under way"),
    "residuals": ({"dp": 2, "exchange": {"name": "topk", "ratio": 0.5}}, {}, 'take exchange = "allreduce"'),
    "replicas apart": ({"dp": 2, "exchange": "decentralized"}, {}, 'take exchange = "allreduce"'),
    "a function": ({"dp": 2, "zero": 1}, {"clip": lambda norms: 1.0}, "clip by a function.* give a number"),
    "rows": ({"pp": 2}, {"optimizer": torch.optim.SparseAdam}, "SparseAdam.* take Adam"),
    "biases": ({"pp": 2}, {"model": _balanced, "loss": causal_lm}, "balance_rate .* take a balance loss"),
    "a word": ({"dp": 2, "buddy": "often"}, {}, 'give the number of steps between two snapshots, "auto", or 0'),
    "less than none": ({"dp": 2, "buddy": -1}, {}, "give the number of steps between two snapshots"),
}


def _refused(world: World, name: str) -> str:
    fields, more, _ = REFUSED[name]
    given = {"model": _MLP, "loss": regression, "optimizer": _ADAMW, "global_batch": 4, "world": world, **more}
    with pytest.raises(UserError) as error:
        Engine(**given, plan=Plan(**{"buddy": 2, **fields}))
    again_ = World(world.rank, 2, store=torch.distributed.PrefixStore("again", world._given), device="cpu")
    Engine(**given | {"world": again_}, plan=Plan(**{**fields, "buddy": 0})).close()
    return str(error.value)


@pytest.mark.parametrize("name", shown(iter(REFUSED)))
def test_what_has_no_buddy_is_said_and_the_remedy_helps(name):
    said = run_ranks(_refused, 2, name)
    assert len(set(said)) == 1
    assert re.search(REFUSED[name][2], said[0]), said[0]


def test_the_cost_chooses_when_a_snapshot_is_due():
    """By hand: masters and two moments of Adam are 12 bytes an element, gradients 4; masters alone of SGD 4."""
    fp32 = precision("fp32")
    assert steps_between("auto", _ADAMW, [{}], fp32) == 6
    assert steps_between("auto", partial(torch.optim.SGD, lr=0.1), [{}], fp32) == 2
    assert steps_between(5, _ADAMW, [{}], fp32) == 5
