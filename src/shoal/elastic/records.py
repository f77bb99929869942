"""Records as JSON with a declared schema: what the journal holds and what messages carry.

A record is a frozen dataclass; its JSON is {"kind": its name, field: value, ...} with exactly its fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from functools import cache
from typing import Any, get_type_hints

from shoal.errors import fits

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,62}")
"""The name of a member."""


class Malformed(ValueError):
    """What was read is no record of the kinds that are allowed there."""


def kinds(records: Iterable[type]) -> dict[str, type]:
    """Returns the classes of records by the name of their kind."""
    return {each.__name__: each for each in records}


def encode(record: Any) -> bytes:
    """Returns the JSON of a record, one line of ASCII without its end."""
    kind: type = type(record)
    table = {"kind": kind.__name__} | {name: getattr(record, name) for name in _names(kind)}
    return _ENCODER.encode(table).encode("ascii")


def decode(data: bytes, known: Mapping[str, type]) -> Any:
    """Returns the record in `data`. Raises Malformed for another kind, another set of fields or a wrong type."""
    try:
        table = _DECODER.decode(data.decode())
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no JSON: {error}") from None
    kind = known.get(str(table.pop("kind", None))) if isinstance(table, dict) else None
    if kind is None:
        raise Malformed(f"no record of {', '.join(known)}")
    hints = _hints(kind)
    if table.keys() != hints.keys():
        raise Malformed(f"{kind.__name__} has the fields {', '.join(hints)}, not {', '.join(map(str, table))[:200]}")
    for field, hint in hints.items():
        value = table[field]
        if type(value) is hint and hint is not int:  # text, mostly
            continue
        if not fits(value, hint) or (isinstance(value, int) and abs(value) >= 2**53):
            raise Malformed(f"{kind.__name__}.{field} = {value!r:.100}")
    try:
        return kind(**table)
    except ValueError as error:
        raise Malformed(f"{kind.__name__}: {error}") from None


def _no_number(text: str) -> float:
    raise Malformed(f"{text} is no number of JSON")


_ENCODER = json.JSONEncoder(allow_nan=False, default=asdict)
_DECODER = json.JSONDecoder(parse_constant=_no_number)
"""Made once: making them took as long as reading a record."""


@cache
def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
