"""What federated training comes to on scikit-learn's digits, where clients have few of the ten."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from shoal.data.digits import digits
from shoal.device import CPU
from shoal.errors import UserError
from shoal.federated.clients import Clients, clients_of
from shoal.federated.partition import by_label, shares_of
from shoal.federated.recipe import Recipe
from shoal.federated.settings import Federated
from shoal.federated.simulation import Simulation
from shoal.jobs.federated.simulate import simulate
from shoal.jobs.read import load_job
from shoal.models import MLP, classification
from shoal.report.metrics import read_metrics
from tests.federated.common import right
from tests.federated.packages import ROOT, find_digits


@pytest.fixture(autouse=True)
def there(monkeypatch):
    find_digits(monkeypatch)


def recipe(lr):
    return Recipe(partial(MLP, [64, 32, 10]), classification, partial(torch.optim.SGD, lr=lr), 16, measure=right)


def trained(settings, alpha, lr, rounds):
    """Returns the loss and the accuracy after each of the last four rounds."""
    data = digits()
    clients = clients_of(data, by_label(data.answers, settings.clients, alpha, 0), 0.2, 0, CPU)
    simulation = Simulation(recipe(lr), clients, settings)
    found = []
    for number in range(rounds):
        simulation.round()
        if number >= rounds - 4:
            measured = simulation.evaluate()
            found.append((measured.loss, measured.accuracy))
    return np.array(found)


def test_the_set_is_whole():
    data = digits()
    assert len(data) == 1797 and set(data.answers) == set(range(10))
    assert data.inputs.shape == (1797, 64) and data.inputs.min() == 0 and data.inputs.max() == 1


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr("shoal.data.digits.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "shoal\[fed\]"'):
        digits()


def test_fedavg_comes_within_two_points_of_training_in_one_place():
    federated = trained(Federated(clients=10, local_epochs=2), 0.3, 0.3, 40)
    data = digits()
    kept, held = by_label(data.answers, 10, 0.3, 0).split(0.2, 0)
    train, held_out = (clients_of(data, shares_of([each.order]), 0.0, 0, CPU).train for each in (kept, held))
    one = Simulation(recipe(0.3), Clients(train, held_out), Federated(clients=1, local_epochs=10))
    for _ in range(8):
        one.round()
    assert federated[:, 1].mean() > one.evaluate().accuracy - 0.02 > 0.9


@pytest.mark.matrix
def test_fedprox_helps_where_clients_have_one_label_and_train_long():
    settings = {"clients": 10, "fraction": 0.2, "local_epochs": 30}
    avg = trained(Federated(**settings), 0.02, 0.5, 24)
    prox = trained(Federated(strategy={"name": "fedprox", "mu": 0.03}, **settings), 0.02, 0.5, 24)
    assert prox[:, 0].mean() < 0.6 * avg[:, 0].mean() and prox[:, 1].mean() > avg[:, 1].mean() + 0.1


@pytest.mark.matrix
def test_the_example_trains(tmp_path):
    outcome = simulate(*load_job(ROOT / "examples" / "fed_digits.toml", [f"run.dir={tmp_path}"]))
    assert outcome.step == 60 and read_metrics(tmp_path / "metrics.jsonl").evals[-1].accuracy > 0.9
