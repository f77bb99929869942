"""Common parts of the doors: the fate of a configuration's keys, and its translation to Shoal's settings."""

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
    """A key of a configuration, and its fate.

    fate: HONOURED, NO_EFFECT or REFUSED.
    why: the reason; for an honoured key its meaning.
    off: values with which a refused key is accepted, beside None, False, 0, an empty table, or a table with
        enabled = false.
    """

    fate: str
    why: str
    off: tuple[Any, ...] = ()

    def is_off(self, value: Any) -> bool:
        if isinstance(value, Mapping):
            return not value or not value.get("enabled", True)
        return not value or value in self.off


@dataclass(frozen=True)
class Settings:
    """A configuration translated to Shoal's terms.

    optimizer, plan, engine: arguments of the Plan and the Engine.
    microbatches: number in a step of a rank.
    schedule: makes the learning-rate schedule, which is stepped after each update.
    """

    optimizer: OptimizerFactory
    plan: Mapping[str, Any]
    microbatches: int = 1
    schedule: Callable[[Optimizer], Schedule] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)


def number(table: Mapping[str, Any], key: str, default: float) -> float:
    """Returns the number under the last part of the dotted `key`. Raises UserError for another type."""
    value = table.get(key.rpartition(".")[2], default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < LARGEST:
        raise UserError(f"{key} = {value!r:.100}: give a number")
    return value


def flag(table: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Returns the boolean under the last part of the dotted `key`. Raises UserError for another type."""
    value = table.get(key.rpartition(".")[2], default)
    if not isinstance(value, bool):
        raise UserError(f"{key} = {value!r:.100}: give true or false")
    return value


def inner(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the table under the last part of the dotted `key`, empty where missing. Raises UserError for others."""
    value = table.get(key.rpartition(".")[2], {})
    if not isinstance(value, Mapping):
        raise UserError(f"{key} = {value!r:.100}: this key is a table")
    return value


def check_keys(
    config: Mapping[str, Any], keys: Mapping[str, Key], where: str, also: Mapping[str, Key] | None = None
) -> None:
    """Raises UserError for an unknown or a refused key of `config`.

    keys: the known keys, by dotted name.
    where: name of the configuration, for errors.
    also: more keys to suggest for an unknown one.
    """
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
