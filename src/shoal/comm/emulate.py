"""Simulated ranks (threads of one process) and slow links: algorithms run unchanged, with the same bits.

    results = simulate(4, lambda group: group.all_reduce(torch.ones(3)))

Threads share the process's default random generator: draw from generators of your own where ranks must be repeatable.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from shoal.comm.collectives import Group
from shoal.comm.reductions import COMBINE, finish
from shoal.comm.transport import Compares, NoSharedMemory, Transport, sent_bytes
from shoal.device import finish_all, record_use

Result = TypeVar("Result")


def simulate(size: int, fn: Callable[..., Result], *args: Any, timeout: float = 60.0) -> list[Result]:
    """Calls `fn(group, *args)` in `size` threads that play the ranks; returns their results in rank order.

    `timeout`: seconds that a rank waits for another one in an operation. If ranks raise, the others end with an error
    that names the first of them, and its exception is raised here.
    """
    room = Room(size, timeout)
    return in_threads(size, lambda rank: fn(Group.of(Simulated(room, rank), name="simulated"), *args), room.leave)


def in_threads(
    size: int, fn: Callable[[int], Result], leave: Callable[[int, BaseException | None], None]
) -> list[Result]:
    """Calls `fn(rank)` in `size` threads; returns their results in rank order, or raises the first exception.

    `leave(rank, error)` is called as each thread ends, so that the others learn of it.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = fn(rank)
            leave(rank, None)
        except BaseException as error:  # raised by the caller's thread, below
            errors.append(error)
            leave(rank, error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


class Simulated(NoSharedMemory):
    """The `transport.Transport` of one thread in a `Room`. Reduces in rank order: ((r0 + r1) + r2) + ..."""

    carrier = "threads"

    def __init__(self, room: Room, rank: int) -> None:
        self._room, self.rank, self.size = room, rank, room.size

    def all_reduce(self, flat: Tensor, op: str) -> None:
        cuts = [flat.numel() * rank // self.size for rank in range(self.size + 1)]
        tensors = self._meet(f"all_reduce {op}", flat)
        mine = _reduced([tensor[cuts[self.rank] : cuts[self.rank + 1]] for tensor in tensors], op)
        parts = self._meet("reduced", mine)
        torch.cat(parts, out=flat)
        record_use(*parts)  # another thread, which made one of them, may be done with it first

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: str) -> None:
        mine = _reduced(
            [tensor.view(self.size, -1)[self.rank] for tensor in self._meet(f"reduce_scatter {op}", flat)], op
        )
        self._meet("read", None)  # `out` may be a part of `flat`
        out.copy_(mine)

    def all_gather(self, out: Tensor, flat: Tensor) -> None:
        tensors = self._meet("all_gather", flat)
        gathered = torch.cat(tensors)
        self._meet("read", None)  # `flat` may be a part of `out`
        out.copy_(gathered)

    def all_to_all(self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        rows = self._meet("all_to_all", flat.split(list(in_splits)))
        for part, row in zip(out.split(list(out_splits)), rows, strict=True):
            part.copy_(row[self.rank])
        self._meet("read", None)

    def broadcast(self, flat: Tensor, src: int) -> None:
        tensors = self._meet(f"broadcast from {src}", flat)
        if self.rank != src:
            flat.copy_(tensors[src])
        self._meet("read", None)

    def scatter(self, out: Tensor, flat: Tensor | None, src: int) -> None:
        out.copy_(self._meet(f"scatter from {src}", flat)[src].view(self.size, -1)[self.rank])
        self._meet("read", None)

    def gather(self, out: Tensor | None, flat: Tensor, dst: int) -> None:
        tensors = self._meet(f"gather to {dst}", flat)
        if self.rank == dst:
            assert out is not None, "the root brings the tensor to gather into"
            torch.cat(tensors, out=out)
        self._meet("read", None)

    def send(self, flat: Tensor, dst: int) -> None:
        letter = flat.clone()
        finish_all()
        self._room.post(self.rank, dst, letter)

    def recv(self, flat: Tensor, src: int) -> None:
        letter = self._room.fetch(src, self.rank)
        flat.copy_(letter)
        record_use(letter)

    def exchange(self, out: Tensor, source: int, flat: Tensor, target: int) -> None:
        self.send(flat, target)
        self.recv(out, source)

    def barrier(self) -> None:
        self._meet("barrier", None)

    def close(self) -> None:
        pass

    def _meet(self, what: str, mine: Any) -> list[Any]:
        finish_all()  # before another thread, on a stream of its own, goes on with it
        return self._room.meet(self.rank, what, mine)


class Throttled:
    """A `transport.Transport` that delays `transport` as slow links would.

    - `transport`: carries the operations
    - `bits_per_second`: rate of a rank's link, each way
    - `latency`: seconds for a message
    - `slow`: factor by which the links of some ranks are slower
    - `sleep`: takes the seconds; replaced in tests

    Before each operation a rank sleeps as long as its link would be busy: the bytes of `sent_bytes` (the root of a
    gather: those that it receives), and a latency for each of the messages that follow on each other: 2 (size - 1) in
    an all-reduce, size - 1 in a reduce-scatter or an all-gather, else 1.
    """

    def __init__(
        self,
        transport: Transport,
        bits_per_second: float,
        latency: float = 0.0,
        slow: Mapping[int, float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._transport, self.rank, self.size = transport, transport.rank, transport.size
        factor = (slow or {}).get(self.rank, 1.0)
        self._seconds_per_byte, self._latency, self._sleep = factor * 8 / bits_per_second, factor * latency, sleep

    def all_reduce(self, flat: Tensor, op: str) -> None:
        self._delay("all_reduce", flat, messages=2 * (self.size - 1))
        self._transport.all_reduce(flat, op)

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: str) -> None:
        self._delay("reduce_scatter", flat, messages=self.size - 1)
        self._transport.reduce_scatter(out, flat, op)

    def all_gather(self, out: Tensor, flat: Tensor) -> None:
        self._delay("all_gather", out, messages=self.size - 1)
        self._transport.all_gather(out, flat)

    @property
    def compares(self) -> bool:
        return getattr(self._transport, "compares", False)

    def all_gather_alike(self, out: Tensor, flat: Tensor, number: int) -> None:
        self._delay("all_gather", out, messages=self.size - 1)
        cast("Compares", self._transport).all_gather_alike(out, flat, number)

    def all_to_all(self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        self._pass((flat.numel() - in_splits[self.rank]) * flat.element_size())
        self._transport.all_to_all(out, flat, out_splits, in_splits)

    def broadcast(self, flat: Tensor, src: int) -> None:
        self._delay("broadcast", flat, root=src)
        self._transport.broadcast(flat, src)

    def scatter(self, out: Tensor, flat: Tensor | None, src: int) -> None:
        self._delay("scatter", out, times=self.size, root=src)
        self._transport.scatter(out, flat, src)

    def gather(self, out: Tensor | None, flat: Tensor, dst: int) -> None:
        self._delay("scatter" if self.rank == dst else "gather", flat, times=self.size, root=dst)
        self._transport.gather(out, flat, dst)

    def send(self, flat: Tensor, dst: int) -> None:
        self._pass(flat.numel() * flat.element_size())
        self._transport.send(flat, dst)

    def recv(self, flat: Tensor, src: int) -> None:
        self._transport.recv(flat, src)

    def exchange(self, out: Tensor, source: int, flat: Tensor, target: int) -> None:
        self._pass(flat.numel() * flat.element_size())
        self._transport.exchange(out, source, flat, target)

    def barrier(self) -> None:
        self._pass(0)
        self._transport.barrier()

    @property
    def carrier(self) -> str:
        return self._transport.carrier

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self._transport.allocate(numel, dtype)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self._transport.allocate_common(numel, dtype)

    def close(self) -> None:
        self._transport.close()

    def _delay(self, operation: str, flat: Tensor, *, messages: int = 1, times: int = 1, root: int = 0) -> None:
        payload = times * flat.numel() * flat.element_size()
        self._pass(sent_bytes(operation, payload, self.size, self.rank, root), messages)

    def _pass(self, sent: int, messages: int = 1) -> None:
        self._sleep(sent * self._seconds_per_byte + messages * self._latency)


class Room:
    """Where the threads meet. `meet` and `fetch` raise RuntimeError that names who is late, failed, left or differs."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self._timeout = size, timeout
        self._gone: dict[int, str] = {}
        self._changed = threading.Condition()
        self._brought: dict[int, tuple[str, Any]] = {}
        self._letters: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)

    def meet(self, rank: int, what: str, mine: Any) -> list[Any]:
        """Waits for all ranks; returns what each of them brought, in rank order."""
        with self._changed:
            meeting = self._brought
            meeting[rank] = (what, mine)
            if len(meeting) == self.size:
                self._brought = {}
                self._changed.notify_all()
            else:
                self._wait(what, lambda: set(range(self.size)) - set(meeting))
        others = [f"rank {other} is in {theirs!r}" for other, (theirs, _) in meeting.items() if theirs != what]
        if others:
            raise RuntimeError(
                f"rank {rank} is in {what!r}, but {', '.join(others)}: all ranks must call the same operations"
            )
        return [meeting[other][1] for other in range(self.size)]

    def post(self, src: int, dst: int, letter: Tensor) -> None:
        with self._changed:
            self._letters[src, dst].append(letter)
            self._changed.notify_all()

    def fetch(self, src: int, dst: int) -> Tensor:
        with self._changed:
            letters = self._letters[src, dst]
            self._wait("recv", lambda: set() if letters else {src})
            return letters.popleft()

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Notes that `rank` will not come again, because of `error`, or None if its function has returned."""
        with self._changed:
            self._gone[rank] = "has returned" if error is None else f"has failed: {type(error).__name__}: {error}"
            self._changed.notify_all()

    def _wait(self, what: str, missing: Callable[[], set[int]]) -> None:
        lost = self._changed.wait_for(lambda: not missing() or missing() & set(self._gone), self._timeout)
        if not lost:
            raise RuntimeError(
                f"timed out after {self._timeout:.0f} s in {what!r}, waiting for ranks {sorted(missing())}"
            )
        for rank in missing() & set(self._gone):
            raise RuntimeError(f"{what!r} cannot end: rank {rank} {self._gone[rank]}")


def _reduced(tensors: list[Tensor], op: str) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        COMBINE[op](total, tensor, out=total)
    return finish(total, op, len(tensors))
