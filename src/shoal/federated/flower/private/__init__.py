"""What Shoal needs of Flower beyond its public interface, in one place, and Flower's habits that are switched off.

Written for flwr 1.41. Importing this switches telemetry and the question for updates off, unless the environment says
otherwise; it must come before any import of `flwr`.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

for _name, _value in (("FLWR_TELEMETRY_ENABLED", "0"), ("FLWR_DISABLE_UPDATE_CHECK", "1")):
    os.environ.setdefault(_name, _value)

from shoal.errors import UserError  # noqa: E402

try:
    from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
    from flwr.app.error import Error
    from flwr.common.constant import SType
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
    from flwr.serverapp.strategy import FedAvgM, Strategy
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise UserError(
        f'Flower cannot be imported ({error}): pip install "shoal[fed]" "flwr>=1.41,<1.42", in an environment of its '
        "own where it asks for other versions of what is installed"
    ) from error

__all__ = [
    "CRITICAL",
    "Kept",
    "begin_run",
    "combine_shares",
    "create_shares",
    "drawn_by",
    "error_reply",
    "is_own_failure",
    "memory_of",
    "node_context",
    "number_message",
    "quieten",
    "remember",
]

RUN, SERVER, TASK = 1, 1, 1
"""Ids of a run in this process, of its server, and of the task that the server is."""
GONE, FAILED = 1, 2
"""Codes of errors in replies: of a client that went away, of one that failed."""


class Kept(Array):
    """An array that stays what it is within a process: Flower's own is bytes, written and parsed for each use."""

    def __init__(self, values: NDArray[Any]) -> None:
        self.dtype, self.shape, self.stype = str(values.dtype), tuple(values.shape), SType.NUMPY
        self._values = values

    def numpy(self) -> NDArray[Any]:
        return self._values

    @property
    def data(self) -> bytes:
        """The bytes that Flower would send."""
        return Array.from_numpy_ndarray(self._values).data


def begin_run() -> Run:
    """Makes this process the server of a run, which `Message` takes its metadata from; returns the run."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, SERVER, TASK
    return Run.create_empty(RUN)


def number_message(message: Message, number: int) -> str:
    """Gives a message the id that a SuperLink would give it; returns it."""
    identity = str(number)
    message.metadata.__dict__["_message_id"] = identity
    return identity


def node_context(node: int, config: dict[str, int]) -> Context:
    """Returns the context of a node."""
    return Context(RUN, node, dict(config), RecordDict(), {})


def error_reply(message: Message, code: int, reason: str) -> Message:
    """Returns the reply that stands for a client without a result."""
    return Message(Error(code=code, reason=reason), reply_to=message)


def is_own_failure(reply: Message) -> bool:
    """Returns whether a reply says that its client failed, rather than that it went away."""
    return reply.has_error() and reply.error.code == FAILED


_MEMORY = ("m_t", "v_t", "momentum_vector")
"""What strategies keep from round to round, beside what they are given: by array name, or a list."""


def memory_of(strategy: Strategy) -> dict[str, NDArray[Any]]:
    """Returns what a strategy keeps from round to round, by name."""
    found: dict[str, NDArray[Any]] = {}
    for name in _MEMORY:
        kept = getattr(strategy, name, None)
        if isinstance(kept, dict):
            found |= {f"{name}/{key}": each for key, each in kept.items()}
        elif kept is not None:
            found |= {f"{name}/{index}": each for index, each in enumerate(kept)}
    return found


def remember(strategy: Strategy, memory: dict[str, NDArray[Any]], arrays: ArrayRecord) -> None:
    """Gives a new strategy what `memory_of` has returned, and the weights of that time."""
    for name in _MEMORY:
        own = {key.partition("/")[2]: each for key, each in memory.items() if key.startswith(f"{name}/")}
        if own:
            setattr(strategy, name, list(own.values()) if name == "momentum_vector" else own)
    if isinstance(strategy, FedAvgM):
        strategy.current_arrays = arrays


@contextmanager
def drawn_by(seed: int) -> Iterator[None]:
    """Has Flower draw clients by `seed`: it takes them from Python's own generator."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


CRITICAL = logging.CRITICAL


def quieten(level: int = logging.ERROR) -> None:
    """Has Flower log nothing below `level`: it warns where clients evaluate nothing, as is meant here, and calls an
    error what a round counts: an answer that comes too late, a client that failed."""
    logging.getLogger("flwr").setLevel(level)
