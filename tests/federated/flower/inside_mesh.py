"""An engine as a Flower `ClientApp`. Run by test_flower.py."""

from __future__ import annotations

import pytest
import torch

from shoal.comm import World
from shoal.engine import Engine
from shoal.federated.flower.clients import to_record
from shoal.federated.flower.grid import FIRST, LocalGrid
from shoal.federated.flower.mesh import client_app
from shoal.federated.flower.secure_mod import secure_mod
from shoal.federated.flower.secure_sum import SecureSum
from shoal.federated.flower.simulation import FlowerSimulation
from shoal.federated.mesh import MeshClient
from shoal.federated.settings import Federated
from shoal.plan import Plan
from tests.federated.common import clients, recipe

from flwr.app import ArrayRecord, Message, RecordDict  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip
from flwr.serverapp.strategy import FedAvg  # isort: skip

CLIENTS = 3


def apps(given, crowd, mods=None):
    """One app, in which each client is an engine of its own."""
    whole = clients(CLIENTS)
    engines = [
        Engine(given.model, given.loss, given.optimizer, Plan(), global_batch=given.batch, world=World.single())
        for _ in range(CLIENTS)
    ]
    meshes = [MeshClient(engine, given, whole.only(k), k) for k, engine in enumerate(engines)]
    own = [client_app(mesh, int(crowd.steps[k]), mods) for k, mesh in enumerate(meshes)]
    app = ClientApp()

    @app.train()
    def train(message, context):
        return own[context.node_config["partition-id"]](message, context)

    @app.evaluate()
    def evaluate(message, context):
        return own[context.node_config["partition-id"]](message, context)

    return app


@pytest.mark.parametrize("strategy", ["fedavg", pytest.param({"name": "fedprox", "mu": 0.5}, marks=pytest.mark.matrix)])
def test_engines_as_clients_come_to_the_weights_of_the_core(strategy):
    settings, given = Federated(clients=CLIENTS, strategy=strategy, local_epochs=1.0), recipe()
    ours, theirs = (FlowerSimulation(given, clients(CLIENTS), settings) for _ in range(2))
    theirs._grid = LocalGrid(apps(given, ours.schedule.crowd), theirs.schedule)
    for _ in range(3):
        own, other = ours.round(), theirs.round()
        assert own.loss == pytest.approx(other.loss, rel=1e-4)
        torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-4, atol=1e-6)


def test_an_engine_measures_the_weights_that_it_is_sent():
    settings, given = Federated(clients=CLIENTS, local_epochs=1.0), recipe()
    sim = FlowerSimulation(given, clients(CLIENTS), settings)
    grid = LocalGrid(apps(given, sim.schedule.crowd), sim.schedule)
    wanted = sim.evaluate()
    content = RecordDict({"arrays": to_record(sim.weights)})
    asked = [Message(content, FIRST + k, "evaluate") for k in range(CLIENTS)]
    for k, reply in enumerate(grid.send_and_receive(asked)):
        found = reply.content["metrics"]
        assert found["loss"] == pytest.approx(wanted.client_losses[k], rel=1e-5)
        assert found["accuracy"] == pytest.approx(wanted.client_accuracies[k])
        assert found["num-examples"] == clients(CLIENTS).held_out.counts[k]
    other = RecordDict({"arrays": ArrayRecord([sim.weights.numpy()])})
    (reply,) = grid.send_and_receive([Message(other, FIRST, "evaluate")])
    assert reply.has_error() and "the arrays '0': a model is one array, 'weights', as `to_record`" in reply.error.reason


@pytest.mark.matrix
def test_engines_as_clients_under_secure_aggregation():
    settings, given = Federated(clients=CLIENTS, local_epochs=1.0), recipe()
    sim = FlowerSimulation(given, clients(CLIENTS), settings)
    rounds, kept = sim.schedule, {}
    for name, mods, around in (("plain", [], lambda each: each), ("secure", [secure_mod], SecureSum)):
        grid = LocalGrid(apps(given, rounds.crowd, mods), rounds)
        strategy = around(FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS))
        kept[name] = strategy.start(grid, to_record(sim.weights), num_rounds=2).arrays["weights"].numpy()
    assert kept["secure"] == pytest.approx(kept["plain"], abs=1e-5)
