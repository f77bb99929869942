"""The transport of a group of one rank: every operation is at most a copy, so that a Group needs no branch for it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.comm.transport import NoSharedMemory


class Alone(NoSharedMemory):
    """A `transport.Transport` of one rank. Sending to oneself is only possible as an `exchange`."""

    carrier = "nobody else"
    rank = 0
    size = 1

    def all_reduce(self, flat: Tensor, op: str) -> None:
        pass

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: str) -> None:
        out.copy_(flat)

    def all_gather(self, out: Tensor, flat: Tensor) -> None:
        out.copy_(flat)

    def all_to_all(self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        out.copy_(flat)

    def broadcast(self, flat: Tensor, src: int) -> None:
        pass

    def scatter(self, out: Tensor, flat: Tensor | None, src: int) -> None:
        assert flat is not None, "the root brings the tensor to scatter"
        out.copy_(flat)

    def gather(self, out: Tensor | None, flat: Tensor, dst: int) -> None:
        assert out is not None, "the root brings the tensor to gather into"
        out.copy_(flat)

    def send(self, flat: Tensor, dst: int) -> None:
        raise RuntimeError("a group of one rank has nobody to send to")

    def recv(self, flat: Tensor, src: int) -> None:
        raise RuntimeError("a group of one rank has nobody to receive from")

    def exchange(self, out: Tensor, source: int, flat: Tensor, target: int) -> None:
        out.copy_(flat)

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass
