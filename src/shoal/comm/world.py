"""The ranks of a job and the groups among them. A world is passed as an argument and reads no environment."""

from __future__ import annotations

import itertools
import math
import os
import socket
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from shoal.comm.awaiting import AwaitingStore
from shoal.comm.collectives import Group
from shoal.comm.connect import check_devices, connect, this_host
from shoal.comm.lane import Lane
from shoal.comm.ledger import Ledger
from shoal.comm.processes import has_ended, process_table
from shoal.comm.signed import root_of, signed
from shoal.comm.stalls import Say, Stalls, to_stderr
from shoal.comm.unanswered import ask
from shoal.device import CPU, hardware_id, own_device
from shoal.errors import LaunchError, UserError

_TOLD_WITHIN = 0.2
"""Seconds for which a rank that closes its groups waits for the store, whose server may be what has stopped."""


@dataclass(frozen=True)
class Seat:
    """The place of a rank on its host: the `local_rank`-th of `local_size` ranks.

    `host_id`: ranks with the same one share a host; None stands for `connect.this_host`.
    """

    local_rank: int = 0
    local_size: int = 1
    host_id: str | None = None


class World:
    """Ranks that share a store.

    - `rank`, `size`: this rank, and the number of ranks
    - `seat`: this rank's place on its host; None if it is the only one there
    - `store`: None for a single process; its server lives in the launcher (or the cluster), and its values are signed
      (see `signed`)
    - `generation`: counts memberships; a group's keys stand under it, so a later generation never reads those of an
      earlier one
    - `host`, `host_id`: this rank's host, for people, and as it is told from others
    - `device`: default the rank's own GPU, where there is one, else the CPU (see `device.own_device`)
    - `timeout`: how long an operation on CPU tensors waits for a rank that lives. It is long, because that rank may
      have a reason (it compiles, evaluates, verifies a checkpoint), and the death of a rank is noticed otherwise
    - `say`: gets the lines that report a long wait
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        seat: Seat | None = None,
        store: dist.Store | None = None,
        generation: int = 0,
        device: torch.device | str | None = None,
        timeout: timedelta = timedelta(days=1),
        say: Say = to_stderr,
    ) -> None:
        assert size == 1 or store is not None, "ranks need a store to meet"
        seat = seat or Seat()
        local_rank = seat.local_rank
        self.rank, self.size, self.local_rank, self.local_size = rank, size, local_rank, seat.local_size
        self.generation, self.timeout, self._given = generation, timeout, store
        self.host, self.host_id = socket.gethostname(), seat.host_id or this_host()
        self.device = own_device(device, local_rank, size)
        # kept here with what is below it, since a PrefixStore does not keep what is written in Python alive
        self._signed = signed(store) if store is not None else None
        self._root = root_of(self._signed) if self._signed is not None else None
        self.store = dist.PrefixStore(f"generation{generation}", self._signed) if self._signed is not None else None
        self.ledger = Ledger(self.device)
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._told: dict[int, tuple[str, torch.device, str]] = {}
        self._processes: dict[int, int] = {}  # of ranks whose processes can be seen from here
        self._serials: dict[str, int] = {}
        self._taken: dict[str, set[int]] = {}
        self._say, self._stalls = say, Stalls(say)
        self._told_closed = False
        # Groups close when Python ends, at the latest, before its modules go: NCCL's threads would abort the process.
        weakref.finalize(self, _close, self._groups, self._stalls)

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size} on {self.host}, {self.device})"

    @classmethod
    def single(cls, device: torch.device | str | None = None) -> World:
        """Makes a world of this process alone."""
        return cls(device=device)

    def group(self, name: str, ranks: list[int]) -> Group:
        """Returns the group of `ranks`, this rank among them; the first call makes it and comes from all of them."""
        key = (name, tuple(ranks))
        if key not in self._groups:
            # a world that nobody has any more is closed at once, and must not wait for a collection
            store, check = None, partial(World._check_peers, weakref.proxy(self), name, ranks)
            if self.store is not None:
                store = AwaitingStore(dist.PrefixStore(f"{name}/{'-'.join(map(str, ranks))}", self.store), check)
            hosts = self._hosts(ranks, check)
            transports = connect(store, ranks.index(self.rank), hosts, self.device, self.timeout)
            gone = partial(_has_ended, self._processes)
            self._groups[key] = Group(name, ranks, self.ledger, transports, store, self._stalls, gone)
        return self._groups[key]

    def among(self, ranks: Sequence[int]) -> World | None:
        """Makes the world of some of the ranks, in this order, by numbers in this one; None for a rank that is not
        among them. All ranks of this world call it. Raises UserError where a number is none of a rank, or there
        twice."""
        known = set(range(self.size))
        if not isinstance(ranks, Sequence) or not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= known:
            raise UserError(
                f"world.among({ranks!r}): give a list of numbers of ranks from 0 to {self.size - 1}, each once, e.g. "
                f"world.among({[0, 1][: self.size]})"
            )
        hosts = self.everyone.all_gather_object(self.host_id)
        return self._of(ranks, [hosts[rank] for rank in ranks]) if self.rank in ranks else None

    def without(self, failed: Collection[int]) -> World:
        """Makes the world of the ranks that are left when some have failed, in the same order. Those that are left call
        it alike; nobody waits for the others. Raises UserError where it names this rank, or one that there is not."""
        known = set(range(self.size)) - {self.rank}
        if not failed or not set(failed) <= known:
            raise UserError(
                f"world.without({failed!r}) on rank {self.rank} of {self.size}: give the numbers of the ranks that "
                "have failed, and call it on each of the others"
            )
        left = [rank for rank in range(self.size) if rank not in failed]
        return self._of(left, self._hosts(left, partial(World._check_peers, weakref.proxy(self), "without", left)))

    def _of(self, ranks: Sequence[int], hosts: Sequence[str]) -> World:
        """Makes the world of `ranks`, this one among them; `hosts`: of each."""
        here = [rank for rank, host in zip(ranks, hosts, strict=True) if host == self.host_id]
        seat = Seat(here.index(self.rank), len(here), self.host_id)
        store = self._given
        if store is not None:
            store = dist.PrefixStore(f"{self.generation}-{'-'.join(map(str, ranks))}", store)
        return World(
            ranks.index(self.rank),
            len(ranks),
            seat=seat,
            store=store,
            generation=self.generation + 1,
            device=self.device,
            timeout=self.timeout,
            say=self._say,
        )

    def serial(self, name: str) -> int:
        """Counts the calls with this name from 0, so that groups get distinct names. All ranks call it alike."""
        self._serials[name] = self._serials.get(name, -1) + 1
        return self._serials[name]

    def take(self, name: str) -> int:
        """Returns the least number from 0 that nothing with this name has now, so that those that live at the same time
        have groups of their own and later ones use theirs again. All ranks call it, and `give_back`, alike."""
        taken = self._taken.setdefault(name, set())
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        taken.add(number)
        return number

    def give_back(self, name: str, number: int) -> None:
        """Ends the use of a number that `take` gave."""
        self._taken[name].discard(number)

    def lane(self) -> Lane:
        """Makes a new lane beside this rank's computation; the caller closes it."""
        return Lane(self.device, self.ledger)

    def host_lane(self) -> Lane:
        """Makes a new lane for work of the host, on any device a thread; the caller closes it."""
        return Lane(CPU, self.ledger)

    def close(self) -> None:
        """Closes all groups, for a rank that cannot go on: ranks that wait for it raise, also those that wait to make a
        group with it, and so do later calls. Any thread may call it; the others of this rank then wait no longer."""
        _close(self._groups, self._stalls)
        told, self._told_closed = self._told_closed, True
        if self.store is not None and not told:
            ask(partial(_tell_closed, self.store, self.rank), _TOLD_WITHIN)

    def lost(self) -> str:
        """Says which other rank will not come to anything any more, as far as this one knows; "" for none. For waits
        outside of collectives, which notice it themselves."""
        for rank in range(self.size):
            if rank != self.rank and _has_ended(self._processes, rank):
                return f"the process of rank {rank} has ended"
        if self.store is not None and self.store.check(["closed"]):
            return f"rank {self.store.get('closed').decode()} has closed its groups"
        return ""

    @contextmanager
    def refusing(self, what: str) -> Iterator[None]:
        """Context of `what` ranks do together, by the same name on all: what one of them refuses by a UserError the
        others, which lose it there, raise too."""
        try:
            yield
        except UserError as error:
            if self.store is not None:
                ask(partial(self.store.set, f"refused/{what}", str(error)), _TOLD_WITHIN)
            raise
        except LaunchError as error:
            told: list[str] = []
            if self.store is not None:
                ask(partial(_read_if_there, self.store, f"refused/{what}", told), _TOLD_WITHIN)
            if told:
                raise UserError(told[0]) from error
            raise

    def _check_peers(self, name: str, ranks: list[int]) -> None:
        """Raises LaunchError where one of `ranks` will not come to make the group `name`."""
        assert self.store is not None
        for rank in ranks:
            ended = _has_ended(self._processes, rank)
            if ended or self.store.check([f"closed/{rank}"]):
                what = "its process has ended" if ended else f"rank {rank} has closed its groups"
                raise LaunchError(f"rank {self.rank}: group {name} cannot be made with rank {rank}: {what}")

    def _hosts(self, ranks: list[int], check: Callable[[], None]) -> list[str]:
        """Returns the host of each of `ranks`, which all call it; each is looked up once, none for a group of one.
        UserError, on all of them, where their devices do not go together. `check`: see AwaitingStore."""
        if len(ranks) == 1:
            return [self.host_id]
        assert self.store is not None
        own = process_table()
        if not self._told:
            mine = (self.host_id, str(self.device), hardware_id(self.device) or "", own, str(os.getpid()))
            self.store.set(f"host/{self.rank}", "\n".join(mine))
        store = AwaitingStore(self.store, check)
        for rank in set(ranks) - self._told.keys():
            host, device, hardware, table, pid = store.get(f"host/{rank}").decode().split("\n")
            self._told[rank] = host, torch.device(device), hardware
            if table and table == own:
                self._processes[rank] = int(pid)
        check_devices({rank: self._told[rank][1:] for rank in ranks})
        return [self._told[rank][0] for rank in ranks]

    def waiting(self) -> tuple[float, str] | None:
        """Returns since when (time.monotonic) this rank has been in which call of a group; None if it is in none."""
        return self._stalls.longest_open()

    @property
    def hosts(self) -> list[str]:
        """The host of each rank, as hosts are told apart. As `everyone`, the first use comes from all ranks."""
        return [self.host_id] if self.everyone.size == 1 else [self._told[rank][0] for rank in range(self.size)]

    @property
    def on_host(self) -> int:
        """Number of ranks on this rank's host, whichever launchers and nodes have started them; `local_size` counts
        those of its own. The first use comes from all ranks."""
        return self.hosts.count(self.host_id)

    @property
    def per_host(self) -> int:
        """The largest number of neighbours in rank, from each multiple of it on, that always share a host. The first
        use comes from all ranks."""
        return math.gcd(*(len(list(same)) for _, same in itertools.groupby(self.hosts)))

    @property
    def everyone(self) -> Group:
        """The group of all ranks."""
        return self.group("world", list(range(self.size)))


def _read_if_there(store: dist.Store, key: str, into: list[str]) -> None:
    if store.check([key]):
        into.append(store.get(key).decode())


def _tell_closed(store: dist.Store, rank: int) -> None:
    store.set(f"closed/{rank}", "")
    store.set("closed", str(rank))


def _close(groups: dict[tuple[str, tuple[int, ...]], Group], stalls: Stalls) -> None:
    stalls.close()
    for group in list(groups.values()):  # another thread may be making one
        group.close()


def _has_ended(processes: Mapping[int, int], rank: int) -> bool:
    return rank in processes and has_ended(processes[rank])
