"""Rounds, on a small set: against plain loops, against themselves under other settings, and after a restart."""

from dataclasses import replace
from functools import partial

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from shoal.device import CPU
from shoal.errors import CheckpointError, TrainingError, UserError
from shoal.federated.clients import clients_of, rows_of_batches
from shoal.federated.flat import initial_module
from shoal.federated.one_by_one import OneByOne
from shoal.federated.partition import iid
from shoal.federated.settings import STATE, Federated
from shoal.federated.simulation import Simulation
from shoal.federated.state import load_state, save_state
from shoal.models import MLP, classification
from tests.federated.common import CLASSES, INPUTS, clients, recipe, samples, simulation


def by_hand(sim: Simulation, turn: int) -> torch.Tensor:
    """A round of FedAvg or FedProx as one writes it: a module and torch's optimizer for each client."""
    sim.local.put(sim.weights)
    whole, held = torch.zeros_like(sim.weights), sim.clients.train
    for task in sim.schedule.draw(turn).tasks:
        module = initial_module(sim.recipe.model, sim.recipe.seed).train()  # a copy would have no view of a weight
        module.load_state_dict(sim.module.state_dict())
        start = [parameter.detach().clone() for parameter in module.parameters()]
        optimizer = sim.recipe.optimizer(module.parameters())
        rows = rows_of_batches(held, [task.client], [task.turn], task.steps, sim.recipe.batch, sim.recipe.seed)
        for batch in rows[0]:
            total, count, *aux = sim.recipe.loss(module, {key: values[batch] for key, values in held.tensors.items()})
            loss = total / count + sum(value / weight for each in aux for value, weight in each.values())
            for parameter, first in zip(module.parameters(), start, strict=True):
                loss = loss + sim.strategy.mu / 2 * (parameter - first).square().sum()
            optimizer.zero_grad()
            loss.backward()
            if sim.recipe.clip:
                nn.utils.clip_grad_norm_(module.parameters(), sim.recipe.clip)
            optimizer.step()
        part = held.counts[task.client] / held.counts[[each.client for each in sim.schedule.draw(turn).tasks]].sum()
        whole += part * sim.flat.vector(module.state_dict())
    return whole


@pytest.mark.parametrize(
    ("strategy", "optimizer", "clip"),
    [("fedavg", torch.optim.SGD, None), ({"name": "fedprox", "mu": 0.5}, torch.optim.AdamW, 0.3)],
)
@pytest.mark.parametrize("together", [True, False])
def test_rounds_are_those_of_a_plain_loop(strategy, optimizer, clip, together, monkeypatch):
    if not together:
        monkeypatch.setattr("shoal.federated.together.MOST_BYTES", 1)
    settings = Federated(clients=5, strategy=strategy, speeds=0.5, deadline=3.0, late="partial", local_epochs=1.0)
    sim = simulation(settings, recipe(optimizer, clip=clip))
    assert (sim.why == "") is together
    for number in (1, 2):
        wanted = by_hand(sim, number)
        assert sim.round().applied
        torch.testing.assert_close(sim.weights, wanted, rtol=1e-5, atol=1e-6)


class Grouped(nn.Sequential):
    """Derivatives of these layers write in place, which a trace holds."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(INPUTS, 8), nn.GroupNorm(2, 8), nn.SiLU(), nn.Linear(8, CLASSES))


class Twice(nn.Module):
    """Has one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, CLASSES)
        self.again = self.first

    def forward(self, x):
        return self.last(self.again(self.first(x).tanh()))


class Summed(nn.Module):
    """Has two parameters of one gradient, in the very same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.one, self.two = nn.Linear(INPUTS, CLASSES), *map(nn.Parameter, torch.ones(2, CLASSES))

    def forward(self, x):
        return self.layer(x) + (self.one + self.two)


class Listed(nn.Module):
    """Finds the weight of its last layer in a list of its own, and a view of its first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, CLASSES)
        self.found = [self.last.weight, self.first.weight.detach().t()]

    def forward(self, x):
        return nn.functional.linear(self.first(x).tanh() + x @ self.found[1], self.found[0], self.last.bias)


