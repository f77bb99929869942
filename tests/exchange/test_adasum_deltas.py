"""Adasum of the replicas' steps, against Horovod's optimizer worked by hand: each replica steps from the common
weights, start + adasum of the steps is what all go on with."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal import Engine, Plan, UserError
from shoal.comm.simulation import simulate_world
from shoal.exchange.named import algorithm
from shoal.models import regression
from tests.exchange.teacher import ADAMW, data, student
from tests.exchange.test_protocols import reference

ADAM = partial(torch.optim.Adam, lr=0.02)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS, BATCH = 4, 12


def train(world, option: Any, optimizer: Any, **more: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after, in fp64."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"global_batch": BATCH, "precision": "fp64", **more}

    engine = Engine(student, regression, optimizer, Plan(dp=world.size, exchange=option), world=world, **options)
    before = {name: value.detach().clone() for name, value in engine.parameters.items()}
    samples = [{key: value.double() for key, value in row.items()} for row in data()]
    for batch in engine.batches(samples, steps=STEPS):
        engine.step(batch)
    after = {name: value.detach().clone() for name, value in engine.parameters.items()}
    engine.close()
    return before, after


def by_hand(
    before: dict[str, Tensor], optimizer: Any, ranks: int, clip: float | None = None, batch: int = BATCH
) -> dict[str, Tensor]:
    samples = [{key: value.double() for key, value in row.items()} for row in data()]
    lone = Engine(student, regression, optimizer, Plan(), global_batch=batch, precision="fp64")
    batches = [list(each.ids) for each in lone.batches(samples, steps=STEPS)]
    lone.close()
    models = [student().double() for _ in range(ranks)]
    for model in models:
        model.load_state_dict(before)
    optimizers = [optimizer(model.parameters()) for model in models]
    for ids in batches:
        start = {name: value.detach().clone() for name, value in models[0].named_parameters()}
        each, more = divmod(len(ids), ranks)
        deltas, at = [], 0
        for rank, (model, own) in enumerate(zip(models, optimizers, strict=True)):
            mine = ids[at : at + each + (rank < more)]
            at += len(mine)
            own.zero_grad()
            if mine:
                rows = {key: torch.stack([samples[i][key] for i in mine]) for key in ("inputs", "targets")}
                total, count = regression(model, rows)
                (total / count).backward()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                own.step()
            deltas.append([(value.detach() - start[name]).flatten() for name, value in model.named_parameters()])
        combined = reference(deltas)
        for model in models:
            for (name, value), delta in zip(model.named_parameters(), combined, strict=True):
                value.data.copy_(start[name] + delta.view(value.shape))
    return {name: value.detach() for name, value in models[0].named_parameters()}


def compare(found: list[tuple[dict[str, Tensor], dict[str, Tensor]]], wanted: dict[str, Tensor]) -> None:
    for _, after in found:
        for name, value in wanted.items():
            torch.testing.assert_close(after[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("option", "optimizer", "ranks", "clip"),
    [
        ("adasum", ADAM, 2, None),
        ("adasum", ADAM, 4, 0.05),
        ({"name": "adasum", "of": "deltas"}, MOMENTUM, 3, None),
    ],
    ids=str,
)
def test_it_is_horovods_rule(option, optimizer, ranks, clip):
    found = simulate_world(ranks, partial(train, clip=clip), option, optimizer)
    compare(found, by_hand(found[0][0], optimizer, ranks, clip))


def test_a_replica_without_samples_takes_no_step():
    """Three samples on four ranks."""
    found = simulate_world(4, partial(train, global_batch=3), "adasum", ADAM)
    compare(found, by_hand(found[0][0], ADAM, 4, batch=3))


def test_sgd_combines_gradients_as_before():
    by_name = [train_on_two(option, MOMENTUM) for option in ("adasum", {"name": "adasum", "of": "gradients"})]
    assert all(torch.equal(by_name[0][name], value) for name, value in by_name[1].items())
    other = train_on_two({"name": "adasum", "of": "deltas"}, MOMENTUM)
    assert not torch.allclose(by_name[0]["0.weight"], other["0.weight"])


def train_on_two(option: Any, optimizer: Any) -> dict[str, Tensor]:
    return simulate_world(2, train, option, optimizer)[0][1]


def distance(option: Any) -> float:
    before, after = simulate_world(4, train, option, ADAM)[0]
    return float(sum((after[name] - value).square().sum() for name, value in before.items()) ** 0.5)


def test_under_adam_deltas_go_further_than_gradients():
    """Adam divides away what combined gradients have gained."""
    plain = distance("allreduce")
    assert distance({"name": "adasum", "of": "gradients"}) == pytest.approx(plain, rel=0.15)
    assert distance("adasum") > 1.3 * plain


def bad_on_one(world, precision: str) -> tuple[list[bool], bool]:
    """Whether each step was skipped, and whether all is finite: in the second step a gradient of rank 1 overflows, and
    its loss does not."""
    torch.set_num_threads(1)

    def loss(model, batch):
        total, count = regression(model, batch)
        return total + batch["bad"].sum() * model[4].bias.square().sum(), count

    rows = [{**row, "bad": torch.tensor(0.0)} for row in data()]
    engine = Engine(
        student, loss, ADAMW, Plan(dp=world.size, exchange="adasum"), global_batch=4, precision=precision, world=world
    )
    skipped = []
    for batch in engine.batches(rows, steps=4):
        if world.rank == 1 and batch.step == 1:
            for ids in [batch.ids[2]]:
                rows[ids]["bad"] = torch.tensor(6e4)
        skipped.append(engine.step(batch).skipped)
    finite = all(bool(value.isfinite().all()) for value in engine.parameters.values())
    engine.close()
    return skipped, finite


def test_all_skip_a_step_that_overflows_on_one():
    found = simulate_world(2, bad_on_one, "fp16")
    assert found[0] == found[1] and found[0][1] and any(found[0][0]) and not all(found[0][0])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"zero": 1}, 'of = "gradients"'),
        ({"exchange": {"name": "adasum", "of": "weights"}}, 'combines "gradients" or "deltas"'),
    ],
)
def test_what_does_not_fit_is_refused_by_name(more, says):
    def run(world) -> None:
        Engine(student, regression, ADAM, Plan(**{"dp": 2, "exchange": "adasum", **more}), global_batch=4, world=world)

    with pytest.raises(UserError, match=says):
        simulate_world(2, run)
    algorithm({"name": "adasum", "of": "gradients"})
