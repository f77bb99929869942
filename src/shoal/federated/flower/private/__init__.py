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
    from flwr.app import Array, Context, Message, RecordDict
    from flwr.app.error import Error
    from flwr.common.constant import SType
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise UserError(
        f'Flower cannot be imported ({error}): pip install "shoal[fed]" "flwr>=1.41,<1.42", in an environment of its '
        "own where it asks for other versions of what is installed"
    ) from error

__all__ = [
    "Kept",
    "begin_run",
    "combine_shares",
    "create_shares",
    "drawn_by",
    "error_reply",
    "node_context",
    "number_message",
    "quieten",
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


@contextmanager
def drawn_by(seed: int) -> Iterator[None]:
    """Has Flower draw clients by `seed`: it takes them from Python's own generator."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def quieten() -> None:
    """Has Flower log errors only: it warns where clients evaluate nothing, as is meant here."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