class Found(Listed):
    """Finds the weight of its last layer in a list of its own, and no view."""

    def __init__(self) -> None:
        super().__init__()
        del self.found[1]

    def forward(self, x):
        return nn.functional.linear(self.first(x).tanh(), self.found[0], self.last.bias)


def with_numbers(model, mb):
    """A loss whose count is a plain number, with an auxiliary loss that has a weight."""
    total, _ = classification(model, mb)
    return total, len(mb["labels"]), {"size": (model(mb["inputs"]).square().mean(), 4.0)}


def low():
    return MLP([INPUTS, 8, CLASSES], "tanh").bfloat16()


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("model", [Grouped, Twice, Summed, Found, low])
def test_rounds_of_other_models_and_losses_are_those_of_a_plain_loop(model, together, monkeypatch):
    if not together:
        monkeypatch.setattr("shoal.federated.together.MOST_BYTES", 1)
    settings = Federated(clients=4, strategy={"name": "fedprox", "mu": 0.5}, local_steps=3)
    sim = simulation(settings, recipe(model=model, loss=with_numbers))
    assert (sim.why == "") is together
    assert sim.weights.dtype == torch.float32
    for number in (1, 2):
        wanted = by_hand(sim, number)
        sim.round()
        torch.testing.assert_close(sim.weights, wanted, rtol=1e-5, atol=1e-6)
    assert sim.evaluate().loss > 0


@pytest.mark.matrix
def test_groups_of_any_size_give_the_same_model(monkeypatch):
    found = []
    for most in (32, 3):
        monkeypatch.setattr("shoal.federated.together.MOST", most)
        sim = simulation(Federated(clients=8, local_epochs=1.0))
        for _ in range(3):
            sim.round()
        found.append(sim.weights)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


class Normed(nn.Module):
    """Has statistics that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(INPUTS, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def test_statistics_of_batch_norm_are_averaged_one_client_after_the_other():
    sim = simulation(Federated(clients=3, local_steps=4), recipe(model=Normed))
    assert isinstance(sim.local._local, OneByOne) and sim.why
    wanted = by_hand(sim, 1)
    sim.round()
    torch.testing.assert_close(sim.weights, wanted, rtol=1e-5, atol=1e-6)
    assert sim.state_dict()["norm.running_mean"].abs().max() > 0
    assert sim.evaluate().accuracy > 0.2


class Partly(nn.Module):
    """Has a layer that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.last = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, 3)

    def forward(self, x):
        return self.last(x)


