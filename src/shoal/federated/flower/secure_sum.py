"""Secure aggregation (https://eprint.iacr.org/2017/281) as a Flower strategy around another one: the server learns the
mean of the clients' movements, and of no client its own.

A round: clients give public keys (`keys`); each cuts its two secrets into shares that any `threshold` of them can put
together, and sends one to each other client through the server, encrypted (`shares`); those that did train, and send
results that are masked for each other; those whose results came tell their shares of what is to be taken off the sum
(`unmask`). So clients may drop out at any time, as long as the threshold is left. The server is trusted to hand on the
clients' keys; a client that lies about its result is not found out.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shoal.errors import UserError
from shoal.federated.flower import private
from shoal.federated.flower.grid import BESIDE
from shoal.federated.flower.secure_mod import KEYS, SECURE, SHARES, TRAIN, UNMASK, public_of, shared
from shoal.federated.masks import Words, from_words, unmasked

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict  # isort: skip
from flwr.serverapp import Grid  # isort: skip
from flwr.serverapp import strategy as flower  # isort: skip
from flwr.serverapp.strategy import FedAvg, Strategy  # isort: skip

MEANS = (flower.FedAvg, flower.FedAvgM, flower.FedProx, flower.FedAdam, flower.FedAdagrad, flower.FedYogi)
"""Strategies that need nothing but the mean."""


class SecureSum(Strategy):
    """Gives `strategy` the mean as the one reply that it gets. Clients have `secure_mod`.

    threshold: share of the clients of a round whose results must come, above a half. timeout: seconds for a stage.

    asked: how many clients the last round has begun with. failures: errors of clients in its stages. why: it has not
    been opened; "" where it was. opened: the mean of the last one that was, as its one reply.

    Raises UserError for a strategy that looks at single results.
    """

    def __init__(self, strategy: FedAvg, threshold: float = 0.6, timeout: float = 600.0) -> None:
        if type(strategy) not in MEANS:
            raise UserError(
                f"{type(strategy).__name__} looks at single results, which secure aggregation hides: take one of "
                f"{', '.join(each.__name__ for each in MEANS)}"
            )
        if not 0.5 < threshold <= 1:
            raise UserError(f"threshold = {threshold}: give a share above 0.5, at most 1")
        self.inner, self._share, self._timeout = strategy, threshold, timeout
        self.asked, self.why, self.failures = 0, "", list[Message]()
        self.opened = list[Message]()

    def summary(self) -> None:
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Has the clients of the round agree on masks; returns the messages of their training."""
        asked = {
            each.metadata.dst_node_id: each for each in self.inner.configure_train(server_round, arrays, config, grid)
        }
        self._grid, self._arrays, self._nodes, self._threshold = grid, arrays, list[int](), 0
        self.asked, self.failures = len(asked), []
        keys = self._stage({node: {"stage": KEYS} for node in asked})
        self.why = f"{len(keys)} of {len(asked)} clients have given keys: a sum of fewer than two hides nothing"
        if len(keys) < 2:
            return []
        nodes = sorted(keys)
        threshold = max(len(nodes) // 2 + 1, int(np.ceil(self._share * len(nodes))))
        self._masks = {node: keys[node]["mask"] for node in nodes}
        everyone = {
            "stage": SHARES,
            "threshold": threshold,
            "nodes": nodes,
            "masks": [keys[node]["mask"] for node in nodes],
            "boxes": [keys[node]["box"] for node in nodes],
        }
        boxes = self._stage(dict.fromkeys(nodes, everyone))
        if self._too_few(len(boxes), len(nodes), threshold, "given shares"):
            return []
        self._nodes, self._threshold = sorted(boxes), threshold
        told = []
        for node in self._nodes:
            index = nodes.index(node)
            shares = [list(boxes[sender]["boxes"])[index] for sender in self._nodes]
            own = {"stage": TRAIN, "nodes": self._nodes, "boxes": shares}
            content = RecordDict({**asked[node].content, SECURE: ConfigRecord(own)})
            told.append(Message(content, node, asked[node].metadata.message_type))
        return told

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Opens the sum and gives its mean to the strategy; without enough results the model stays."""
        good = {reply.metadata.src_node_id: reply for reply in replies if not reply.has_error()}
        if not self._nodes or self._too_few(len(good), len(self._nodes), self._threshold, "sent results"):
            return None, None
        results = [each.content["arrays"][SECURE].numpy() for each in good.values()]
        total: Words = np.sum(results, axis=0, dtype=np.uint64)
        opened = self._stage({node: {"stage": UNMASK, "there": sorted(good)} for node in good})
        if self._too_few(len(opened), len(good), self._threshold, "told their shares of the masks"):
            return None, None
        sums = from_words(self._unmasked(total, sorted(good), opened))
        first = next(iter(good.values()))
        first.content = self._mean(sums, first)
        self.opened = [first]
        return self.inner.aggregate_train(server_round, [first])

    def _too_few(self, number: int, of: int, threshold: int, what: str) -> bool:
        """Returns whether fewer clients than the threshold have done something, and says so."""
        self.why = (
            f"{number} of {of} clients have {what}, and the threshold is {threshold}" if number < threshold else ""
        )
        return number < threshold

    def _unmasked(self, total: Words, there: list[int], opened: dict[int, ConfigRecord]) -> Words:
        own: dict[int, bytes] = {}
        left_over: dict[tuple[int, int], bytes] = {}
        for index, node in enumerate(self._nodes):
            parts = [list(each["shares"])[index] for each in list(opened.values())[: self._threshold]]
            secret = private.combine_shares(parts)
            if node in there:
                own[node] = secret
                continue
            assert public_of(secret) == self._masks[node]
            left_over |= {(each, node): shared(secret, self._masks[each], "mask") for each in there}
        return unmasked(total, own, left_over)

    def _mean(self, sums: np.ndarray, like: Message) -> RecordDict:
        """Returns the sums as a client's reply would have them."""
        weight, values = sums[-1], sums[:-1] / sums[-1]
        arrays, start = {}, 0
        for name, before in self._arrays.items():
            now = before.numpy()
            moved = values[start : start + now.size].reshape(now.shape)
            arrays[name] = Array((now + moved).astype(now.dtype))
            start += now.size
        (metrics,) = like.content.metric_records.values()
        names = [name for name in sorted(metrics) if name != "num-examples"]
        means = {name: float(value) for name, value in zip(names, values[start:], strict=True)}
        record = MetricRecord({"num-examples": round(weight), **means})
        return RecordDict({"arrays": ArrayRecord(arrays), "metrics": record})

    def _stage(self, told: dict[int, dict[str, object]]) -> dict[int, ConfigRecord]:
        """Asks clients; returns the answers of those that gave one."""
        messages = [
            Message(RecordDict({SECURE: ConfigRecord(each)}), node, "train", group_id=BESIDE)
            for node, each in told.items()
        ]
        replies = list(self._grid.send_and_receive(messages, timeout=self._timeout))
        self.failures += [each for each in replies if private.is_own_failure(each)]
        return {each.metadata.src_node_id: each.content[SECURE] for each in replies if not each.has_error()}

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Asks nobody: an evaluation would tell of a client by itself."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None
