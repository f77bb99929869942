"""The client's end of secure aggregation: a mod for a Flower `ClientApp`, which lets no result leave it unmasked.

    app = ClientApp(mods=[secure_mod])

A round has three stages beside the training: `keys`, `shares` and `unmask` (see SecureSum). What a client keeps between
them lies in its context's state, and is forgotten after the round.
"""

from __future__ import annotations

import base64
import hashlib
import os

import numpy as np

from shoal.federated.flower import private
from shoal.federated.masks import masked, to_words

from cryptography.fernet import Fernet  # isort: skip
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey  # isort: skip
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict  # isort: skip
from flwr.clientapp.typing import ClientAppCallable  # isort: skip

SECURE = "secure"
"""The name of the stages' records."""
KEYS, SHARES, TRAIN, UNMASK = "keys", "shares", "train", "unmask"


def shared(own: bytes, other: bytes, purpose: str) -> bytes:
    """Returns the secret of two clients, from a private key of one and the public key of the other."""
    exchanged = X25519PrivateKey.from_private_bytes(own).exchange(X25519PublicKey.from_public_bytes(other))
    return hashlib.sha256(purpose.encode() + exchanged).digest()


def public_of(own: bytes) -> bytes:
    """Returns the public key of a private one."""
    return X25519PrivateKey.from_private_bytes(own).public_key().public_bytes_raw()


def secure_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answers a stage. Raises ValueError for a message of training that would have a result sent unmasked, or a stage
    out of turn."""
    told = message.content.config_records.get(SECURE)
    if told is None:
        raise ValueError(
            "this client answers only under secure aggregation: give the server's job federated.secure, or its "
            "strategy SecureSum"
        )
    stage, kept = str(told["stage"]), context.state.config_records.get(SECURE)
    if stage == KEYS:
        own = ConfigRecord({"mask": os.urandom(32), "box": os.urandom(32), "own": os.urandom(32), "next": SHARES})
        context.state[SECURE] = own
        keys = {"mask": public_of(_bytes(own, "mask")), "box": public_of(_bytes(own, "box"))}
        return Message(RecordDict({SECURE: ConfigRecord(keys)}), reply_to=message)
    if kept is None or kept["next"] != stage:
        raise ValueError(f"the stage {stage!r} of secure aggregation is not this client's next one")
    if stage == SHARES:
        return Message(RecordDict({SECURE: _shares(told, kept, context)}), reply_to=message)
    if stage == TRAIN:
        _narrow(kept, list(told["nodes"]))
        kept["boxes"], kept["next"] = told["boxes"], UNMASK
        del message.content[SECURE]  # mods below, such as one that clips, expect what the strategy alone sends
        return _masked(call_next(message, context), message, kept)
    answer = _opened(told, kept)
    del context.state[SECURE]
    return Message(RecordDict({SECURE: answer}), reply_to=message)


def _bytes(record: ConfigRecord, name: str) -> bytes:
    value = record[name]
    assert isinstance(value, bytes)
    return value


def _shares(told: ConfigRecord, kept: ConfigRecord, context: Context) -> ConfigRecord:
    """Cuts this client's secrets into shares, one in a box for each client that only that one opens."""
    nodes, threshold = list(told["nodes"]), int(told["threshold"])
    if context.node_id not in nodes or len(set(nodes)) != len(nodes) or not len(nodes) // 2 < threshold <= len(nodes):
        raise ValueError(f"{len(nodes)} clients with a threshold of {threshold}: it must be above half of them")
    kept.update({"nodes": nodes, "me": context.node_id, "masks": told["masks"], "keys": told["boxes"]})
    kept.update({"threshold": threshold, "next": TRAIN})
    seeds = private.create_shares(_bytes(kept, "own"), threshold, len(nodes))
    keys = private.create_shares(_bytes(kept, "mask"), threshold, len(nodes))
    boxes = [
        _box(kept, index).encrypt(len(seed).to_bytes(4, "big") + seed + key)
        for index, (seed, key) in enumerate(zip(seeds, keys, strict=True))
    ]
    return ConfigRecord({"boxes": boxes})


def _narrow(kept: ConfigRecord, there: list[int]) -> None:
    """Keeps of the clients of the round those that have given shares, between which masks are."""
    nodes = list(kept["nodes"])
    if kept["me"] not in there or not set(there) <= set(nodes) or len(set(there)) < int(kept["threshold"]):
        raise ValueError(f"{len(there)} clients with shares of {len(nodes)} are too few, or not of these")
    for name in ("masks", "keys", "nodes"):
        kept[name] = [value for node, value in zip(nodes, list(kept[name]), strict=True) if node in there]


def _box(kept: ConfigRecord, index: int) -> Fernet:
    return Fernet(base64.urlsafe_b64encode(shared(_bytes(kept, "box"), list(kept["keys"])[index], "box")))


def _masked(reply: Message, asked: Message, kept: ConfigRecord) -> Message:
    """Returns the reply with its movement, times its weight, its weight and its metrics in one masked vector."""
    (before,) = asked.content.array_records.values()
    (arrays,) = reply.content.array_records.values()
    (metrics,) = reply.content.metric_records.values()
    weight = float(metrics["num-examples"])
    moved = [(arrays[name].numpy().astype(np.float64) - before[name].numpy()).ravel() for name in before]
    rest = [float(value) for name, value in sorted(metrics.items()) if name != "num-examples"]
    vector = np.concatenate([*moved, rest]) * weight
    nodes, me = list(kept["nodes"]), int(kept["me"])
    pairs = {
        node: shared(_bytes(kept, "mask"), key, "mask")
        for node, key in zip(nodes, list(kept["masks"]), strict=True)
        if node != me
    }
    words = masked(to_words(np.append(vector, weight), len(nodes)), _bytes(kept, "own"), me, pairs)
    content = RecordDict(
        {
            "arrays": ArrayRecord({SECURE: private.Array(words)}),
            "metrics": MetricRecord(dict.fromkeys(metrics, 0.0) | {"num-examples": 1}),
        }
    )
    return Message(content, reply_to=asked)


def _opened(told: ConfigRecord, kept: ConfigRecord) -> ConfigRecord:
    """Returns, of each client, the share of its own seed if its result is in the sum, else of its key: never both."""
    nodes, there, me = list(kept["nodes"]), set(told["there"]), int(kept["me"])
    if me not in there or not there <= set(nodes) or len(there) < int(kept["threshold"]):
        raise ValueError(f"{len(there)} results of {len(nodes)} are too few to be opened, or not of these clients")
    found = []
    for index, node in enumerate(nodes):
        opened = _box(kept, index).decrypt(list(kept["boxes"])[index])
        size = int.from_bytes(opened[:4], "big")
        found.append(opened[4 : 4 + size] if node in there else opened[4 + size :])
    return ConfigRecord({"shares": found})
