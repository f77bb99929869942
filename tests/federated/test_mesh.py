"""A client that is a whole mesh, against the same client in one process."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from shoal.comm import World
from shoal.device import CPU
from shoal.engine import Engine
from shoal.errors import LaunchError, TrainingError, UserError
from shoal.federated.clients import Clients
from shoal.federated.local import LocalTraining
from shoal.federated.mesh import MeshClient
from shoal.federated.recipe import Recipe
from shoal.federated.schedule import Task
from shoal.models import classification
from shoal.models.losses import IGNORED
from shoal.plan import Plan
from tests.federated.common import CLASSES, INPUTS, clients, recipe
from tests.pool import RankError, run_ranks

CLIENT, STEPS = 2, 5


class Normed(nn.Module):
    """Has statistics that a forward changes, by how many it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(INPUTS, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


class Frozen(nn.Module):
    """Has a parameter that is not trained, and two layers that share one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS)
        self.again.weight = self.first.weight
        self.last = nn.Linear(INPUTS, CLASSES)
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.again(torch.tanh(self.first(x)))))


def falling(number):
    return 1 / (1 + number)


def plain(model=None, optimizer=torch.optim.SGD, **options):
    return recipe(optimizer, model, **options)


def engine_of(given: Recipe, plan: Plan, world: World, **options) -> Engine:
    options = {"microbatch": given.batch // plan.dp, **options}
    return Engine(
        given.model,
        given.loss,
        given.optimizer,
        plan,
        global_batch=given.batch,
        seed=given.seed,
        clip=given.clip,
        param_groups=given.param_groups,
        world=world,
        **options,
    )


def in_turns(world, given, plan, mu, options):
    """Two turns, the second from weights that lie aside; then what the client measures."""
    own = clients(4).only(CLIENT)
    mesh = MeshClient(engine_of(given, plan, world, **options), given, own, CLIENT)
    if world.rank:
        mesh.follow()
        return None
    with mesh:
        start = LocalTraining(given, clients(4), 1, mu, CPU).start()
        first = mesh.train(start, 3, STEPS, mu)
        second = mesh.train(start + 0.01, 4, STEPS, mu)
        return first, second, mesh.measure(start)


def alone(given: Recipe, mu: float):
    """The same in the core."""
    local = LocalTraining(given, clients(4), 1, mu, CPU)
    start, found = local.start(), []
    for turn, weights in ((3, start), (4, start + 0.01)):
        done = local.train([Task(CLIENT, STEPS, 0, turn)], weights, given.rate(turn - 1))
        found.append((weights - done.moved[0], float(done.losses[0]), float(done.counts[0])))
    return found


def check(
    given: Recipe, plan: Plan, mu: float = 0.0, wanted: Recipe | None = None, within: float = 1e-6, **options
) -> None:
    size = plan.size
    first, second, measured = run_ranks(in_turns, size, given, plan, mu, options)[0]
    for done, (weights, losses, counts) in zip((first, second), alone(wanted or given, mu), strict=True):
        torch.testing.assert_close(done.weights, weights, rtol=1e-5, atol=within)
        assert done.losses == pytest.approx(losses, rel=1e-5) and done.counts == counts and done.steps == STEPS
    one = run_ranks(in_turns, 1, given, Plan(), mu, {})[0]
    torch.testing.assert_close(second.weights, one[1].weights, rtol=1e-5, atol=within)
    assert measured[0] == pytest.approx(one[2][0], rel=1e-5) and measured[1:] == one[2][1:]
    assert given.measure is None or measured[1] == len(clients(4).only(CLIENT).held_out)


PLANS = {
    "dp": Plan(dp=2),
    "tp": Plan(tp=2),
    "zero1": Plan(dp=2, zero=1),
    "zero2": Plan(dp=2, zero=2),
    "zero3": Plan(dp=2, zero=3),
    "pp": Plan(pp=2),
}
QUICK = (("tp", 0.0), ("tp", 0.5), ("zero3", 0.5), ("pp", 0.5))


@pytest.mark.parametrize(
    ("plan", "mu"),
    [
        pytest.param(plan, mu, marks=[] if (plan, mu) in QUICK else pytest.mark.matrix)
        for plan in PLANS
        for mu in (0.0, 0.5)
    ],
)
def test_a_mesh_trains_as_one_process(plan, mu):
    check(plain(optimizer=torch.optim.AdamW, clip=0.3, rate=falling), PLANS[plan], mu)


@pytest.mark.matrix
@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.ASGD, torch.optim.NAdam])
def test_any_optimizer_begins_anew(optimizer):
    # RMSprop divides a gradient by its own size at first, so what rounding leaves of one near zero counts in full
    check(plain(optimizer=optimizer), PLANS["zero1"], 0.1, within=1e-5 if optimizer is torch.optim.RMSprop else 1e-6)


@pytest.mark.parametrize("plan", ["dp", pytest.param("zero3", marks=pytest.mark.matrix)])
def test_statistics_of_batches_are_those_of_one_process_and_counts_begin_anew(plan):
    check(plain(Normed), PLANS[plan], 0.1, sync_bn=True, microbatch=4)


def light(model, mb):
    total, count = classification(model, mb)
    return total / 128, count / 128


def test_losses_are_those_of_counts_that_are_no_whole_numbers():
    check(plain(loss=light, measure=None), PLANS["dp"])


def test_batches_that_count_nothing_have_no_loss_and_move_nothing():
    given, own = plain(), clients(4).only(CLIENT)
    own.train.tensors["labels"].fill_(IGNORED)
    start = LocalTraining(given, clients(4), 1, 0.0, CPU).start()
    with MeshClient(engine_of(given, Plan(), World.single()), given, own, CLIENT) as mesh:
        done = mesh.train(start, 1, 2)
    assert (done.losses, done.counts, done.steps) == (0.0, 0.0, 2) and torch.equal(done.weights, start)


@pytest.mark.matrix
@pytest.mark.parametrize("plan", PLANS)
def test_frozen_and_shared_parameters(plan):
    if plan == "pp":
        pytest.skip("two layers of one stage share a weight there")
    check(plain(Frozen), PLANS[plan], 0.1)


class Rowed(nn.Module):
    """Has gradients that come as rows."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(2000, 6, sparse=sparse), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.last(self.table((x.abs() * 300).long().clamp(max=1999)).sum(1))


@pytest.mark.parametrize("plan", ["dp", pytest.param("zero2", marks=pytest.mark.matrix)])
def test_a_pull_reaches_rows_that_no_gradient_has(plan):
    check(plain(partial(Rowed, True)), PLANS[plan], 0.5, wanted=plain(partial(Rowed, False)))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=40,
            n_positions=8,
            n_embd=16,
            n_layer=2,
            n_head=2,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
    )


