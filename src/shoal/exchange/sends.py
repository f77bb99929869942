"""What an algorithm sends in a step, for predictions of a plan's time and traffic."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.comm.codecs import codec
from shoal.plan import Option

CODED = 8.0
"""Times that a sum through a codec reads or writes the gradients: measured, all codecs but topk."""


@dataclass(frozen=True)
class Sends:
    """What a rank sends in a step, in the long run.

    - `share`: of the bytes of an exact sum of the gradients over the same ranks
    - `passes`: how many times the bytes of the gradients are read or written for it, beside computing
    - `beside`: it goes on while the next steps compute
    - `inside_hosts`: ranks of a host sum exactly before: the share is of what goes between hosts
    """

    share: float = 1.0
    passes: float = 0.0
    beside: bool = False
    inside_hosts: bool = False


def coded(option: Option, itemsize: int) -> float:
    """The bytes of an encoded element, relative to `itemsize`."""
    return codec(option).encoded_bytes(2**20) / 2**20 / itemsize