def test_a_forward_that_has_a_view_of_a_weight_trains_clients_one_by_one():
    """A trace of clients together held the first values of such a view."""
    sim = simulation(Federated(clients=4, local_steps=3), recipe(model=Listed))
    assert sim.why.startswith("its forward finds first.weight elsewhere than in its module")
    for number in (1, 2):
        wanted = by_hand(sim, number)
        sim.round()
        torch.testing.assert_close(sim.weights, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("together", [True, False])
def test_parameters_that_no_gradient_reaches_do_not_decay(together, monkeypatch):
    if not together:
        monkeypatch.setattr("shoal.federated.together.MOST_BYTES", 1)
    settings = Federated(clients=3, strategy={"name": "fedprox", "mu": 0.5}, local_steps=3)
    sim = simulation(settings, recipe(torch.optim.AdamW, model=Partly, clip=0.3))
    assert (sim.why == "") is together
    before = sim.state_dict()
    sim.round()
    now = sim.state_dict()
    assert torch.equal(now["unused.weight"], before["unused.weight"])
    assert not torch.equal(now["last.weight"], before["last.weight"])


def test_statistics_of_results_from_older_weights_stay_possible():
    """A variance of now, less by how much that of an older version has moved, was below 0, and evaluations NaN."""
    sim = simulation(Federated(clients=6, buffer=1, speeds=1.0, local_steps=20), recipe(model=Normed))
    stale = 0
    for _ in range(10):
        stale = max(stale, *sim.round().round.stale)
        assert sim.state_dict()["norm.running_var"].min() > 0
    assert stale > 2


class Weighed(nn.Module):
    """Draws from numpy's global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(INPUTS, 3)

    def forward(self, x):
        return self.last(x * np.random.rand())


def test_what_a_forward_draws_from_numpy_is_of_the_round_and_the_client():
    """A trace of clients together held the first number for all steps of a run."""
    found = []
    for seed in (1, 2):
        np.random.seed(seed)
        sim = simulation(Federated(clients=3, local_steps=2), recipe(model=Weighed))
        assert sim.why.startswith("its forward draws from numpy or Python")
        sim.round()
        found.append(sim.weights)
        assert np.random.rand() == np.random.RandomState(seed).rand(), "nor does it draw from there"
    assert torch.equal(*found)


def light(model, mb):
    total, count = classification(model, mb)
    return total / 128, count / 128


@pytest.mark.parametrize("together", [True, False])
def test_a_batch_may_count_less_than_one(together, monkeypatch):
    """Weights of samples that are all smaller change nothing."""
    if not together:
        monkeypatch.setattr("shoal.federated.together.MOST_BYTES", 1)
    ends = []
    for loss in (classification, light):
        sim = simulation(Federated(clients=3, local_steps=3), recipe(loss=loss))
        sim.round()
        ends.append(sim.weights)
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [
        "fedavgm",
        {"name": "fedadam", "lr": 0.05},
        pytest.param("fedavg", marks=pytest.mark.matrix),
        pytest.param("fedprox", marks=pytest.mark.matrix),
    ],
)
def test_every_strategy_learns_and_tells_what_each_client_gets(strategy):
    sim = simulation(Federated(clients=6, strategy=strategy, local_epochs=2.0))
    before = sim.evaluate()
    for _ in range(25):
        result = sim.round()
    after = sim.evaluate()
    assert after.accuracy > 0.85 > before.accuracy and result.loss < before.loss
    counts = sim.clients.held_out.counts
    assert np.average(after.client_accuracies, weights=counts) == pytest.approx(after.accuracy, abs=1e-6)
    assert len(after.client_losses) == 6


def test_asynchronous_clients_learn_and_old_weights_are_kept_no_longer_than_needed():
    sim = simulation(Federated(clients=12, fraction=0.5, buffer=3, speeds=1.0, local_steps=3))
    stale = []
    for _ in range(60):
        stale += sim.round().round.stale
        assert len(sim.versions) <= 7
    assert max(stale) > 2 and sim.evaluate().accuracy > 0.8


def test_a_round_with_too_few_results_changes_nothing():
    sim = simulation(Federated(clients=6, dropout=0.5, least=5, local_steps=2))
    seen = set()
    for _ in range(12):
        before = sim.weights.clone()
        result = sim.round()
        assert result.applied is (len(result.round.tasks) >= 5) is not torch.equal(before, sim.weights)
        seen.add(result.applied)
    assert seen == {True, False}


def test_a_client_whose_weights_are_not_finite_does_not_count():
    broken = [dict(each) for each in samples()]
    shares = iid(len(broken), 4, seed=0)
    for row in shares.of(2):
        broken[row]["inputs"] = torch.full((INPUTS,), float("nan"))
    sim = Simulation(recipe(), clients_of(broken, shares, 0.0, 0, CPU), Federated(clients=4, local_steps=2))
    result = sim.round()
    assert result.broken == 1 and result.applied and torch.isfinite(sim.weights).all() and np.isfinite(result.loss)


@pytest.mark.parametrize(
    ("local", "outer", "says"),
    [(3e38, 1.0, r"round 1: no client .*lower train.lr"), (10.0, 3e38, r"round 1: the global")],
)
def test_a_round_in_which_nothing_is_finite_is_an_error(local, outer, says):
    settings = Federated(clients=4, local_steps=3, strategy={"name": "fedavg", "lr": outer})
    sim = simulation(settings, replace(recipe(), optimizer=partial(torch.optim.SGD, lr=local)))
    with pytest.raises(TrainingError, match=says):
        sim.round()


@pytest.mark.parametrize(
    "settings",
    [
        Federated(clients=8, fraction=0.5, strategy="fedavgm", dropout=0.2, local_steps=3),
        Federated(clients=8, fraction=0.5, strategy="fedadam", buffer=2, speeds=1.0, local_steps=3),
    ],
    ids=["rounds", "buffered"],
)
def test_resumed_rounds_are_those_of_a_run_that_was_not_disturbed(settings, tmp_path):
    dropping = partial(MLP, [INPUTS, 8, 3], dropout=0.3)
    whole, first, second = (simulation(settings, recipe(model=dropping)) for _ in range(3))
    for _ in range(9):
        whole.round()
    for _ in range(4):
        first.round()
    save_state(first, tmp_path, {"seed": 0})
    first.round()  # lost: it was not saved
    torch.manual_seed(1)
    assert load_state(second, tmp_path, {"seed": 0}) and second.number == 4
    for _ in range(5):
        second.round()
    assert torch.equal(whole.weights, second.weights)


def test_the_state_of_another_run_and_a_damaged_one_are_refused(tmp_path):
    sim = simulation(Federated(clients=4, local_steps=1))
    assert not load_state(sim, tmp_path, {})
    path = save_state(sim, tmp_path, {"federated.clients": 4})
    with pytest.raises(UserError, match=r"federated.clients = 5, but .* trained with 4"):
        load_state(sim, tmp_path, {"federated.clients": 5})
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="Give another directory, or delete"):
        load_state(sim, tmp_path, {"federated.clients": 4})
    assert [each.name for each in tmp_path.iterdir()] == [STATE]


def grown_by(fraction: float) -> tuple[int, int]:
    """Returns how many of 10,000 clients have trained in a round, and by how many bytes the process grew in it, after a
    round of 200 of them."""
    many = [samples()[index % len(samples())] for index in range(10_000)]
    given = recipe(model=partial(MLP, [INPUTS, 200, 180, 3]), batch=1)
    sim = Simulation(
        given,
        clients_of(many, iid(10_000, 10_000, 0), 0.0, 0, CPU),
        Federated(clients=10_000, local_steps=1, fraction=0.02),
    )
    sim.round()
    before, process = psutil.Process().memory_info().rss, psutil.Process()
    sim.schedule = replace(sim.schedule, settings=replace(sim.settings, fraction=fraction))
    result = sim.round()
    return len(result.round.tasks), process.memory_info().rss - before


@pytest.mark.alone
def test_many_clients_take_the_memory_of_one_group():
    """Of a model of 38,000 weights, 0.15 MB; those of the 1,000 of a round would be 150 MB."""
    trained, grown = grown_by(0.1)
    assert trained == 1000 and grown < 32 * 2**20


@pytest.mark.matrix
@pytest.mark.alone
def test_ten_thousand_clients_of_one_round_take_the_memory_of_one_group():
    """Those of all would be 1.5 GB."""
    trained, grown = grown_by(1.0)
    assert trained == 10_000 and grown < 64 * 2**20


def test_clients_without_samples_are_named():
    with pytest.raises(UserError, match="least = 4"):
        Simulation(recipe(), clients(3), Federated(clients=10, least=4))


def test_a_recipe_without_samples_or_with_a_ready_optimizer_is_refused():
    with pytest.raises(UserError, match="batch = 0: give how many samples"):
        recipe(batch=0)
    given = recipe()
    with pytest.raises(UserError, match="is a ready SGD"):
        replace(given, optimizer=torch.optim.SGD(given.model().parameters(), lr=0.1))
