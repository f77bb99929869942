"""The settings of federated training, `[federated]` in a job file. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.errors import UserError, check_choice

STATE = "federated.safetensors"
"""The file in a run directory that holds the state of its rounds."""
PARTITIONS = ("iid", "label", "document")
WEIGHTINGS = ("samples", "equal")
LATE = ("drop", "partial")
MOST_SPREAD = 100
"""Of speeds: no client is then so fast or slow that a float has no number for it."""


@dataclass(frozen=True)
class Federated:
    """`[federated]`: who trains, how long, and what becomes of it.

    rounds: updates of the global model.
    clients: number of clients among whom the samples are dealt. By document, at most so many.
    fraction: the share of clients that are asked in a round; in asynchronous training, that work at once.
    strategy: "fedavg", "fedavgm", "fedadam", "fedprox", or a table {name = "fedprox", mu = 0.1} (see strategies).
    local_steps, local_epochs: the work of a client: so many batches of `train.global_batch` samples, or passes over
        its samples, rounded up to whole batches. One of the two; by default one pass.
    partition: "iid", "label" (by Dirichlet's distribution), "document", or a table {name = "label", alpha = 0.3}.
    weighting: movements count by the samples that made them ("samples"), or alike ("equal").
    deadline: the longest time of a round. The unit of time is one local step of a client of speed 1. None: none.
    late: what is done with clients that would come later: "drop" their results, or take what they have by then
        ("partial"), which is fewer local steps.
    speeds: the standard deviation of the logarithm of the clients' speeds; 0: all alike.
    dropout: the chance of a client that is asked to be gone before it answers.
    least: results without which a round leaves the model as it is.
    buffer: asynchronous: an update for so many results, whichever come first (FedBuff); 0: rounds.
    most_stale: asynchronous: results are dropped that are more than so many updates old; None: none are.
    secure: the server learns the sum of a round's results and no single one (secure aggregation); the number is the
        share of the round's clients whose results must come, above a half. None: it sees them all.
    eval_every: rounds between evaluations of the global model on what clients hold out; 0: only at the end.
    """

    rounds: int = 100
    clients: int = 10
    fraction: float = 1.0
    strategy: str | dict[str, Any] = "fedavg"
    local_steps: int | None = None
    local_epochs: float | None = None
    partition: str | dict[str, Any] = "iid"
    weighting: str = "samples"
    deadline: float | None = None
    late: str = "drop"
    speeds: float = 0.0
    dropout: float = 0.0
    least: int = 1
    buffer: int = 0
    most_stale: int | None = None
    secure: float | None = None
    eval_every: int = 1

    def __post_init__(self) -> None:
        for key in ("rounds", "clients", "fraction", "local_steps", "local_epochs", "deadline", "least"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise UserError(f"federated.{key} = {value}: give a number above 0")
        for key in ("speeds", "dropout", "buffer", "most_stale", "eval_every"):
            value = getattr(self, key)
            if value is not None and not value >= 0:
                raise UserError(f"federated.{key} = {value}: give 0 or more")
        if self.speeds > MOST_SPREAD:
            raise UserError(
                f"federated.speeds = {self.speeds}: speeds differ by e to that power; give at most {MOST_SPREAD}"
            )
        for key in ("fraction", "dropout"):
            if getattr(self, key) > 1:
                raise UserError(f"federated.{key} = {getattr(self, key)}: a share is at most 1")
        if self.local_steps is not None and self.local_epochs is not None:
            raise UserError("federated.local_steps and local_epochs both say how long a client trains: give one")
        check_choice(f"federated.weighting = {self.weighting!r} is not one of", self.weighting, WEIGHTINGS)
        check_choice(f"federated.late = {self.late!r} is not one of", self.late, LATE)
        self._check_together()

    def _check_together(self) -> None:
        if self.secure is not None and not 0.5 < self.secure <= 1:
            raise UserError(f"federated.secure = {self.secure}: give a share above 0.5, at most 1, such as 0.6")
        if self.least > self.asked:
            raise UserError(
                f"federated.least = {self.least}, but a round asks {self.asked} of the {self.clients} clients: no "
                "round would ever count. Give at most that, or a larger fraction"
            )
        if self.dropout == 1:
            raise UserError("federated.dropout = 1: no result would ever come. Give less")
        if self.buffer:
            if self.deadline is not None:
                raise UserError("federated.deadline is of rounds, and with a buffer there are none: remove one of them")
            if self.buffer > self.asked:
                raise UserError(
                    f"federated.buffer = {self.buffer}, but {self.asked} clients work at once: an update would wait "
                    "for clients that are asked after it. Give a smaller buffer, or a larger fraction"
                )
            if self.least > self.buffer:
                raise UserError(
                    f"federated.least = {self.least}, but an update is made of federated.buffer = {self.buffer} "
                    "results: none would ever count. Give at most that, or a larger buffer"
                )
            if self.secure is not None:
                raise UserError("federated.secure is of rounds, whose results are opened together: remove it or buffer")
        elif self.most_stale is not None:
            raise UserError("federated.most_stale is of asynchronous training: give federated.buffer too")

    @property
    def asked(self) -> int:
        """The number of clients asked in a round, or that work at once."""
        return max(1, round(self.fraction * self.clients))
