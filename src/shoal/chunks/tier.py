"""Tiers of memory: how much of each there is, and who holds how much of it.

On a GPU the device's tier is its memory. On a CPU it is a part of the same memory, set by `plan.memory`, in which weights in use, gradients on loan
and what backward keeps are counted: so all that moves on a GPU can be seen, and tested, without one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.errors import BudgetExceeded, UserError, did_you_mean
from shoal.plan import Option

UNITS = {"": 1, "B": 1} | {f"{letter}iB": 2 ** (10 * (power + 1)) for power, letter in enumerate("KMGT")}
UNITS |= {f"{letter}B": 10 ** (3 * (power + 1)) for power, letter in enumerate("KMGT")}
MOVING = "weights in use"
"""The role of what an Executor moves."""
AUTO_SHARE = 0.9
"""Of the device's free memory, what "auto" takes."""


@dataclass(frozen=True)
class Budget:
    """`device`: bytes of that tier, None for no limit."""

    device: int | None = None


def budget(option: Option | None, device: torch.device) -> Budget | None:
    """What a plan's `memory` allows on `device`; None if the plan says nothing. Raises UserError for what it says wrong."""
    if option is None:
        return None
    if option == "auto":
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        return Budget(int(free * AUTO_SHARE) if free is not None else None)
    if not isinstance(option, Mapping):
        raise UserError(f'plan.memory = {option!r}: give "auto", or a table such as {{device = "12GiB"}}')
    known = ["device"]
    for key in option:
        if key not in known:
            raise UserError(f'plan.memory has no key "{key}".{did_you_mean(key, known)} It has: {", ".join(known)}')
    return Budget(**{key: nbytes(value, f"plan.memory.{key}") for key, value in option.items()})


def nbytes(value: Any, what: str) -> int:
    """The bytes of "12GiB", "500MB" or a plain number; UserError names `what` otherwise."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(value))
    if isinstance(value, bool) or not found or found[2] not in UNITS or found[1].count(".") > 1 or found[1] == ".":
        raise UserError(
            f'{what} = {value!r}: give bytes, or a text such as "12GiB" ({", ".join(unit for unit in UNITS if unit)})'
        )
    return int(float(found[1]) * UNITS[found[2]])


@dataclass
class Tier:
    """`capacity` bytes (None: no limit) of which `held[role]` are in use. `most`: by role, at a time; `most_in_all`: together.

    `relieve(bytes)` is asked to free that much before a tier overflows. `measures`: while it is set nothing is refused; `most_in_all` then says what would
    have done.
    """

    name: str
    capacity: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    measures: bool = False
    relieve: Callable[[int], None] | None = None
    held: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    most_in_all: int = 0
    _others: int = 0

    @property
    def used(self) -> int:
        return sum(self.held.values())

    def others(self) -> int:
        """Bytes in use now but for weights that come and go; on a GPU by the allocator, which knows of all."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device) - self.held.get(MOVING, 0)
        return self.used - self.held.get(MOVING, 0)

    def most_others(self) -> int:
        """The most of `others` since the last call."""
        if self.device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self.device) - self.held.get(MOVING, 0)
            torch.cuda.reset_peak_memory_stats(self.device)
            return most
        most, self._others = max(self._others, self.others()), self.others()
        return most

    def take(self, role: str, size: int, what: str = "") -> None:
        """Books `size` bytes; BudgetExceeded, naming `what`, if they do not fit."""
        if self.capacity is not None and self.used + size > self.capacity and self.relieve is not None:
            self.relieve(self.used + size - self.capacity)
        if self.capacity is not None and self.used + size > self.capacity and not self.measures:
            raise BudgetExceeded(self.used + size, self.capacity, f"{self.name} memory for {what or role}")
        self.held[role] = self.held.get(role, 0) + size
        self.most[role] = max(self.most.get(role, 0), self.held[role])
        self.most_in_all = max(self.most_in_all, self.used)
        self._others = max(self._others, self.used - self.held.get(MOVING, 0))

    def give(self, role: str, size: int) -> None:
        """Gives `size` bytes back."""
        self.held[role] -= size
