"""Who trains in a round, on which weights, for how long, and whose result counts: decided before anything is computed.

Time is simulated; its unit is one local step of a client of speed 1. All draws are keyed by seed, round and client, so
a round can be drawn again at any time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.data.keyed import derive_key, keyed_hash
from shoal.federated.partition import Numbers
from shoal.federated.settings import Federated


@dataclass(frozen=True)
class Task:
    """A client trains `steps` local steps on the weights of version `base`; its movement counts `factor` times. What it
    draws is by `turn`."""

    client: int
    steps: int
    base: int
    turn: int
    factor: float = 1.0


@dataclass(frozen=True)
class Round:
    """What comes of a round.

    number: of the round, from 1 on. tasks: whose results count. asked: number of clients that were asked.
    dropped: those that went away. late: those that came after the deadline, or with a result too old.
    partial: those that were cut short by the deadline. stale: how many updates old each result is.
    seconds: simulated time of the round; None where clients are real.
    """

    number: int
    tasks: tuple[Task, ...]
    asked: int
    dropped: int
    late: int
    partial: int
    stale: tuple[int, ...]
    seconds: float | None


class Schedule(Protocol):
    """Draws one round after the other; `state` and `load` carry it over a restart."""

    def draw(self, number: int) -> Round: ...
    def needed(self, version: int) -> set[int]:
        """Returns the versions of the weights that rounds after `version` may begin from."""

    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Crowd:
    """The clients: `steps` of each one's work, `speeds`, and the `seed` of all draws."""

    steps: Numbers
    speeds: NDArray[np.float64]
    seed: int

    def chances(self, what: str, number: int, clients: Numbers) -> NDArray[np.float64]:
        """Returns numbers in [0, 1), drawn for `what` in a round for each client."""
        return keyed_hash(clients.astype(np.uint64), derive_key(what, self.seed, number)) / 2.0**64


def crowd_of(settings: Federated, counts: Numbers, batch: int, seed: int) -> Crowd:
    """Returns the clients that have `counts` samples, which work on batches of `batch`."""
    epochs = 1.0 if settings.local_epochs is None else settings.local_epochs
    steps = np.maximum(1, np.ceil(epochs * counts / batch - 1e-9)).astype(np.int64)
    if settings.local_steps is not None:
        steps = np.full(len(counts), settings.local_steps, np.int64)
    drawn = np.random.default_rng(derive_key("federated speeds", seed)).standard_normal(len(counts))
    return Crowd(steps, np.exp(settings.speeds * drawn), seed)


