"""What an algorithm sends in a step, for predictions of a plan's time and traffic."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.comm.codecs import codec
from shoal.plan import Option

CODED = 8.0
"""Times that a sum through a codec reads or writes the gradients: measured, all codecs but topk."""
TWICE = 2.0
"""What is handed to one collective there and to another one back, beside one sum that sends as many bytes."""


@dataclass(frozen=True)
class Sends:
    """What a rank sends in a step, in the long run.

    - `share`: of the bytes of an exact sum of the gradients over the same ranks
    - `passes`: how many times the bytes of the gradients are read or written for it, beside computing
    - `beside`: it goes on while the next steps compute
    - `inside_hosts`: ranks of a host sum exactly before: the share is of what goes between hosts
    - `handed`: bytes of tensors that are handed to collectives, relative to those of an exact sum that sends as many
    - `in_parts`: where masters are cut (ZeRO), a rank gets its part of a sum alone, at half of the bytes; an algorithm
      that makes the whole sum does so there too
    """

    share: float = 1.0
    passes: float = 0.0
    beside: bool = False
    inside_hosts: bool = False
    handed: float = 1.0
    in_parts: bool = False

    def payload(self, on_host: int) -> float:
        """What is handed to collectives, relative to the bytes of the gradients, with `on_host` ranks on a host."""
        handed = self.share * self.handed
        return TWICE + handed / on_host if self.inside_hosts else handed


def to_peers(ranks: int) -> float:
    """What is handed to peers, who are sent just that, beside a sum of `ranks` that sends as many bytes."""
    return 2 * (ranks - 1) / ranks


def coded(option: Option, itemsize: int) -> float:
    """The bytes of an encoded element, relative to `itemsize`."""
    return codec(option).encoded_bytes(2**20) / 2**20 / itemsize
