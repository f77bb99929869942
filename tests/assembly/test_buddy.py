"""State that only one rank had goes on from its buddy's memory, as the run would have gone that was never disturbed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.checkpoint.buddy.ring import buddies
from shoal.comm.world import World
from tests.assembly.test_regroup import SOON, STEPS, Row, _trains, weights
from tests.pool import disposable_ranks, run_ranks


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


_ON_DISK = {"host": "1GiB", "disk": "a directory"}
ROWS = {
    "zero 1": _same({"dp": 2, "zero": 1}, {1: "backward"}),
    "zero 2": _same({"dp": 2, "zero": 2}, {0: "before the ballot"}),
    "zero 3": _same({"dp": 3, "zero": 3}, {1: "after the ballot"}),
    "all have updated": _same({"dp": 3, "zero": 1}, {2: "after its update"}, precision="bf16"),
    "a stage": _same({"pp": 2}, {0: "backward"}),
    "the last stage": _same({"pp": 2}, {1: "after the ballot"}),
    "a part of layers": _same({"tp": 2}, {0: "after the ballot"}),
    "experts": _same({"dp": 2, "ep": 2}, {1: "before the ballot"}, case="moe"),
    "fp16": _same({"dp": 2, "zero": 2}, {1: "after the ballot"}, precision="fp16"),
    "on the host": _same({"dp": 2, "zero": 3, "memory": {"host": "1GiB"}}, {1: "after the ballot"}, precision="bf16"),
    "on the disk": _same({"dp": 2, "zero": 3, "memory": _ON_DISK}, {0: "before the ballot"}),
    "updates made later": _same(
        {"dp": 2, "zero": 3, "memory": {"host": "1GiB", "update": "deferred"}}, {1: "backward"}
    ),
    "statistics": _same({"pp": 2}, {0: "after the ballot"}, case="resnet-batchnorm"),
    "a snapshot each step": _same({"dp": 2, "zero": 3, "buddy": 1}, {1: "after its update"}),
    "a log from the beginning": _same({"dp": 2, "zero": 3, "buddy": 100}, {1: "after its update"}),
}


def _undisturbed(world: World, row: Row, disk: str) -> Any:
    from tests.assembly.test_replan import plan_of

    running = row.engine(world, plan_of({**row.old, "buddy": 0}, disk))
    losses = [running.step(batch).loss for batch in running.batches(row.data, steps=STEPS)]
    found = weights(running) if row.old.get("tp", 1) == 1 else {}
    running.close()
    return losses, found


@pytest.mark.parametrize("name", ROWS)
def test_what_only_one_rank_had_goes_on(name, tmp_path):
    row = ROWS[name]
    expected = run_ranks(_undisturbed, row.size, row, str(tmp_path / "undisturbed"))
    with disposable_ranks(_trains, row.size + row.joins, row, str(tmp_path)) as ranks:
        answers = [rank.result(timeout=SOON) for number, rank in enumerate(ranks) if number not in row.dead]
    assert set().union(*(losses for losses, _ in answers)) >= set(range(STEPS))
    for losses, _ in answers:
        for step, loss in losses.items():
            assert loss == expected[0][0][step], step
    for (_, found), (_, whole) in zip(answers, expected, strict=True):
        for title, value in found.items() if row.old.get("pp", 1) == 1 else ():
            assert torch.equal(value, whole[title]), title
