"""Values as a job file has them (TOML), for files that Shoal writes and for plans in messages."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def toml_key(key: str) -> str:
    """Returns a key as TOML writes it."""
    bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if bare else _text(key)


def toml_value(value: Any) -> str:
    """Returns a value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + toml_fields(value) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return _text(str(value))


def toml_fields(values: Mapping[str, Any]) -> str:
    """Returns values in one line: zero = 2, recompute = "full"."""
    return ", ".join(f"{toml_key(key)} = {toml_value(value)}" for key, value in values.items())


def plan_text(plan: Mapping[str, Any]) -> str:
    """Returns the fields of a plan that are not defaults in one line."""
    return toml_fields(plan) or "one rank"


def _text(value: str) -> str:
    # A JSON string is a TOML basic string, except for DEL, which TOML requires to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
