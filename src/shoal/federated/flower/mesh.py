"""A client that is a mesh as a Flower `ClientApp`: rank 0 answers the messages, the others follow it."""

from __future__ import annotations

import torch

from shoal.errors import UserError
from shoal.federated.flower import private
from shoal.federated.flower.clients import WEIGHTS, to_vector
from shoal.federated.mesh import MeshClient

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip
from flwr.clientapp.typing import Mod  # isort: skip

SECONDS = "seconds"
"""What a server adds to the config of a training: after so many a client makes no further step."""


CUT = "cut"
"""What a reply has beside its loss: whether the time was over before the steps were made."""


def client_app(mesh: MeshClient, steps: int, mods: list[Mod] | None = None) -> ClientApp:
    """Returns the app of the client that `mesh` is, for its rank 0, under a SuperNode or `serve`.

    steps: of a local training. mods: as of a ClientApp, such as `secure_mod`.

    It trains on the one array of a message (see Flat), and reads `server-round`, `proximal-mu` and `seconds` of the
    config. The reply has the array, `num-examples`, the mean loss, the `steps` that were made, and whether they were
    `cut` short. An evaluation replies `num-examples`, 0 where the client holds nothing out, the mean loss and, where
    there is a measure, the accuracy.
    """
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if not message.content.array_records:
            raise UserError("the server asks for a masked result: give federated.secure to this client's job, too")
        (arrays,) = message.content.array_records.values()
        config = message.content["config"]
        weights, limit = to_vector(arrays, _like(mesh)), config.get(SECONDS)
        mu, turn = float(config.get("proximal-mu", 0.0)), int(config.get("server-round", 1))
        done = mesh.train(weights, turn, steps, mu, None if limit is None else float(limit))
        metrics = {
            "num-examples": mesh.samples,
            "loss": done.losses / done.counts if done.counts else 0.0,
            "steps": done.steps,
            CUT: int(done.steps < steps),
        }
        ended = ArrayRecord({WEIGHTS: private.Array(done.weights.numpy())})
        return Message(RecordDict({"arrays": ended, "metrics": MetricRecord(metrics)}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        (arrays,) = message.content.array_records.values()
        found = mesh.measure(to_vector(arrays, _like(mesh)))
        metrics = {"num-examples": 0, "loss": 0.0} if found is None else {"num-examples": found[1], "loss": found[0]}
        if found is not None and found[2] is not None:
            metrics["accuracy"] = found[2]
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def _like(mesh: MeshClient) -> torch.Tensor:
    return torch.empty(0, dtype=mesh.flat.dtype)
