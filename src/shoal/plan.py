"""The Plan: how one model is spread over the ranks. Frozen data with one schema, from Python, TOML or JSON.

A plan does not change the mathematics, except lossy or delayed exchanges and asynchronous schedules, whose
documentation says so. Precision, microbatch, clipping and seeds belong to the job.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any

from shoal.errors import UserError, check_names

MOST_RANKS, MOST_RANKS_OF_A_HOST = 1 << 20, 4096

Option = str | Mapping[str, Any]
"""A name, or a table {name = ..., parameter = ...}."""

AUTO, NONE = "auto", "none"  # NONE ends a field that is None by default

UNITS = {"": 1, "B": 1} | {f"{letter}iB": 2 ** (10 * (power + 1)) for power, letter in enumerate("KMGT")}
UNITS |= {f"{letter}B": 10 ** (3 * (power + 1)) for power, letter in enumerate("KMGT")}


@dataclass(frozen=True)
class Plan:
    """Degrees and strategies; the number of ranks is pp x dp x cp x tp.

    pp, dp, cp, tp: the degrees of pipeline, data, context and tensor parallelism.
    shard: the number of data-parallel ranks that share one copy of the state (default: all `dp`).
    ep: the number of ranks that experts are spread over; divides dp x cp.
    shares: of a batch's samples, for each of the `dp` ranks one number, relative to the others: [3, 1] deals three
        microbatches of four to the first; by default all have as many.
    context: how attention sees whole rows under `cp`, "ulysses" or "ring".
    zero: the ZeRO stage, 0 to 3.
    stages: how `pp` cuts the model: the number of blocks of each stage, or the names of its modules; by default the
        elements of the weight matrices are balanced. In a job also "counted" (operations), "measured" (times), or a
        table with one of these names and the `memory` of a rank.
    placements: how `tp` cuts layers, by patterns of their names, e.g. {"**.mlp.up": "column"} (see parallel.tensor).
    exchange, schedule, recompute, memory: a name, or a table with a name and parameters.
    buddy: a snapshot of the state that only one rank has goes to another rank's memory after so many steps, and the
        reduced gradients of each step between, so that no single failure loses it; "auto", or 0 for never.
    compile: False, True (the default backend) or the name of a backend; applies to the forward of each block.

    Raises UserError for an invalid degree or for an unknown value of `context` or `zero`.
    """

    pp: int = 1
    dp: int = 1
    shard: int | None = None
    cp: int = 1
    tp: int = 1
    ep: int = 1
    shares: Sequence[float] = ()
    context: str = "ulysses"
    zero: int = 0
    placements: Mapping[str, str] | None = None
    exchange: Option = "allreduce"
    schedule: Option = "1f1b"
    stages: Sequence[int] | Sequence[Sequence[str]] | Option | None = None
    recompute: Option = "none"
    memory: Option | None = None
    buddy: int | str = 0
    compile: bool | str = False

    def __post_init__(self) -> None:
        for axis in ("pp", "dp", "cp", "tp", "ep"):
            degree = getattr(self, axis)
            if not isinstance(degree, int) or isinstance(degree, bool) or not 1 <= degree <= MOST_RANKS:
                raise UserError(
                    f"plan.{axis} = {degree!r:.100}: a degree is a whole number of at least 1, at most {MOST_RANKS}"
                )
        if not isinstance(self.compile, (bool, str)):
            raise UserError(f"plan.compile = {self.compile!r}: give true, false or a torch.compile backend's name")
        if self.buddy != AUTO and (type(self.buddy) is not int or self.buddy < 0):
            raise UserError(
                f'plan.buddy = {self.buddy!r:.100}: give the number of steps between two snapshots, "auto", or 0 for '
                "none"
            )
        self._check_shares()
        if self.dp * self.cp > 1:  # else the number of ranks may not be known yet
            self.check_groups()
        option_name(self.exchange, "exchange")
        option_name(self.recompute, "recompute")
        option_name(self.schedule, "schedule")
        if self.stages is not None and self.pp == 1:
            raise UserError("plan.stages with plan.pp = 1: one stage is all of the model. Give plan.pp, or no stages")
        for field, only, what in _ONLY:
            value = getattr(self, field)
            if value not in only:
                known = ", ".join(map(repr, only))
                raise UserError(f"plan.{field} = {value!r} ({what}) is not one of {known}")

    def check_groups(self) -> None:
        """Raises UserError where `ep` or `shard` do not divide the ranks along dp and cp evenly."""
        if self.dp * self.cp % self.ep:
            fits = _divisors(self.dp * self.cp)
            raise UserError(
                f"plan.ep = {self.ep}: experts are spread over dp x cp = {self.dp} x {self.cp} = {self.dp * self.cp} "
                f"ranks, so it is one of {fits}"
            )
        self._check_shard()
        if self.shares and len(self.shares) != self.dp:
            raise UserError(
                f"plan.shares = {list(self.shares)!r:.100} are {len(self.shares)} numbers, and dp = {self.dp} ranks "
                "share a batch's samples: give one for each, or leave shares out"
            )
        each = self.copy_size
        if each % self.ep and self.ep % each:
            raise UserError(
                f"plan.ep = {self.ep} and plan.shard = {self.shard}: {each} ranks share one copy of the state, which "
                "ep has to divide or to be a multiple of"
            )

    def _check_shares(self) -> None:
        """Keeps `shares` as a tuple. Raises UserError for what is no share."""
        given: Any = self.shares
        right = isinstance(given, Sequence) and not isinstance(given, str)
        if not right or not all(type(each) in (int, float) and 0 <= each < math.inf for each in given):
            raise UserError(f"plan.shares = {given!r:.100}: give each of the dp ranks a number from 0 on: [3, 1]")
        if given and not any(given):
            raise UserError(f"plan.shares = {given!r:.100}: one of the ranks has to have samples")
        object.__setattr__(self, "shares", tuple(given))

    def _check_shard(self) -> None:
        if self.shard is None:
            return
        if not isinstance(self.shard, int) or isinstance(self.shard, bool) or self.shard < 1 or self.dp % self.shard:
            fits = _divisors(self.dp)
            raise UserError(
                f"plan.shard = {self.shard!r}: that many of dp = {self.dp} ranks share one copy of the state, so it "
                f"is one of {fits}"
            )
        if not self.zero:
            raise UserError(
                f"plan.shard = {self.shard} with plan.zero = 0: nothing is sharded. Give zero = 1, 2 or 3 (what is "
                "sharded)"
            )

    @property
    def size(self) -> int:
        """The number of ranks of the plan."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def sample_ranks(self) -> int:
        """The number of ranks among which the samples of a batch are dealt."""
        return self.dp

    @property
    def replicas(self) -> int:
        """The number of ranks among which the samples of a batch, and the tokens of its rows, are shared."""
        return self.dp * self.cp

    @property
    def replicas_of_experts(self) -> int:
        """The number of ranks that have the same experts."""
        return self.dp * self.cp // self.ep

    @property
    def copy_size(self) -> int:
        """The number of these among which ZeRO cuts one copy of the state."""
        return (self.shard or self.dp) * self.cp

    @property
    def pipelined(self) -> bool:
        """Whether ranks have stages of the model."""
        return self.pp > 1

    @property
    def stage_size(self) -> int:
        """The number of ranks that have the same stage."""
        return self.size // self.pp

    @property
    def head_sharers(self) -> int:
        """The number of ranks among which the heads of attention are shared, and have to come out even."""
        return self.tp * self.cp

    @property
    def forwards_meet(self) -> bool:
        """Whether ranks meet inside the forward of a layer."""
        return self.tp * self.cp * self.ep > 1

    @property
    def division(self) -> tuple[Any, ...]:
        """The fields that decide which part of the model, and of a microbatch, a rank has: of its memory for one, all
        but recompute, ZeRO and `memory` depends on these."""
        return self.tp, self.placements, self.cp, self.ep, self.context, self.pp, self.schedule, self.stages

    def changed(self, change: Mapping[str, Any], ranks: int) -> Plan:
        """Returns this plan with the fields of `change`, where "none" ends a field that is None by default (`memory`).

        Without dp among them, that is what the other degrees leave of the ranks. Stages that are numbers or names of
        parts are cut anew where `pp` or the schedule changes, and shares are even where their number is not dp. Raises
        UserError for an unknown field.
        """
        self._known(change)
        default = Plan()
        ended = {key: None for key, value in change.items() if value == NONE and getattr(default, key) is None}
        given = {"dp": 1, **change, **ended}
        if given.get("zero") == 0:
            given.setdefault("shard", None)
        cut_anew = any(key in given and given[key] != getattr(self, key) for key in ("pp", "schedule"))
        if given.get("pp") == 1 or (cut_anew and not isinstance(self.stages, str | Mapping)):
            given.setdefault("stages", None)
        if "dp" not in change:
            others = replace(self, **(given | {"ep": 1, "shard": None, "shares": ()}))
            given["dp"] = max(1, ranks // others.size)
        if given["dp"] != len(self.shares):
            given.setdefault("shares", ())
        return replace(self, **given)

    def fitted(self, ranks: int) -> Plan:
        """Returns this plan for so many ranks: dp takes what the other degrees leave, and those stay as they are, or
        become the divisors with the largest product that divides the ranks."""
        degrees = product(_divisors(self.tp), _divisors(self.cp), _divisors(self.pp))
        legal = [each for each in degrees if ranks % math.prod(each) == 0]
        tp, cp, pp = max(legal, key=lambda each: (math.prod(each), each))
        dp = ranks // (tp * cp * pp)
        shards = [None] if self.shard is None else [each for each in _divisors(self.shard)[::-1] if dp % each == 0]
        for shard, ep in product(shards, _divisors(self.ep)[::-1]):
            with suppress(UserError):
                found = self.changed({"dp": dp, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "shard": shard}, ranks)
                found.check_groups()
                return found
        raise UserError(f"no degrees like those of {self} fit {ranks} ranks")

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Plan:
        """Makes a plan from a TOML or JSON table. Raises UserError for an unknown key, naming the closest known one."""
        cls._known(table)
        return cls(**table)

    @classmethod
    def _known(cls, table: Mapping[str, Any]) -> None:
        """Raises UserError for a key that is no field."""
        check_names("plan has no field", table, [field.name for field in fields(cls)], "Fields")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that differ from the defaults, for `from_dict` to read back."""
        default = Plan()
        return {key: value for key, value in asdict(self).items() if value != getattr(default, key)}


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("context", ("ulysses", "ring"), "context parallel"),
    ("zero", (0, 1, 2, 3), "ZeRO sharding"),
)
"""(field, implemented values, what the field is)"""


def option_name(option: Option, field: str) -> str:
    """Returns the name of an option that is a string or a table with a `name`. Raises UserError for anything else."""
    if isinstance(option, str):
        return option
    if isinstance(option, Mapping) and isinstance(option.get("name"), str):
        return option["name"]
    raise UserError(f"plan.{field} = {option!r}: give a name, or a table with a `name` and its parameters")


def check_parameters(field: str, option: Option, made: Callable[..., Any]) -> None:
    """Raises UserError, with the names that there are, for a parameter of `option` that `made` does not take, for one
    that it lacks, and for what is no number where that is wanted."""
    name, given = option_name(option, field), option_parameters(option)
    takes = inspect.signature(made).parameters
    check_names(f'plan.{field}: "{name}" has no parameter', given, takes, f'"{name}" takes')
    for key, each in takes.items():
        if each.default is each.empty and key not in given:
            raise UserError(f'plan.{field}: "{name}" needs the parameter "{key}"')
        value = given.get(key, each.default)
        wrong = isinstance(value, bool) or not isinstance(value, int | float | None)
        if wrong and type(each.default) in (int, float):
            raise UserError(f'plan.{field}: "{name}" wants a number for "{key}", not {value!r}')


def option_parameters(option: Option) -> dict[str, Any]:
    """Returns the parameters of an option without its name; empty for a plain string."""
    return {} if isinstance(option, str) else {key: value for key, value in option.items() if key != "name"}


def nbytes(value: Any, what: str, least: int = 0) -> int:
    """Reads the bytes of "12GiB", "500MB" or a plain number, at least `least`; UserError names `what` otherwise."""
    found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([A-Za-z]*)\s*", str(value))
    if not found or found[2] not in UNITS or not least <= float(found[1]) * UNITS[found[2]] < 2**63:
        said = f'give {"at least 1 byte" if least else "bytes"}, or a text such as "12GiB"'
        raise UserError(f"{what} = {value!r:.100}: {said} ({', '.join(unit for unit in UNITS if unit)})")
    return int(float(found[1]) * UNITS[found[2]])
