"""Low-precision decentralized SGD: a ring exchanges encoded changes (DCD-PSGD, https://arxiv.org/abs/1803.06443).

Each replica keeps w, its own weights as the neighbours know them, and L, R, the neighbours' weights as it knows them;
with x after the local update:

    z = x + L/3 + R/3 - 5/3 w;   w += Q(z), L += Q(z_L), R += Q(z_R);   x = w

so z is the average with weights of a third, plus the local update, minus w. It takes three copies of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.codecs import codec
from shoal.exchange.algorithm import USUAL_CHUNK, Replica, State, TrainsAlone, by_parameter
from shoal.exchange.sends import CODED, Sends, coded, to_peers
from shoal.plan import Option


@dataclass
class LowPrecisionDecentralized(TrainsAlone):
    """Exchanges with both neighbours after every `every`-th local update."""

    codec: Option = "u8"
    every: int = 1
    chunk_bytes: int | None = USUAL_CHUNK

    def sends(self, ranks: int, itemsize: int, side: float) -> Sends:
        handed = to_peers(ranks)
        share = 2 * coded(self.codec, itemsize) / handed  # both neighbours
        return Sends(share / self.every, CODED / self.every, handed=handed)

    def __post_init__(self) -> None:
        self._codec = codec(self.codec)

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        self._left, self._right = ((replica.group.rank + way) % replica.group.size for way in (-1, 1))
        self._own = [chunk.master.clone() for chunk in replica.chunks]
        self._of_left = [own.clone() for own in self._own]
        self._of_right = [own.clone() for own in self._own]

    @torch.no_grad()
    def end(self, step: int) -> None:
        if (step + 1) % self.every or self.replica.group.size == 1:
            return
        for chunk, own, left, right in zip(self.replica.chunks, self._own, self._of_left, self._of_right, strict=True):
            z = chunk.master + (left + right) / 3 - own * (5 / 3)
            data = z.new_empty(self._codec.encoded_bytes(z.numel()), dtype=torch.uint8)
            self._codec.encode(z, data)
            from_left, from_right = self._with_neighbours(data, f"changes {chunk.index}")
            for replica, received in ((own, data), (left, from_left), (right, from_right)):
                self._codec.decode_add(received, replica)
                chunk.clear_padding(replica)
            chunk.master.copy_(own)
            chunk.publish()

    def state(self) -> dict[str, State]:
        return {"own": State(by_parameter(self.replica.chunks, self._own), "mean")}

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Sets w to x, as at the first step."""
        for chunk, own in zip(self.replica.chunks, self._own, strict=True):
            own.copy_(chunk.master)

    def restored(self) -> None:
        """Gets the neighbours' weights, as they are known, from them."""
        for chunk, own, left, right in zip(self.replica.chunks, self._own, self._of_left, self._of_right, strict=True):
            from_left, from_right = self._with_neighbours(own, f"weights {chunk.index}")
            left.copy_(from_left)
            right.copy_(from_right)

    def _with_neighbours(self, data: Tensor, purpose: str) -> tuple[Tensor, Tensor]:
        """Sends `data` both ways round the ring; returns what came from the left and from the right."""
        group = self.replica.group
        from_left, from_right = torch.empty_like(data), torch.empty_like(data)
        if group.size == 1:
            return data, data
        group.exchange(from_left, self._left, data, self._right, purpose=purpose)
        if self._left == self._right:
            return from_left, from_left
        group.exchange(from_right, self._right, data, self._left, purpose=purpose)
        return from_left, from_right
