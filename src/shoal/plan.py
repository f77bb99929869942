"""The Plan: how one model is spread over the ranks. Frozen data with one schema, from Python, TOML or JSON.

A plan never changes the mathematics, but for lossy or delayed exchanges and asynchronous schedules, which say so. Precision,
microbatch, clipping and seeds belong to the job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from shoal.errors import UserError, did_you_mean

MOST_RANKS, MOST_RANKS_OF_A_HOST = 1 << 20, 4096

Option = str | Mapping[str, Any]
"""A name, or a table {name = ..., parameter = ...}."""


@dataclass(frozen=True)
class Plan:
    """Degrees and strategies; world = pp x dp x cp x tp.

    `dp` counts all data-parallel ranks, `shard` those that share one copy of the state (default `dp`); `ep` divides dp x cp.
    `context`: how attention sees whole rows under `cp`, "ulysses" or "ring". `stages`: of `pp`, how many blocks each stage has, or the names of its parts; by default as even as the elements of
    their matrices make it; in a job "counted" (operations) or "measured" (times), or a table with that name and the `memory` of a rank. `exchange`, `schedule`, `recompute`, `memory` take a name or a table with parameters. `compile` is False, True (the default
    backend) or a backend's name, and applies to the forward of each block.

    Raises UserError for a degree below 1 and, by name, for a field whose strategy does not exist yet.
    """

    pp: int = 1
    dp: int = 1
    shard: int | None = None
    cp: int = 1
    tp: int = 1
    ep: int = 1
    context: str = "ulysses"
    zero: int = 0
    exchange: Option = "allreduce"
    schedule: Option = "1f1b"
    stages: Sequence[int] | Sequence[Sequence[str]] | Option | None = None
    recompute: Option = "none"
    memory: Option | None = None
    compile: bool | str = False

    def __post_init__(self) -> None:
        for axis in ("pp", "dp", "cp", "tp", "ep"):
            degree = getattr(self, axis)
            if not isinstance(degree, int) or isinstance(degree, bool) or not 1 <= degree <= MOST_RANKS:
                raise UserError(f"plan.{axis} = {degree!r:.100}: a degree is a whole number of at least 1, at most {MOST_RANKS}")
        if not isinstance(self.compile, (bool, str)):
            raise UserError(f"plan.compile = {self.compile!r}: give true, false or a torch.compile backend's name")
        if self.dp * self.cp > 1:  # else nobody may have said yet how many ranks there are
            self.check_groups()
        option_name(self.exchange, "exchange")
        option_name(self.recompute, "recompute")
        option_name(self.schedule, "schedule")
        if self.stages is not None and self.pp == 1:
            raise UserError("plan.stages with plan.pp = 1: a model that is not cut has no stages")
        for field, only, what in _ONLY:
            value = getattr(self, field)
            if value not in only:
                raise UserError(
                    f"plan.{field} = {value!r} is not implemented yet ({what}); this version takes {', '.join(map(repr, only))}"
                )

    def check_groups(self) -> None:
        """UserError where `ep` or `shard` do not come out even among the ranks along dp and cp."""
        if self.dp * self.cp % self.ep:
            fits = _divisors(self.dp * self.cp)
            raise UserError(
                f"plan.ep = {self.ep}: experts are spread over dp x cp = {self.dp} x {self.cp} = {self.dp * self.cp} ranks, so it is one of "
                f"{fits}"
            )
        self._check_shard()
        each = (self.shard or self.dp) * self.cp
        if each % self.ep and self.ep % each:
            raise UserError(
                f"plan.ep = {self.ep} and plan.shard = {self.shard}: {each} ranks share one copy of the state, which ep has to divide or to be a multiple of"
            )

    def _check_shard(self) -> None:
        if self.shard is None:
            return
        if not isinstance(self.shard, int) or isinstance(self.shard, bool) or self.shard < 1 or self.dp % self.shard:
            fits = _divisors(self.dp)
            raise UserError(
                f"plan.shard = {self.shard!r}: that many of dp = {self.dp} ranks share one copy of the state, so it is one of {fits}"
            )
        if not self.zero:
            raise UserError(
                f"plan.shard = {self.shard} with plan.zero = 0: nothing is sharded. Give zero = 1, 2 or 3 (what is sharded)"
            )

    @property
    def size(self) -> int:
        """The number of ranks that the plan needs."""
        return self.pp * self.dp * self.cp * self.tp

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Plan:
        """A plan from a TOML or JSON table; an unknown key raises UserError with the closest known one."""
        known = [field.name for field in fields(cls)]
        for key in table:
            if key not in known:
                raise UserError(f'plan has no field "{key}".{did_you_mean(key, known)} Fields: {", ".join(known)}')
        return cls(**table)

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from the defaults: what `from_dict` reads back."""
        default = Plan()
        return {key: value for key, value in asdict(self).items() if value != getattr(default, key)}


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("context", ("ulysses", "ring"), "context parallel"),
    ("zero", (0, 1, 2, 3), "ZeRO sharding"),
)
"""(field, values that exist, what the field is): later strategies leave this table one by one."""


def option_name(option: Option, field: str) -> str:
    """The name of an option given as a string or as a table with a `name`."""
    if isinstance(option, str):
        return option
    if isinstance(option, Mapping) and isinstance(option.get("name"), str):
        return option["name"]
    raise UserError(f"plan.{field} = {option!r}: give a name, or a table with a `name` and its parameters")


def option_parameters(option: Option) -> dict[str, Any]:
    """The parameters of an option without its name; empty for a plain string."""
    return {} if isinstance(option, str) else {key: value for key, value in option.items() if key != "name"}
