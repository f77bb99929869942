"""What a parameter server may be given beside parameters, optimizer and policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.comm.stalls import Say, to_stderr
from shoal.errors import UserError
from shoal.optim.groups import GroupRule
from shoal.optim.lr import Schedule
from shoal.server.held import Given, named
from shoal.server.shares import Share, balanced
from shoal.server.table import Table


def check_seconds(what: str, value: Any, above_0: bool = False) -> None:
    """Raises UserError for what is no number of seconds. `what`: up to the argument's name."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (above_0 and value == 0):
        raise UserError(f"{what}={value!r:.100}): give seconds {'above 0' if above_0 else 'from 0 on'}")


@dataclass(frozen=True)
class Options:
    """Further options of a server.

    tables: tables by name, pulled and pushed by rows; a parameter of this name is none of the weights.
    share: this server's number, and of how many servers.
    schedule, param_groups: of the weights, as in `shoal.Engine`.
    save_every: updates from one checkpoint to the next.
    durable: wait for the disk before a push is acknowledged, so that it also survives the host.
    grace: seconds for which a lost client is still waited for.
    seconds: within which each piece of a message must move.
    say: gets a line for each client that is refused or lost.
    device: an accelerator that has weights and tables, but for those on the host, and whose tensors go directly to
        those of clients (`connect(..., device=)`); None for the CPU.
    """

    tables: Mapping[str, Table] = field(default_factory=dict)
    share: Share = field(default_factory=Share)
    schedule: Schedule | None = None
    param_groups: GroupRule | None = None
    save_every: int = 1000
    durable: bool = False
    grace: float = 5.0
    seconds: float = 60.0
    say: Say = to_stderr
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        if type(self.save_every) is not int or self.save_every < 1:
            raise UserError(f"Options(save_every={self.save_every!r:.100}): give a number of updates from 1 on")
        check_seconds("Options(grace", self.grace)
        check_seconds("Options(seconds", self.seconds, above_0=True)

    def names_of(self, params: Given) -> list[str]:
        """Returns the names of the parameters that this server has."""
        found = named(params)
        if unknown := [name for name in self.tables if not name]:
            raise UserError(f"a table is called {unknown[0]!r}: give it a name")
        sizes = {name: value.nbytes for name, value in found.items() if name not in self.tables}
        return balanced(sizes, self.share.count)[self.share.index]

    def dense(self, params: Given) -> int:
        """Returns how many parameters are no tables."""
        return sum(name not in self.tables for name in named(params))
