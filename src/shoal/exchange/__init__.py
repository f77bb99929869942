"""Data-parallel algorithms, one a file, and the reducer that hands them full chunks in order."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from shoal.chunks import Chunk
from shoal.comm import Group
from shoal.errors import UserError, did_you_mean
from shoal.exchange.allreduce import AllReduce
from shoal.exchange.none import NoExchange
from shoal.plan import Option, option_name, option_parameters


class Algorithm(Protocol):
    """How replicas agree. `run` is plain blocking code on the lane: every rank calls it for the same chunks in the same order.

    `chunk_bytes` is the gradient size at which a chunk is closed: what the algorithm likes to send at once. Where replicas do not stay
    equal, a checkpoint of one is not that of all.
    """

    chunk_bytes: int
    keeps_replicas_equal: ClassVar[bool]

    def run(self, chunk: Chunk, group: Group) -> None:
        """Replaces `chunk.grad`, a sum over this rank's samples, by the sum over the samples of the whole `group`."""
        ...


_ALGORITHMS: dict[str, Any] = {"allreduce": AllReduce, "none": NoExchange}


def algorithm(option: Option) -> Algorithm:
    """The algorithm of a plan's `exchange`; UserError for an unknown name or parameter."""
    name = option_name(option, "exchange")
    if name not in _ALGORITHMS:
        raise UserError(
            f'plan.exchange = "{name}" is not implemented.{did_you_mean(name, list(_ALGORITHMS))} This version has: {", ".join(_ALGORITHMS)}'
        )
    try:
        return _ALGORITHMS[name](**option_parameters(option))
    except TypeError as error:
        raise UserError(f"plan.exchange = {dict(option) if not isinstance(option, str) else option}: {error}") from error