@dataclass
class Rounds:
    """Rounds: clients are asked together, and the update waits for all of them, or for the deadline."""

    settings: Federated
    crowd: Crowd

    def draw(self, number: int) -> Round:
        settings, crowd = self.settings, self.crowd
        everyone = np.arange(len(crowd.steps), dtype=np.int64)
        most = max(1, round(settings.fraction * len(everyone)))
        if most < len(everyone):
            rng = np.random.default_rng(derive_key("federated asked", crowd.seed, number))
            everyone = np.sort(rng.choice(len(everyone), most, replace=False))
        return self.answers(number, everyone)

    def answers(self, number: int, everyone: Numbers) -> Round:
        """Returns what comes of a round in which these clients are asked."""
        settings, crowd, most = self.settings, self.crowd, len(everyone)
        there = everyone[crowd.chances("dropout", number, everyone) >= settings.dropout]
        steps, speeds = crowd.steps[there], crowd.speeds[there]
        in_time = np.full(len(there), True)
        done, partial = steps, 0
        if settings.deadline is not None:
            within = np.minimum(np.floor(settings.deadline * speeds + 1e-9), steps).astype(np.int64)
            done = np.minimum(steps, within) if settings.late == "partial" else steps
            in_time = (done > 0) & (done <= within)
            partial = int((in_time & (done < steps)).sum())
        cut_off = settings.deadline is not None and (partial > 0 or not in_time.all())
        took = float((done[in_time] / speeds[in_time]).max()) if in_time.any() else 0.0
        tasks = tuple(
            Task(int(client), int(count), number - 1, number)
            for client, count in zip(there[in_time], done[in_time], strict=True)
        )
        return Round(
            number,
            tasks,
            asked=most,
            dropped=most - len(there),
            late=int((~in_time).sum()),
            partial=partial,
            stale=(0,) * len(tasks),
            seconds=float(settings.deadline or 0.0) if cut_off else took,
        )

    def needed(self, version: int) -> set[int]:
        return {version}

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Has nothing to load: each round is drawn by its number."""


@dataclass
class Buffered:
    """Asynchronous training with a buffer (FedBuff, https://arxiv.org/abs/2106.06639): a number of clients works at
    any time, each on the weights that were the newest when it began; `settings.buffer` results make an update, in which
    one that is s updates old counts 1 / sqrt(1 + s) times. Whoever ends makes room for another client.
    """

    settings: Federated
    crowd: Crowd
    clock: float = 0.0
    begun: int = 0
    working: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Heap of those at work: when each ends, its turn, which client it is, the version that it began from."""

    def draw(self, number: int) -> Round:
        version, settings, before = number - 1, self.settings, self.clock
        tasks, stale, asked, dropped, late = list[Task](), list[int](), 0, 0, 0
        asked += self._fill(version)
        while len(tasks) < settings.buffer:
            self.clock, turn, client, base = heapq.heappop(self.working)
            age = version - base
            if self.crowd.chances("dropout", turn, np.array([client]))[0] < settings.dropout:
                dropped += 1
            elif settings.most_stale is not None and age > settings.most_stale:
                late += 1
            else:
                tasks.append(Task(client, int(self.crowd.steps[client]), base, turn, (1 + age) ** -0.5))
                stale.append(age)
            asked += self._fill(version, but=client)
        return Round(number, tuple(tasks), asked, dropped, late, 0, tuple(stale), self.clock - before)

    def _fill(self, version: int, but: int = -1) -> int:
        """Has idle clients begin until as many work as may; returns how many began. `but`: who has just ended, and
        begins again only where nobody else is idle."""
        busy, before = {client for _, _, client, _ in self.working}, self.begun
        while len(self.working) < self._at_once:
            client = self._idle(busy, but)
            ends = self.clock + float(self.crowd.steps[client] / self.crowd.speeds[client])
            heapq.heappush(self.working, (ends, self.begun, client, version))
            self.begun += 1
            busy.add(client)
        return self.begun - before

    @property
    def _at_once(self) -> int:
        return max(1, round(self.settings.fraction * len(self.crowd.steps)))

    def _idle(self, busy: set[int], but: int) -> int:
        clients = len(self.crowd.steps)
        rng = np.random.default_rng(derive_key("federated asked", self.crowd.seed, self.begun))
        if 2 * (len(busy) + 1) < clients:  # a few draws find one of so many
            while (client := int(rng.integers(clients))) in busy or client == but:
                continue
            return client
        idle = [client for client in range(clients) if client not in busy]
        others = [client for client in idle if client != but]
        return int(rng.choice(others or idle))

    def needed(self, version: int) -> set[int]:
        oldest = 0 if self.settings.most_stale is None else version - self.settings.most_stale
        return {version} | {base for _, _, _, base in self.working if base >= oldest}

    def state(self) -> dict[str, Any]:
        return {"clock": self.clock, "begun": self.begun, "working": [list(each) for each in self.working]}

    def load(self, state: dict[str, Any]) -> None:
        self.clock, self.begun = float(state["clock"]), int(state["begun"])
        self.working = [(float(ends), int(turn), int(who), int(base)) for ends, turn, who, base in state["working"]]


def schedule_of(settings: Federated, crowd: Crowd) -> Schedule:
    """Returns the schedule that the settings ask for."""
    return Buffered(settings, crowd) if settings.buffer else Rounds(settings, crowd)


def in_groups(tasks: Sequence[Task], size: int) -> list[list[Task]]:
    """Cuts `tasks` into groups of at most `size`, those of most steps first, so that a group ends almost together."""
    longest = sorted(tasks, key=lambda task: -task.steps)
    return [longest[first : first + size] for first in range(0, len(longest), size)]
