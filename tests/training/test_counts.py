"""What a loss counts need be no whole number: weights of samples, or parts of 1, are as good."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shoal import Engine, Plan
from shoal.comm import World
from shoal.comm.simulation import simulate_world
from shoal.errors import UserError
from tests.exchange import teacher


def weighted(model: nn.Module, mb: Mapping[str, Tensor], unit: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The squared error of samples that weigh `unit` times a number of each one's own, with a part of it beside."""
    error = (model(mb["inputs"]) - mb["targets"]).square().mean(1)
    weights = unit * mb["inputs"][:, 0].abs()
    return (error * weights).sum(), weights.sum(), {"largest": 0.1 * error.max()}


def trained(world: World, unit: float, plan: Mapping[str, int]) -> tuple[list[float], list[float], dict[str, Tensor]]:
    torch.set_num_threads(1)
    engine = Engine(
        teacher.student, partial(weighted, unit=unit), teacher.SGD, Plan(dp=world.size, **plan),
        global_batch=8, microbatch=2, clip=0.5, world=world,
    )  # fmt: skip
    results = [engine.step(batch) for batch in engine.batches(teacher.data(), steps=3)]
    weights = {name: value.detach().clone() for name, value in engine.parameters.items()}
    engine.close()
    return [each.loss for each in results], [each.aux["largest"] for each in results], weights


@pytest.mark.fast
@pytest.mark.parametrize("unit", [0.01, 1e-4])
@pytest.mark.parametrize(("size", "plan"), [(1, {}), (3, {}), (2, {"zero": 2})])
def test_the_unit_of_what_counts_does_not_matter(unit, size, plan):
    """Sums of less than a half counted as no labels at all: nothing was learned, without a word."""
    losses, parts, weights = simulate_world(1, trained, 1.0, {})[0]
    for found in simulate_world(size, trained, unit, plan):
        assert found[0] == pytest.approx(losses, rel=1e-5) and found[1] == pytest.approx(parts, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(found[2][name], value, rtol=1e-4, atol=1e-6)
    assert losses[-1] < losses[0]


@pytest.mark.fast
def test_auxiliary_losses_may_be_plain_numbers_and_counts_no_functions_of_the_weights():
    def loss(model: nn.Module, mb: Mapping[str, Tensor], counts: bool) -> tuple[Tensor, Tensor, dict[str, float]]:
        out = model(mb["inputs"])
        count = out.square().sum() if counts else torch.tensor(len(out))
        return (out - mb["targets"]).square().sum(), count, {"temperature": 0.5}

    made = partial(Engine, teacher.student, optimizer=teacher.SGD, global_batch=4)
    engine = made(partial(loss, counts=False))
    assert engine.step(next(engine.batches(teacher.data()))).aux == {"temperature": 0.5}
    engine = made(partial(loss, counts=True))
    with pytest.raises(UserError, match="a count that depends on the weights"):
        engine.step(next(engine.batches(teacher.data())))


@pytest.mark.fast
def test_a_batch_that_counts_nothing_says_nothing_of_the_next():
    """By what is expected sums are divided before backward: those after it overflowed in fp16, undivided."""

    def loss(model: nn.Module, mb: Mapping[str, Tensor], counts: list[bool]) -> tuple[Tensor, int]:
        error = (model(mb["inputs"]) - mb["targets"]).square() * 30_000
        return (error.sum(), 30_000 * error.numel()) if counts[0] else (error.sum() * 0, 0)

    counts = [True]
    engine = Engine(teacher.student, partial(loss, counts=counts), teacher.SGD, global_batch=8, precision="fp16")
    skipped = []
    for batch in engine.batches(teacher.data(), steps=10):
        counts[0] = batch.step != 8
        skipped.append(engine.step(batch).skipped)
    assert not any(skipped[5:]), "the scale has found its place in the first steps"
    engine.close()
