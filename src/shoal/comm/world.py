"""The ranks of a job and the groups among them. Passed as an argument, never global; nothing here reads the environment."""

from __future__ import annotations

import socket
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from shoal.comm.collectives import Group
from shoal.comm.connect import connect, this_host
from shoal.comm.lane import Lane
from shoal.comm.ledger import Ledger
from shoal.comm.signed import signed
from shoal.comm.stalls import Say, Stalls, to_stderr
from shoal.errors import UserError


class World:
    """`size` ranks that share a `store`; this one is `rank`, the `local_rank`-th of `local_size` on `host`.

    `generation` counts memberships: every group's keys stand under it, so a later generation never reads an earlier one's.
    The store's server lives in the launcher (or the cluster), `None` for a single process; its values are signed (see `signed`). `device` defaults to
    `cuda:local_rank` where there is CUDA, else the CPU. Ranks whose `host_id` is equal share a host (default: see `connect.this_host`).
    `timeout`: how long an operation on CPU tensors waits for a rank that lives; long, because it may have a reason (it compiles, evaluates, verifies a
    checkpoint), and a rank that has died is noticed otherwise. `say`: where a line goes that tells of a long wait.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        local_rank: int = 0,
        local_size: int = 1,
        store: dist.Store | None = None,
        generation: int = 0,
        device: torch.device | str | None = None,
        host_id: str | None = None,
        timeout: timedelta = timedelta(days=1),
        say: Say = to_stderr,
    ) -> None:
        assert size == 1 or store is not None, "ranks need a store to meet"
        self.rank, self.size, self.local_rank, self.local_size = rank, size, local_rank, local_size
        self.generation, self.timeout = generation, timeout
        self.host, self._host_id = socket.gethostname(), host_id or this_host()
        self.device = torch.device(device) if device is not None else _default_device(local_rank)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", local_rank if size > 1 else torch.cuda.current_device())
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._signed = signed(store) if store is not None else None  # held here, since a PrefixStore does not keep it alive
        self.store = dist.PrefixStore(f"generation{generation}", self._signed) if self._signed is not None else None
        self.ledger = Ledger()
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._serials: dict[str, int] = {}
        self._stalls = Stalls(say)
        # At the latest when Python ends, before its modules go: NCCL's threads abort the process when they outlive that.
        weakref.finalize(self, _close, self._groups, self._stalls)

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size} on {self.host}, {self.device})"

    @classmethod
    def single(cls, device: torch.device | str | None = None) -> World:
        """A world of this process alone."""
        return cls(device=device)

    def group(self, name: str, ranks: list[int]) -> Group:
        """The group of `ranks`, made at the first call, which all its ranks must make. This rank must be one of them."""
        key = (name, tuple(ranks))
        if key not in self._groups:
            store = dist.PrefixStore(f"{name}/{'-'.join(map(str, ranks))}", self.store) if self.store is not None else None
            transports = connect(store, ranks.index(self.rank), self._hosts(ranks), self.device, self.timeout)
            self._groups[key] = Group(name, ranks, self.ledger, transports, store, self._stalls)
        return self._groups[key]

    def serial(self, name: str) -> int:
        """How often this rank has asked so before: for names of groups that are not those of earlier ones. All ranks ask alike."""
        self._serials[name] = self._serials.get(name, -1) + 1
        return self._serials[name]

    def lane(self) -> Lane:
        """A new lane beside this rank's computation; whoever asks for it closes it."""
        return Lane(self.device, self.ledger)

    def _hosts(self, ranks: list[int]) -> list[str]:
        """The host of each of `ranks`, which all call this; a group of one needs no store for it."""
        if len(ranks) == 1:
            return [self._host_id]
        assert self.store is not None
        self.store.set(f"host/{self.rank}", self._host_id)
        return [self.store.get(f"host/{rank}").decode() for rank in ranks]

    @property
    def everyone(self) -> Group:
        """The group of all ranks."""
        return self.group("world", list(range(self.size)))


def _close(groups: dict[tuple[str, tuple[int, ...]], Group], stalls: Stalls) -> None:
    stalls.close()
    for group in groups.values():
        group.close()


def _default_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"rank {local_rank} of this host has no GPU of its own: there are {torch.cuda.device_count()}. Start at most one rank a GPU, "
            "or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )
    return torch.device("cuda", local_rank)
