"""Reads the JSON state of an engine from a checkpoint's manifest, and checks its form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.checkpoint.manifest import read_manifest
from shoal.errors import CheckpointError


def read_extra(path: Path) -> Mapping[str, Any]:
    """Returns the JSON state of the engine that saved the checkpoint at `path`.

    Raises CheckpointError if it has not the form that an engine writes.
    """
    extra = read_manifest(path).extra
    for key, fits in _FORMS.items():
        if key not in extra or not fits(extra[key]):
            what = f"{extra[key]!r:.100}" if key in extra else "missing"
            raise CheckpointError(
                f"{path}: the engine's {key} is {what}: no engine has saved this checkpoint, or its manifest was "
                "changed"
            )
    return extra


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_table_of_tables(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, dict) for each in value.values())


def _are_groups(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("options"), dict)
        and isinstance(members := group.get("members"), list)
        and all(isinstance(name, str) for name in members)
        for group in value
    )


def _is_table_or_none(value: Any) -> bool:
    return value is None or isinstance(value, dict)


_FORMS: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "seed": lambda value: type(value) is int,
    "global_batch": _is_count,
    "per_sample": lambda value: value is None or (isinstance(value, int | float) and not isinstance(value, bool)),
    "scheduler": _is_table_or_none,
    "source": lambda value: True,
    "groups": _are_groups,
    "optim": _is_table_of_tables,
    "user": _is_table_or_none,
}
