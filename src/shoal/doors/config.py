"""What the configurations of other frameworks have in common: keys with what becomes of them, and Shoal's terms for what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from shoal.doors.schedules import LARGEST, Schedule
from shoal.errors import UserError, did_you_mean
from shoal.optim.fused.optimizer import OptimizerFactory

HONOURED, NO_EFFECT, REFUSED = "honoured", "no effect", "refused"


@dataclass(frozen=True)
class Key:
    """What becomes of a key, and `why` (of an honoured one: as what). A refused one may stand there with a value that means "off": None, False, 0,
    an empty table, a table with enabled = false, or one of `off`."""

    fate: str
    why: str
    off: tuple[Any, ...] = ()

    def is_off(self, value: Any) -> bool:
        if isinstance(value, Mapping):
            return not value or not value.get("enabled", True)
        return not value or value in self.off


@dataclass(frozen=True)
class Settings:
    """A configuration in Shoal's terms: options of the Engine, `microbatches` a step and rank, and `schedule`, stepped after each update."""

    optimizer: OptimizerFactory
    plan: Mapping[str, Any]
    microbatches: int = 1
    schedule: Callable[[Optimizer], Schedule] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)


def number(table: Mapping[str, Any], key: str, default: float) -> float:
    """The number under `key` (its last part, of a dotted one); UserError for something else."""
    value = table.get(key.rpartition(".")[2], default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < LARGEST:
        raise UserError(f"{key} = {value!r:.100}: give a number")
    return value


def flag(table: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Whether `key` (its last part, of a dotted one) is switched on; UserError for something else than true or false."""
    value = table.get(key.rpartition(".")[2], default)
    if not isinstance(value, bool):
        raise UserError(f"{key} = {value!r:.100}: give true or false")
    return value


def inner(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The table under `key` (its last part, of a dotted one), empty where there is none; UserError for something else."""
    value = table.get(key.rpartition(".")[2], {})
    if not isinstance(value, Mapping):
        raise UserError(f"{key} = {value!r:.100}: this key is a table")
    return value


def check_keys(config: Mapping[str, Any], keys: Mapping[str, Key], where: str, also: Mapping[str, Key] | None = None) -> None:
    """Raises UserError for a key that `keys` (by dotted names) does not have, with the closest of them and of `also`, and for one that is refused."""
    _check_table(config, "", keys, where, [*keys, *(also or {})])


def _check_table(table: Mapping[str, Any], prefix: str, keys: Mapping[str, Key], where: str, known: list[str]) -> None:
    for name, value in table.items():
        full = f"{prefix}{name}"
        below = [key for key in known if key.startswith(f"{full}.")]
        if full not in keys and not below:
            beside = [key.removeprefix(prefix).split(".")[0] for key in known if key.startswith(prefix)]
            raise UserError(f'{where} has no key "{full}".{did_you_mean(str(name), list(dict.fromkeys(beside)))}')
        if below:
            if not isinstance(value, Mapping):
                raise UserError(f"{full} = {value!r:.100}: this key of {where} is a table")
            _check_table(value, f"{full}.", keys, where, known)
        elif keys[full].fate == REFUSED and not keys[full].is_off(value):
            raise UserError(f"{full} = {value!r} is refused: {keys[full].why}")
        elif keys[full].fate == HONOURED and value == "auto":
            raise UserError(f'{full} = "auto": only the Trainer of transformers fills that in; give the value')
