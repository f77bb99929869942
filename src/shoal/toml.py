"""TOML: files that users write are read, and values are written as a job file has them, for files that Shoal writes
and for plans in messages."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import UserError


def read_toml(path: Path, what: str, instead: str = "") -> dict[str, Any]:
    """Returns the tables of a TOML file. Raises UserError where it cannot be read.

    what: which file it is, "job file".
    instead: a sentence on what to give, for where there is none.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such {what}: {path} (from {Path.cwd()}){instead and f'. {instead}'}") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"the {what} {path} cannot be read: {why}. Give the path of a text file in TOML") from error
    except (ValueError, RecursionError) as error:  # also for a number of thousands of digits, or deeply nested lists
        raise UserError(f"the {what} {path} is not TOML: {error}") from error


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
    """Returns the fields of a plan that are not defaults in one line; one that is pinned to nothing as `--pin` has
    it: memory = none."""
    fields = (f"{key} = none" if value is None else toml_fields({key: value}) for key, value in plan.items())
    return ", ".join(fields) or "one rank"


def _text(value: str) -> str:
    # A JSON string is a TOML basic string, except for DEL, which TOML requires to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
