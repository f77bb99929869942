"""Flower's strategies over the grid in the process. Run by test_flower.py."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.errors import UserError
from shoal.federated.flower import private
from shoal.federated.flower.buffered import FedBuff
from shoal.federated.flower.clients import to_record, to_vector
from shoal.federated.flower.simulation import FlowerSimulation
from shoal.federated.flower.strategies import NAMES
from shoal.federated.settings import Federated
from shoal.federated.simulation import Simulation
from shoal.federated.state import load_state, save_state
from shoal.federated.strategies import OF_FLOWER, STRATEGIES
from tests.federated.common import clients, recipe
from tests.federated.test_simulation import Normed

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip
from flwr.supercore import telemetry  # isort: skip


def flower(settings: Federated) -> FlowerSimulation:
    return FlowerSimulation(recipe(), clients(settings.clients), settings)


def test_telemetry_is_off():
    assert telemetry.FLWR_TELEMETRY_ENABLED == "0"
    assert logging.getLogger("flwr").name == "flwr"


@pytest.mark.parametrize("strategy", ["fedavg", {"name": "fedavgm", "momentum": 0.5}, {"name": "fedprox", "mu": 0.5}])
def test_flower_s_rounds_are_those_of_the_core(strategy):
    settings = Federated(
        clients=6, strategy=strategy, dropout=0.2, speeds=0.5, deadline=4.0, late="partial", local_epochs=1.0
    )
    ours, theirs = Simulation(recipe(), clients(6), settings), flower(settings)
    for _ in range(4):
        own, other = ours.round(), theirs.round()
        assert own.round == other.round and own.samples == other.samples
        torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("strategy", "rounds"), [("fedavgm", 4), ("fedadam", 1), ("fedyogi", 1)])
def test_statistics_are_means_whatever_optimizer_the_server_has(strategy, rounds):
    """Momentum brought variances below 0."""
    settings, given = Federated(clients=6, strategy=strategy, local_steps=10), recipe(model=Normed)
    ours = Simulation(given, clients(6), replace(settings, strategy="fedavgm"))
    theirs = FlowerSimulation(given, clients(6), settings)
    for _ in range(rounds):
        ours.round()
        theirs.round()
    buffers = slice(ours.flat.weights, None)
    torch.testing.assert_close(ours.weights[buffers], theirs.weights[buffers], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad", "fedmedian", "fedtrimmedavg"])
def test_further_strategies_learn(name):
    sim = flower(Federated(clients=6, strategy=name, local_epochs=2.0))
    before = sim.evaluate().accuracy
    for _ in range(12):
        sim.round()
    assert sim.evaluate().accuracy > max(0.5, before)


def test_the_core_knows_which_names_are_flower_s():
    assert set(NAMES) == {*STRATEGIES, *OF_FLOWER}
    with pytest.raises(UserError, match="'krum' is Flower's: `shoal fed sim --flower` has it"):
        Simulation(recipe(), clients(6), Federated(clients=6, strategy="krum"))


@pytest.mark.parametrize("strategy", ["krum", {"name": "multikrum", "num_nodes_to_select": 2}])
def test_a_strategy_that_chooses_clients_moves_the_model(strategy):
    sim = flower(Federated(clients=6, strategy=strategy, local_steps=2))
    start = sim.weights.clone()
    sim.round()
    assert not torch.equal(start, sim.weights) and torch.isfinite(sim.weights).all()


def test_a_round_with_too_few_results_changes_nothing():
    sim = flower(Federated(clients=6, dropout=0.5, least=5, local_steps=2))
    seen = set()
    for _ in range(10):
        before = sim.weights.clone()
        result = sim.round()
        assert result.applied is (len(result.round.tasks) >= 5) is not torch.equal(before, sim.weights)
        seen.add(result.applied)
    assert seen == {True, False}


def test_fedbuff_learns_from_stale_results():
    sim = flower(Federated(clients=12, fraction=0.5, buffer=3, speeds=1.0, dropout=0.1, local_steps=3))
    stale = []
    for _ in range(60):
        result = sim.round()
        stale += result.round.stale
        assert len(result.round.tasks) == 3
    assert max(stale) > 2 and sim.evaluate().accuracy > 0.75


class Now:
    """A grid whose clients answer at once, but one, which answers only when asked for the third time."""

    def __init__(self) -> None:
        self.waiting: dict[str, Message] = {}
        self.asked = 0
        private.begin_run()

    def get_node_ids(self):
        return [2, 3, 4]

    def push_messages(self, messages):
        self.asked += len(messages)
        return [private.number_message(each, self._keep(each)) for each in messages]

    def _keep(self, message: Message) -> int:
        number = len(self.waiting) + 1000
        while str(number) in self.waiting:
            number += 1
        self.waiting[str(number)] = message
        return number

    def pull_messages(self, ids):
        return []


def reply_of(message: Message, weights: list[float], samples: int) -> Message:
    content = RecordDict(
        {
            "arrays": ArrayRecord({"w": private.Array(np.array(weights))}),
            "metrics": MetricRecord({"num-examples": samples}),
        }
    )
    return Message(content, reply_to=message)


def test_an_update_of_fedbuff_by_hand():
    """Weights 10; a result of 3 samples from now moved by 2, one of 1 sample, 3 updates old, that began at 4 by 1."""
    strategy = FedBuff(buffer=2, at_once=2)
    strategy._versions = {
        number: ArrayRecord({"w": private.Array(np.array([value]))}) for number, value in ((0, 4.0), (3, 10.0))
    }
    private.begin_run()
    asked = Message(RecordDict({}), 2, "train")
    found = strategy._updated(3, [(reply_of(asked, [8.0], 3), 3), (reply_of(asked, [3.0], 1), 0)])
    assert found["w"].numpy() == pytest.approx([10 - (3 * 2 + 1 * 0.5 * 1) / 4])


def test_statistics_in_an_update_of_fedbuff_by_hand():
    """Behind one weight a variance of 0.25 now, and of 1 before: it goes to those of the results from where it is."""
    strategy = FedBuff(buffer=2, at_once=2, lr=0.5)
    strategy.weights = 1
    before = ((0, [4.0, 1.0]), (3, [10.0, 0.25]))
    strategy._versions = {number: ArrayRecord({"w": private.Array(np.array(values))}) for number, values in before}
    private.begin_run()
    asked = Message(RecordDict({}), 2, "train")
    found = strategy._updated(3, [(reply_of(asked, [8.0, 0.5], 3), 3), (reply_of(asked, [3.0, 0.05], 1), 0)])
    wanted = [10 - 0.5 * (3 * 2 + 1 * 0.5 * 1) / 4, 0.25 - (3 * (0.25 - 0.5) + 1 * 0.5 * (0.25 - 0.05)) / 4]
    assert found["w"].numpy() == pytest.approx(wanted)


def test_results_that_come_together_are_shared_out_among_updates():
    grid, strategy = Now(), FedBuff(buffer=2, at_once=3)
    came = []

    def pull(ids):  # all three answer at once, and only once
        new = [each for each in ids if each not in came]
        came.extend(new)
        return [reply_of(grid.waiting[each], [1.0], 1) for each in new]

    grid.pull_messages = pull
    start = ArrayRecord({"w": private.Array(np.array([3.0]))})
    first = strategy.update(grid, 1, start)
    assert len(strategy.replies) == 2 and len(strategy._early) == 1
    strategy.update(grid, 2, first)
    assert len(strategy.replies) == 2 and strategy.stale == {1: 1, 0: 1}


def test_clients_that_do_not_answer_make_room_for_others(monkeypatch):
    monkeypatch.setattr("shoal.federated.flower.buffered.POLL", 0.01)
    grid = Now()

    def pull(ids):
        if grid.asked < 4:  # nobody answers until the first two were given up
            return []
        return [reply_of(grid.waiting[each], [1.0], 1) for each in list(ids)[-1:]]

    grid.pull_messages = pull
    strategy = FedBuff(buffer=1, at_once=2)
    start = ArrayRecord({"w": private.Array(np.array([3.0]))})
    updated = strategy.update(grid, 1, start, timeout=0.05)
    assert updated["w"].numpy() == pytest.approx([1.0]) and strategy.lost == 2


def test_a_client_app_answers_one_message_and_its_failure_is_its_own():
    settings = Federated(clients=4, local_epochs=1.0)
    sim = flower(settings)
    seen = []
    app = ClientApp()

    @app.train()
    def train(message, context):
        seen.append(context.node_config["partition-id"])
        if context.node_config["partition-id"] == 2:
            raise RuntimeError("no battery")
        return reply_of(message, [float(context.node_config["partition-id"])], 1)

    grid = type(sim._grid)(app, sim.schedule)
    messages = [Message(RecordDict({}), node, "train") for node in grid.get_node_ids()]
    replies = grid.send_and_receive(messages)
    assert seen == [0, 1, 2, 3] and [reply.has_error() for reply in replies] == [False, False, True, False]
    assert "no battery" in replies[2].error.reason


def test_vectors_travel_as_they_are():
    weights = torch.randn(7)
    record = to_record(weights)
    assert torch.equal(to_vector(record, weights), weights)
    kept = record["weights"]
    sent = private.Array(kept.dtype, kept.shape, kept.stype, kept.data)
    assert torch.equal(to_vector(ArrayRecord({"weights": sent}), weights), weights)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"strategy": "fedavgg"}, 'Did you mean "fedavg"'),
        ({"strategy": {"name": "krum", "malicious": 1}}, "has no parameter"),
        ({"strategy": "krum", "buffer": 2}, "FedBuff"),
    ],
)
def test_what_flower_does_not_have_is_refused(settings, says):
    with pytest.raises(UserError, match=says):
        flower(replace(Federated(clients=6), **settings))


def test_rounds_go_on_in_another_process():
    first, second = (flower(Federated(clients=5, strategy="fedmedian", local_steps=2)) for _ in range(2))
    whole = flower(Federated(clients=5, strategy="fedmedian", local_steps=2))
    for _ in range(2):
        first.round()
    second.load(*first.state())
    for sim, rounds in ((second, 2), (whole, 4)):
        for _ in range(rounds):
            sim.round()
    assert torch.equal(second.weights, whole.weights)


@pytest.mark.parametrize("strategy", ["fedadam", "fedyogi", {"name": "fedavgm", "momentum": 0.7}])
def test_a_strategy_s_memory_goes_on_in_another_process(strategy, tmp_path):
    settings = Federated(clients=5, strategy=strategy, local_steps=2)
    first, second, whole = (flower(settings) for _ in range(3))
    for _ in range(2):
        first.round()
    save_state(first, tmp_path, {})
    assert load_state(second, tmp_path, {})
    for sim, rounds in ((second, 2), (whole, 4)):
        for _ in range(rounds):
            sim.round()
    assert torch.equal(second.weights, whole.weights)


def test_clients_at_work_do_not_go_on_in_another_process():
    settings = Federated(clients=5, buffer=2, local_steps=2)
    kept = flower(settings)
    kept.round()
    with pytest.raises(UserError, match=r"give another run.dir, or leave --flower out"):
        flower(settings).load(*kept.state())
