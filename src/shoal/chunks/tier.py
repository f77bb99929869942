"""Tiers of memory: how much of each there is, and who holds how much of it.

On a GPU the device's tier is its memory. On a CPU it is a part of the same memory, set by `plan.memory`, in which
weights in use, gradients on loan and activations are counted: so all that moves on a GPU can be seen, and tested,
without one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from shoal.comm.ledger import Ledger
from shoal.device import allocated, asked_for, begin_most_asked_for, free_memory
from shoal.errors import BudgetExceeded, UserError, check_names
from shoal.plan import Option, nbytes

MOVING = "weights in use"
"""Role of what an Executor moves."""
UPDATES = ("auto", "at once", "deferred", "streamed")
ALL_ELSE = "all else"
"""Role, on a GPU, of what its allocator has given out beside what is counted: activations above all."""
AUTO_SHARE = 0.9
"""Share of the device's free memory that "auto" takes."""


@dataclass(frozen=True)
class DiskBudget:
    """A directory, and the bytes that a rank may take there; None: what there is."""

    path: Path
    size: int | None = None


@dataclass(frozen=True)
class Budget:
    """Memory that a rank may use.

    - `device`, `host`: bytes; None for no limit
    - `disk`: for what the host does not hold
    - `update`: when and where weights at home on the host are updated, one of UPDATES
    - `chunk`: bytes of gradient of a chunk, None where Shoal chooses
    - `activations`: the share of them that waits on the host
    """

    device: int | None = None
    host: int | None = None
    disk: DiskBudget | None = None
    update: str = "auto"
    chunk: int | None = None
    activations: float = 0.0

    def may_stream(self, keep: str) -> bool:
        """Whether masters that are kept so, and optimizer state, may pass through the device for their update: not
        where they are pages of the disk, or the masters are kept in parts."""
        return self.disk is None and keep == "whole"


def budget(option: Option | None, device: torch.device) -> Budget | None:
    """Reads a plan's `memory` for `device`; None if the plan says nothing. Raises UserError for what it says wrong."""
    if option is None:
        return None
    if option == "auto":
        return Budget(_free(device))
    if not isinstance(option, Mapping):
        raise UserError(f'plan.memory = {option!r}: give "auto", or a table such as {{device = "12GiB"}}')
    check_names("plan.memory has no key", option, [each.name for each in fields(Budget)])
    on_device, host, update = option.get("device"), option.get("host"), option.get("update", "auto")
    if update not in UPDATES:
        raise UserError(f"plan.memory.update = {update!r}: give one of {', '.join(UPDATES)}")
    if on_device == "auto":
        on_device = _free(device)
    elif on_device is not None:
        on_device = nbytes(on_device, "plan.memory.device")
    return Budget(
        on_device,
        None if host is None else nbytes(host, "plan.memory.host"),
        _disk(option["disk"]) if "disk" in option else None,
        update,
        None if option.get("chunk") is None else nbytes(option["chunk"], "plan.memory.chunk", 1),
        _share(option.get("activations", 0.0)),
    )


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UserError(
            f"plan.memory.activations = {value!r}: give the share of what backward keeps that waits on the host, 0 to 1"
        )
    return float(value)


def _free(device: torch.device) -> int | None:
    free = free_memory(device)
    return None if free is None else int(free * AUTO_SHARE)


def _disk(option: Any) -> DiskBudget:
    table = {"path": option} if isinstance(option, str) else option
    if not isinstance(table, Mapping) or not isinstance(table.get("path"), str) or not table["path"]:
        raise UserError(
            f'plan.memory.disk = {option!r}: give a directory, or a table such as {{path = "/scratch", size = "1TB"}}'
        )
    check_names("plan.memory.disk has no key", table, ["path", "size"])
    path = Path(os.path.expanduser(table["path"]))
    return DiskBudget(path, nbytes(table["size"], "plan.memory.disk.size") if "size" in table else None)


@dataclass
class Tier:
    """A memory of `capacity` bytes (None: no limit), and who holds how much of it.

    - `held[role]`: bytes in use; `most[role]`: the most of them at a time; `most_in_all`: the most of all roles
      together
    - `relieve(bytes)`: asked to free that much before the tier overflows
    - `measures`: while it is set nothing is refused; `most_in_all` then says what would have been enough
    - `ledger`: told of all that changes, while it records
    """

    name: str
    capacity: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    measures: bool = False
    relieve: Callable[[int], None] | None = None
    held: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    most_in_all: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    _others: int = 0

    @property
    def used(self) -> int:
        return sum(self.held.values())

    def others(self) -> int:
        """Bytes in use now, without weights that come and go; on a GPU by the allocator, which knows of all."""
        asked = asked_for(self.device)
        return (self.used if asked is None else asked[0]) - self.held.get(MOVING, 0)

    def most_others(self) -> int:
        """Most bytes of `others` at a time since the last call, where `moved` was called after each move."""
        self._note_others()
        most, self._others = self._others, self.others()
        return most

    def moved(self) -> None:
        """Lets the allocator forget, on a GPU, what weights took that have gone: it was not of `others`."""
        begin_most_asked_for(self.device)

    def _note_others(self) -> None:
        asked = begin_most_asked_for(self.device)  # rounded figures would change with what is in memory beside
        self._others = max(self._others, (self.used if asked is None else asked[1]) - self.held.get(MOVING, 0))

    def take(self, role: str, size: int, what: str = "") -> None:
        """Books `size` bytes; BudgetExceeded, naming `what`, if they do not fit."""
        if self.capacity is not None and self.used + size > self.capacity and self.relieve is not None:
            self._note_others()
            self.relieve(self.used + size - self.capacity)
            self.moved()
        if self.capacity is not None and self.used + size > self.capacity and not self.measures:
            raise BudgetExceeded(self.used + size, self.capacity, f"{self.name} memory for {what or role}")
        if self.ledger.recording:
            self.look()  # before the memory is there, and counted
        self.held[role] = self.held.get(role, 0) + size
        self.most[role] = max(self.most.get(role, 0), self.held[role])
        self.most_in_all = max(self.most_in_all, self.used)
        self._others = max(self._others, self.used - self.held.get(MOVING, 0))
        self.ledger.note(self.name, role, self.held[role])

    def give(self, role: str, size: int) -> None:
        """Gives `size` bytes back."""
        self.held[role] -= size
        if self.ledger.recording:
            self.ledger.note(self.name, role, self.held[role])
            self.look()

    def note(self, at: float) -> None:
        """Notes all that is held now, as of the moment `at`, while the ledger records."""
        for role, size in self.held.items():
            self.ledger.note(self.name, role, size, at)
        self.look(at)

    def look(self, at: float | None = None) -> None:
        """Notes, on a GPU, what else is there now."""
        now = allocated(self.device)
        if now is not None:
            self.ledger.note(self.name, ALL_ELSE, max(0, now - self.used), at)
