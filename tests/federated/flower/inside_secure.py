"""Secure aggregation over a grid of Flower's kind. Run by test_flower.py."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.errors import UserError
from shoal.federated.flower import private
from shoal.federated.flower.grid import FIRST, LocalGrid
from shoal.federated.flower.secure_mod import KEYS, SECURE, SHARES, UNMASK, secure_mod
from shoal.federated.flower.secure_sum import SecureSum
from shoal.federated.schedule import Rounds, crowd_of
from shoal.federated.settings import Federated

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip
from flwr.clientapp.mod import fixedclipping_mod  # isort: skip
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg, FedAvgM, Krum  # isort: skip
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping  # isort: skip

CLIENTS = 6
START = {"first": np.arange(6.0).reshape(2, 3), "last": np.array([1.0, -2.0])}


def leaves(client, last):
    """A mod that has a client drop out at a stage."""

    def mod(message, context, call_next):
        told = message.content.config_records.get(SECURE)
        if told is not None and told["stage"] == last and context.node_config["partition-id"] == client:
            raise RuntimeError("no battery")
        return call_next(message, context)

    return mod


def client_app(mods, fails=()):
    app = ClientApp(mods=mods)

    @app.train()
    def train(message, context):
        client = int(context.node_config["partition-id"])
        if client in fails:
            raise RuntimeError("no battery")
        moved = np.random.default_rng(client)
        arrays = {
            name: Array(each.numpy() + moved.normal(size=each.numpy().shape))
            for name, each in message.content["arrays"].items()
        }
        metrics = MetricRecord({"num-examples": 10 * (client + 1), "loss": 0.5 * client})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)

    return app


def grid(mods, fails=(), dropout=0.0):
    settings = Federated(clients=CLIENTS, local_steps=1, dropout=dropout)
    return LocalGrid(client_app(mods, fails), Rounds(settings, crowd_of(settings, np.full(CLIENTS, 5), 5, 0)))


def strategy(kind=FedAvg, **options):
    return kind(
        fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS, min_evaluate_nodes=0, **options
    )


def start():
    return ArrayRecord({name: Array(each) for name, each in START.items()})


@pytest.mark.parametrize(("kind", "options"), [(FedAvg, {}), (FedAvgM, {"server_momentum": 0.9})])
@pytest.mark.parametrize("fails", [(), (2,), (0, 5)])
def test_the_secure_sum_is_the_plain_one_though_clients_drop_out_while_they_train(kind, options, fails):
    private.quieten()
    plain = strategy(kind, **options).start(grid([], fails), start(), num_rounds=3)
    secure = SecureSum(strategy(kind, **options)).start(grid([secure_mod], fails), start(), num_rounds=3)
    for name in START:
        np.testing.assert_allclose(secure.arrays[name].numpy(), plain.arrays[name].numpy(), rtol=0, atol=1e-6)
    for number in (1, 2, 3):
        theirs = plain.train_metrics_clientapp[number]["loss"]
        assert secure.train_metrics_clientapp[number]["loss"] == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize(("stage", "counts"), [(KEYS, False), (SHARES, False), (UNMASK, True)])
def test_a_client_may_drop_out_at_any_stage(stage, counts):
    """Who is gone before the training counts no more; who has sent its result does."""
    private.quieten()
    plain = strategy().start(grid([], () if counts else (3,)), start(), num_rounds=1)
    secure = SecureSum(strategy())
    found = secure.start(grid([leaves(3, stage), secure_mod]), start(), num_rounds=1)
    assert (secure.asked, secure.why, len(secure.failures)) == (CLIENTS, "", 1)
    for name in START:
        np.testing.assert_allclose(found.arrays[name].numpy(), plain.arrays[name].numpy(), rtol=0, atol=1e-6)


CLIP = 0.5


def clipped_mean():
    """The mean of clipped movements by the clients' samples: what differential privacy adds its noise to."""
    moved = []
    for client in range(CLIENTS):
        drawn = np.random.default_rng(client)
        moved.append(np.concatenate([drawn.normal(size=each.shape).ravel() for each in START.values()]))
    weights = [10 * (client + 1) for client in range(CLIENTS)]
    clipped = [each * min(1.0, CLIP / np.linalg.norm(each)) for each in moved]
    return np.average(clipped, axis=0, weights=weights)


def movement(result):
    return np.concatenate([(result.arrays[name].numpy() - each).ravel() for name, each in START.items()])


@pytest.mark.parametrize("secure", [False, True])
def test_differential_privacy_clips_each_client_and_its_noise_is_of_the_mean(secure):
    """Clients that clip may mask as well: the server then clips nothing, and adds the noise to the opened mean."""
    private.quieten()
    wrap = DifferentialPrivacyClientSideFixedClipping if secure else DifferentialPrivacyServerSideFixedClipping
    mods = [secure_mod, fixedclipping_mod] if secure else []

    def run(noise):
        inner = SecureSum(strategy()) if secure else strategy()
        return movement(wrap(inner, noise, CLIP, CLIENTS).start(grid(mods), start(), num_rounds=1))

    np.testing.assert_allclose(run(0.0), clipped_mean(), rtol=0, atol=1e-6)
    noise = np.concatenate([run(2.0) - clipped_mean() for _ in range(15)])
    assert noise.std() == pytest.approx(2.0 * CLIP / CLIENTS, rel=0.35)


def test_too_few_results_open_nothing_and_leave_the_model():
    secure = SecureSum(strategy())
    result = secure.start(grid([secure_mod], fails=(1, 2, 4)), start(), num_rounds=1)
    assert result.arrays is None or not result.arrays
    assert secure.why == "3 of 6 clients have sent results, and the threshold is 4"


def test_a_client_gives_no_result_without_a_mask_and_answers_no_stage_twice():
    private.begin_run()
    app = client_app([secure_mod])
    context = private.node_context(FIRST, {"partition-id": 0})

    def told(**values):
        return app(Message(RecordDict({"arrays": start(), SECURE: ConfigRecord(values)}), FIRST, "train"), context)

    with pytest.raises(ValueError, match="only under secure aggregation"):
        app(Message(RecordDict({"arrays": start()}), FIRST, "train"), context)
    with pytest.raises(ValueError, match="'unmask' of secure aggregation is not"):
        told(stage="unmask", there=[FIRST])
    key = told(stage="keys").content[SECURE]
    lone = {"nodes": [FIRST, 99], "masks": [key["mask"]] * 2, "boxes": [key["box"]] * 2}
    with pytest.raises(ValueError, match="above half"):
        told(stage="shares", threshold=1, **lone)
    boxes = told(stage="shares", threshold=2, **lone).content[SECURE]["boxes"]
    with pytest.raises(ValueError, match="1 clients with shares of 2 are too few"):
        told(stage="train", nodes=[FIRST], boxes=[boxes[0]])
    with pytest.raises(ValueError, match="or not of these"):
        told(stage="train", nodes=[FIRST, 98], boxes=[boxes[0], boxes[0]])
    reply = told(stage="train", nodes=[FIRST, 99], boxes=[boxes[0], boxes[0]])
    hidden = reply.content["arrays"][SECURE].numpy()
    assert hidden.dtype == np.uint64 and len(hidden) == 6 + 2 + 1 + 1
    assert reply.content["metrics"]["num-examples"] == 1 and reply.content["metrics"]["loss"] == 0
    with pytest.raises(ValueError, match="too few to be opened"):
        told(stage="unmask", there=[FIRST])


def test_strategies_that_look_at_single_results_are_refused():
    with pytest.raises(UserError, match="Krum looks at single results"):
        SecureSum(strategy(Krum))