def next_token(model, mb):
    ids = (mb["inputs"].abs() * 10).long().clamp(max=39)
    logits = model(ids).logits[:, :-1]
    labels = ids[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum()


@pytest.mark.matrix
@pytest.mark.parametrize("plan", PLANS)
def test_a_model_of_transformers(plan):
    check(plain(gpt2, loss=next_token, measure=None), PLANS[plan], 0.1)


def breaking(world, where, told):
    """Rank 1 fails while it reads samples; rank 0 writes down what it learns of that."""
    given = plain()
    own = clients(4).only(CLIENT)
    mesh = MeshClient(engine_of(given, Plan(dp=2), world), given, own, CLIENT)
    start = LocalTraining(given, clients(4), 1, 0.0, CPU).start()
    if world.rank:
        mesh._load = lambda ids: os._exit(3) if where == "process" else 1 / 0
        mesh.follow()
    with mesh:
        try:
            mesh.train(start, 1, STEPS)
        except LaunchError as error:
            told.write_text(str(error))
        with pytest.raises(LaunchError):  # and stays broken
            mesh.train(start, 2, STEPS)


@pytest.mark.parametrize("where", ["exception", pytest.param("process", marks=pytest.mark.matrix)])
def test_a_rank_that_fails_is_named_and_nobody_waits(tmp_path, where):
    began = time.monotonic()
    with pytest.raises(RankError):
        run_ranks(breaking, 2, where, tmp_path / "told")
    assert "rank 1" in (tmp_path / "told").read_text() and time.monotonic() - began < 60


def not_finite(world):
    given = plain()
    mesh = MeshClient(engine_of(given, Plan(dp=2), world), given, clients(4).only(CLIENT), CLIENT)
    if world.rank:
        return mesh.follow()
    with mesh:
        start = LocalTraining(given, clients(4), 1, 0.0, CPU).start()
        with pytest.raises(TrainingError):
            mesh.train(torch.full_like(start, math.nan), 1, STEPS)
        with pytest.raises(UserError, match="this model has"):
            mesh.train(start[1:], 1, STEPS)
        return mesh.train(start, 3, STEPS).weights, mesh.train(start, 3, STEPS, seconds=0.0).steps


def test_weights_that_are_not_finite_are_refused_and_the_mesh_goes_on():
    (weights, steps), _ = run_ranks(not_finite, 2)
    torch.testing.assert_close(weights, alone(plain(), 0.0)[0][0], rtol=1e-5, atol=1e-6)
    assert steps == 1  # the time was over at once


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"exchange": "local_sgd", "dp": 2}, "sum gradients"),
        ({"dp": 2, "buddy": 1, "zero": 1}, "begins anew in each round"),
    ],
)
def test_plans_that_keep_something_between_rounds_are_refused(options, says):
    plan = Plan(**options)
    with pytest.raises(RankError, match=says):
        run_ranks(in_turns, 2, plain(), plan, 0.0, {})


def test_a_client_without_samples_is_refused():
    given, empty = (
        plain(),
        Clients(*(replace(each, offsets=each.offsets * 0) for each in (clients(4).only(0).train,) * 2)),
    )
    with pytest.raises(UserError, match="no sample to train on"):
        MeshClient(engine_of(given, Plan(), World.single()), given, empty, 0)
