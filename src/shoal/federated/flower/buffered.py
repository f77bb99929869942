"""FedBuff (https://arxiv.org/abs/2106.06639) as a Flower strategy: asynchronous, on any grid."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.federated.flower import private  # noqa: F401  # before flwr

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict  # isort: skip
from flwr.serverapp import Grid  # isort: skip
from flwr.serverapp.strategy import FedAvg, Result  # isort: skip

POLL = 0.05
"""Seconds between two questions for replies where none has come."""


@dataclass(frozen=True)
class Out:
    """A client at work: its node, the version of the weights that it has, and when it was asked."""

    node: int
    version: int
    since: float


class FedBuff(FedAvg):
    """Updates the weights with every `buffer` results, whichever come first, while `at_once` clients work.

    A result that is s updates old counts 1 / sqrt(1 + s) times; `most_stale` drops older ones, None drops none. `lr`:
    of the update. A client that fails, or does not answer for `timeout` seconds, makes room for another one.

    weights: of a model that is one array, how many of its numbers are weights. The others are buffers, such as
    BatchNorm's statistics, and go to the mean of the results', whatever these began from: a variance of the newest
    weights less one of older may be below 0. None: all are.

    Of the last update: `asked`, how many clients were asked; `stale`, how many results were so many updates old;
    `lost`, those that failed or were too old; `replies`, the results.
    """

    def __init__(self, buffer: int, at_once: int, most_stale: int | None = None, lr: float = 1.0) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
        self.buffer, self.at_once, self.most_stale, self.lr = buffer, at_once, most_stale, lr
        self.weights: int | None = None
        self.stale: Counter[int] = Counter()
        self.lost = self.asked = 0
        self.replies: list[Message] = []
        self._out: dict[str, Out] = {}
        self._early: list[Message] = []  # results that came with the last one of an update: the next one's
        self._versions: dict[int, ArrayRecord] = {}
        self._rng = np.random.default_rng(0)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Makes `num_rounds` updates. Takes the arguments of Flower's strategies; clients evaluate nothing."""
        result, arrays = Result(), initial_arrays
        for number in range(1, num_rounds + 1):
            arrays = self.update(grid, number, arrays, train_config, timeout)
            result.arrays = arrays
            if evaluate_fn is not None and (measured := evaluate_fn(number, arrays)) is not None:
                result.evaluate_metrics_serverapp[number] = measured
        return result

    def update(
        self, grid: Grid, number: int, arrays: ArrayRecord, config: ConfigRecord | None = None, timeout: float = 3600
    ) -> ArrayRecord:
        """Waits for `buffer` results and returns the weights after update `number`; `arrays`: those before it."""
        version = number - 1
        self._versions[version] = arrays
        self.stale, self.lost, self.asked, self.replies = Counter(), 0, 0, []
        gathered: list[tuple[Message, int]] = []
        while len(gathered) < self.buffer:
            self._fill(grid, version, config)
            replies, self._early = self._early, []
            here = {each.metadata.reply_to_message_id for each in replies}
            replies += grid.pull_messages([each for each in self._out if each not in here])
            for reply in replies:
                if len(gathered) == self.buffer:
                    self._early.append(reply)
                else:
                    self._take(reply, self._out.pop(reply.metadata.reply_to_message_id), version, gathered)
            for identity in [key for key, each in self._out.items() if time.monotonic() - each.since > timeout]:
                del self._out[identity]
                self.lost += 1
            if not replies:
                time.sleep(POLL)
        self.replies = [reply for reply, _ in gathered]
        updated = self._updated(version, gathered)
        needed = {each.version for each in self._out.values()}
        self._versions = {kept: each for kept, each in self._versions.items() if kept in needed}
        return updated

    def _fill(self, grid: Grid, version: int, config: ConfigRecord | None) -> None:
        """Has idle clients begin from the newest weights until as many work as may."""
        busy = {each.node for each in self._out.values()}
        idle = [node for node in grid.get_node_ids() if node not in busy]
        for node in self._rng.permutation(idle)[: self.at_once - len(self._out)].tolist():
            told = ConfigRecord({**(config or {}), "server-round": version + 1})
            content = RecordDict({self.arrayrecord_key: self._versions[version], self.configrecord_key: told})
            (identity,) = grid.push_messages([Message(content, node, MessageType.TRAIN)])
            self._out[identity] = Out(node, version, time.monotonic())
            self.asked += 1

    def _take(self, reply: Message, asked: Out, version: int, gathered: list[tuple[Message, int]]) -> None:
        age = version - asked.version
        if reply.has_error() or (self.most_stale is not None and age > self.most_stale):
            self.lost += 1
            return
        self.stale[age] += 1
        gathered.append((reply, asked.version))

    def _updated(self, version: int, gathered: list[tuple[Message, int]]) -> ArrayRecord:
        """Returns the next weights: the newest, less the mean movement of the results."""
        moved: dict[str, NDArray[np.float64]] = {}
        weight, now = 0.0, self._versions[version]
        for reply, base in gathered:
            (arrays,) = reply.content.array_records.values()
            (metrics,) = reply.content.metric_records.values()
            own = float(metrics[self.weighted_by_key])
            weight += own
            for name, before in self._versions[base].items():
                step = (before.numpy() - arrays[name].numpy()).astype(np.float64)
                if self.weights is not None:
                    step[self.weights :] = (now[name].numpy() - arrays[name].numpy())[self.weights :]
                moved[name] = moved.get(name, 0.0) + own * (1 + version - base) ** -0.5 * step
        return ArrayRecord(
            {
                name: Array((each.numpy() - self._rate(moved[name]) * moved[name] / weight).astype(each.numpy().dtype))
                for name, each in now.items()
            }
        )

    def _rate(self, moved: NDArray[np.float64]) -> float | NDArray[np.float64]:
        return self.lr if self.weights is None else np.where(np.arange(moved.size) < self.weights, self.lr, 1.0)
