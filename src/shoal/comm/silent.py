"""A transport that carries nothing: for dry runs that count traffic, and for timing without communication."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collectives import Group
from shoal.comm.lane import Lane, Ticket
from shoal.comm.outside import outside_checkpoints
from shoal.comm.reductions import combined, finish
from shoal.comm.sockets import pieces, pieces_of_sum
from shoal.comm.transport import NoSharedMemory, sent_bytes
from shoal.comm.wire import FIRST, packed
from shoal.comm.world import World
from shoal.errors import UserError


class Silent(NoSharedMemory):
    """The `transport.Transport` of `rank` among `size` ranks that do not exist: operations do nothing."""

    carrier = "nothing"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def _nothing(self, *_: Any) -> None:
        pass

    all_reduce = reduce_scatter = all_gather = all_to_all = broadcast = scatter = gather = _nothing
    send = recv = exchange = barrier = close = _nothing


class OfOneHost(Silent):
    """A silent transport whose ranks are all on one host: they share memory."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return torch.zeros(numel, dtype=dtype) if self.size > 1 else None

    allocate_common = allocate


class OfManyHosts(Silent):
    """A silent transport whose ranks are on a host each: a sum takes the memory that it takes through sockets."""

    def all_reduce(self, flat: Tensor, op: str) -> None:
        if self.size > 1:
            for piece in pieces_of_sum(flat, self.size):
                self._sum(piece, op)

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: str) -> None:
        if self.size > 1:
            for piece in pieces(out):
                self._sum(out[piece], op)

    def _sum(self, own: Tensor, op: str) -> None:
        parts = [own, *(torch.empty_like(own) for _ in range(self.size - 1))]
        finish(combined(parts, op), op, self.size)


Key = tuple[str, tuple[int, ...], int]
"""A group's name and ranks, and the number of the call."""


class Heard:
    """The objects that ranks give to each other which run one after the other on threads of this process: each until
    it needs to know what another one has not said yet. `speaker(rank)`: which of them speaks for a rank."""

    def __init__(self, speaker: Callable[[int], int]) -> None:
        self.speaker = speaker
        self._said: dict[tuple[Key, int], Any] = {}
        self._wanted: dict[int, tuple[Key, int] | None] = {}
        self._turn, self._failed = threading.Condition(), list[BaseException]()

    def run(self, work: Callable[[int], None], ranks: Iterable[int]) -> None:
        """Runs `work(rank)` of all `ranks`; raises the first error of any."""
        threads = [threading.Thread(target=partial(self._run, work, rank)) for rank in ranks]
        self._wanted = dict.fromkeys(ranks)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed:
            raise self._failed[0]

    def _run(self, work: Callable[[int], None], rank: int) -> None:
        with self._turn:
            try:
                if not self._failed:
                    work(rank)
            except BaseException as error:  # raised by `run`
                self._failed.append(error)
            del self._wanted[rank]
            self._turn.notify_all()

    def say(self, key: Key, rank: int, value: Any) -> None:
        self._said[key, rank] = value
        if self._wanted:
            self._turn.notify_all()

    def hear(self, key: Key, rank: int, of: int) -> Any:
        """What `of` has said in a call, which `rank` needs."""
        wanted = key, self.speaker(of)
        if self._wanted:
            self._wanted[rank] = wanted
            self._turn.wait_for(lambda: wanted in self._said or self._failed or not self._can_come())
            self._wanted[rank] = None
        if wanted not in self._said:
            raise UserError(f"rank {rank} waits for what rank {of} never says: call {key[2]} of group {key[0]}")
        return self._said[wanted]

    def _can_come(self) -> bool:
        """Whether any rank may go on and say more."""
        return any(wanted is None or wanted in self._said for wanted in self._wanted.values())


class SilentGroup(Group):
    """A group whose other ranks take as long as this one to say something, and give the objects that this one gives;
    or, where they are `heard`, what they have given."""

    heard: Heard | None = None
    calls: Counter[tuple[str, tuple[int, ...]]]

    def all_gather_object(self, value: Any) -> list[Any]:
        told = self._told(value, range(self.size))
        self._book("all_gather", told, self.size, 0)
        return told

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        (told,) = self._told(value, [src])
        self._book("broadcast", [told], 1, src)
        return told

    def _told(self, value: Any, of: Sequence[int]) -> list[Any]:
        """What the ranks at the places `of` give where this one gives `value`."""
        if self.heard is None:
            return [value] * len(of)
        name, own = (self.name, tuple(self.ranks)), self.ranks[self.rank]
        self.calls[name] += 1
        key = (*name, self.calls[name])
        self.heard.say(key, own, value)
        speaks = [self.heard.speaker(self.ranks[place]) for place in of]
        return [value if speaker == own else self.heard.hear(key, own, speaker) for speaker in speaks]

    def _book(self, operation: str, values: Sequence[Any], times: int, src: int) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            rest = max(packed(value).numel() - FIRST for value in values)
        for nbytes in (FIRST, rest) if rest else (FIRST,):
            payload = times * nbytes
            wire = sent_bytes(operation, payload, self.size, self.rank, src)
            self.ledger.count(self.name, operation, "object", payload, wire)


class SilentWorld(World):
    """The world of `rank` among `size` ranks that do not exist. Books what would be sent.

    Its lanes run work at once, in the caller's thread, since fake tensors belong to one thread. `carrier`: what groups
    take of memory for their operations, by default nothing. `heard`: what other ranks say that differ from this one.
    """

    def __init__(self, rank: int, size: int, carrier: type[Silent] = Silent, heard: Heard | None = None) -> None:
        super().__init__(device="cpu")
        self.rank, self.size, self._carrier = rank, size, carrier
        self._heard, self._calls = heard, Counter[tuple[str, tuple[int, ...]]]()

    def group(self, name: str, ranks: list[int]) -> Group:
        made = SilentGroup(name, ranks, self.ledger, {"cpu": self._carrier(ranks.index(self.rank), len(ranks))})
        made.heard, made.calls = self._heard, self._calls
        return made

    def lane(self) -> Lane:
        return AtOnce(self.device, self.ledger)

    host_lane = lane


class AtOnce(Lane):
    """A lane that runs what it is given at once, in the caller's thread."""

    def another(self) -> Lane:
        return AtOnce(self._device, self.ledger)

    def submit(self, work: Callable[[], None], name: str = "") -> Ticket:
        with outside_checkpoints():
            work()
        ticket = Ticket(self)
        ticket.done = True
        return ticket
