"""Whole worlds whose ranks are threads of one process: an engine trains in each of them with the bits of real ranks.

    losses = simulate_world(4, train)           # def train(world): engine = Engine(..., world=world) ...

The threads share torch's random generator: dropout="fused" draws differently in every run, keyed dropout (the default)
does not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shoal.comm.collectives import Group
from shoal.comm.emulate import Room, Simulated, in_threads
from shoal.comm.lane import EXCHANGE, Lane, Ticket
from shoal.comm.ledger import Ledger
from shoal.comm.transport import Transport, for_every_device
from shoal.comm.world import Seat, World
from shoal.device import CPU, Event, current_stream, new_stream, on_stream, own_device, record_event

Result = TypeVar("Result")
Wrap = Callable[[Transport], Transport]


def simulate_world(
    size: int,
    fn: Callable[..., Result],
    *args: Any,
    timeout: float = 60.0,
    wrap: Wrap | None = None,
    device: torch.device | str = "cpu",
) -> list[Result]:
    """Calls `fn(world, *args)` in `size` threads; returns their results in rank order.

    - `timeout`: seconds that a rank waits for another one
    - `wrap`: puts something around each group's transport, such as `Throttled`
    - `device`: device of all ranks, the CPU or one GPU that they share

    Raises the exception of the first rank that failed.
    """
    rooms, shared = _Rooms(timeout), own_device(device, 0, 1)

    def run(rank: int) -> Result:
        # Else all backwards of a GPU would run in one thread of torch's, in which ranks would wait for each other.
        with torch.autograd.set_multithreading_enabled(False):
            return fn(_SimulatedWorld(rooms, rank, size, wrap, shared), *args)

    return in_threads(size, run, rooms.leave)


class _Rooms:
    """The room of each group, made by the first of its ranks that asks for it; and the `store` of all ranks."""

    def __init__(self, timeout: float) -> None:
        self.store = dist.HashStore()
        self._timeout, self._lock = timeout, threading.Lock()
        self._rooms: dict[tuple[str, tuple[int, ...]], Room] = {}
        self._gone: dict[int, BaseException | None] = {}

    def room(self, name: str, ranks: tuple[int, ...]) -> Room:
        with self._lock:
            if (name, ranks) not in self._rooms:
                room = self._rooms[name, ranks] = Room(len(ranks), self._timeout)
                for rank, error in self._gone.items():
                    if rank in ranks:
                        room.leave(ranks.index(rank), error)
            return self._rooms[name, ranks]

    def lost(self) -> str:
        """Says which rank will not come any more, "" for none."""
        with self._lock:
            return next((f"rank {rank} has ended{_why(error)}" for rank, error in self._gone.items()), "")

    def leave(self, rank: int, error: BaseException | None) -> None:
        with self._lock:
            self._gone[rank] = error
            for (_, ranks), room in self._rooms.items():
                if rank in ranks:
                    room.leave(ranks.index(rank), error)


def _why(error: BaseException | None) -> str:
    return "" if error is None else f": {type(error).__name__}: {error}"


class _ThreadLane(Lane):
    """A lane that is a thread on any device, since ranks wait for each other on the host: in a receive that is posted
    early, say. On an accelerator the thread works on a stream of its own."""

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        super().__init__(CPU, ledger)
        self._beside, self._own = device, new_stream(device)

    def another(self) -> Lane:
        return _ThreadLane(self._beside, self.ledger)

    def submit(self, work: Callable[[], None], name: str = "") -> Ticket:
        return super().submit(partial(self._behind, record_event(self._beside), work), name)

    def wait(self, ticket: Ticket | None = None, cause: str = EXCHANGE) -> None:
        super().wait(ticket, cause)
        self._order()

    def drain(self) -> None:
        super().drain()
        self._order()

    def close(self) -> None:
        super().close()
        self._order()

    def _behind(self, event: Event | None, work: Callable[[], None]) -> None:
        with on_stream(self._own):
            if self._own is not None:
                self._own.wait_event(event)
            work()

    def _order(self) -> None:
        """Makes the caller's stream wait for what the thread has launched."""
        caller = current_stream(self._beside)
        if caller is not None:
            caller.wait_stream(self._own)


class _SimulatedWorld(World):
    def __init__(self, rooms: _Rooms, rank: int, size: int, wrap: Wrap | None, device: torch.device) -> None:
        super().__init__(rank, size, seat=Seat(rank, size), store=rooms.store, device=device)
        self._rooms, self._wrap = rooms, wrap

    @property
    def hosts(self) -> list[str]:
        """All ranks are here."""
        return [self.host_id] * self.size

    def lost(self) -> str:
        return self._rooms.lost() or super().lost()

    def lane(self) -> Lane:
        return _ThreadLane(self.device, self.ledger)

    def group(self, name: str, ranks: list[int]) -> Group:
        key = (name, tuple(ranks))
        if key not in self._groups:
            transport: Transport = Simulated(self._rooms.room(*key), ranks.index(self.rank))
            transport = self._wrap(transport) if self._wrap else transport
            self._groups[key] = Group(name, ranks, self.ledger, for_every_device(transport))
        return self._groups[key]
