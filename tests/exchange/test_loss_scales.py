"""Replicas that train alone under fp16 have loss scales of their own, also once they were saved and resumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal import Engine, Plan
from shoal.comm import World
from shoal.comm.simulation import simulate_world
from shoal.data.loader import Batch
from tests.exchange import teacher

pytestmark = pytest.mark.fast
FP16 = {"name": "fp16", "initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 1}
LOCAL_SGD = {"name": "local_sgd", "every": 10}
BAD, STOP, END = 2, 4, 8


def trained(running: Engine, last: int) -> list[list[float]]:
    """The numbers of the loss scale after each step up to `last`; in step BAD one replica's gradients overflow."""

    def spoilt(batch: Batch) -> Batch:
        def load(ids: Sequence[int]) -> dict[str, Tensor]:
            rows = batch.load(ids)
            far = torch.tensor([1e6 if batch.step == BAD and each == batch.ids[0] else 0.0 for each in ids])
            return {**rows, "targets": rows["targets"] + far[:, None]}

        return replace(batch, load=load)

    scales = []
    for batch in running.batches(teacher.data(), steps=last - running.step_index):
        running.step(spoilt(batch))
        scales.append(running.loss_scale.state())
    return scales


def through(world: World, directory: Path, change: bool) -> list[list[float]]:
    running = teacher.engine(world, LOCAL_SGD, precision=FP16, clip=None)
    before = trained(running, STOP)
    running.save(directory)
    if change:
        running.replan(Plan(dp=world.size, exchange={**LOCAL_SGD, "chunk_bytes": 1 << 10}))
    after = trained(running, END)
    running.close()
    return before + after


def resumed(world: World, directory: Path) -> list[list[float]]:
    running = teacher.engine(world, LOCAL_SGD, precision=FP16, clip=None)
    running.load(directory)
    after = trained(running, END)
    running.close()
    return after


def test_each_replica_goes_on_with_its_own_scale(tmp_path):
    one, two = simulate_world(2, through, tmp_path, False)
    assert sorted(each[STOP - 1][0] for each in (one, two)) == [2.0**7, 2.0**9]
    assert simulate_world(2, resumed, tmp_path) == [one[STOP:], two[STOP:]]
    assert simulate_world(2, through, tmp_path / "changed", True) == [one, two]


def test_other_replicas_take_that_of_the_first(tmp_path):
    one, _ = simulate_world(2, through, tmp_path, False)
    (alone,) = simulate_world(1, resumed, tmp_path)
    assert alone[0][:2] == one[STOP][:2]
