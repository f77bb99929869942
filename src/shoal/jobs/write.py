"""The job as it ran: `resolved.toml`, which starts the same run again, and the table that a person sees."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shoal.jobs.config import Job, Origins, describe, tables


def to_toml(job: Job, origins: Origins) -> str:
    """The job as a TOML file that `load_job` reads back; each line ends with the value's origin."""
    lines = []
    for section, table in tables(job).items():
        lines.append(f"[{section}]")
        for key, value in table.items():
            lines.append(f"{_key(key)} = {_value(value)}  # {origins.get(f'{section}.{key}', 'default')}")
        lines.append("")
    return "\n".join(lines)


def write_resolved(job: Job, origins: Origins, run_dir: Path) -> None:
    """Writes `run_dir`/resolved.toml."""
    head = "# Every value of this run, and where it came from.\n\n"
    (run_dir / "resolved.toml").write_text(head + to_toml(job, origins), encoding="utf-8")


def origin_table(job: Job, origins: Origins) -> RenderableType:
    """Every value with its origin, a block for each table of the job; defaults are dim."""
    blocks: dict[str, Table] = {}
    for dotted, entry in describe(job, origins).items():
        section, key = dotted.split(".", 1)
        if section not in blocks:
            blocks[section] = Table(
                title=f"[{section}]".replace("[", "\\["), title_justify="left", show_header=False, box=None, pad_edge=False
            )
        style = "bright_black" if entry["origin"] == "default" else ""
        value = str(entry["value"])
        blocks[section].add_row(
            Text(key, style),
            Text(value if len(value) <= 32 else value[:31] + "…", style),
            Text(entry["origin"], style or "cyan"),
        )
    return Columns(blocks.values(), padding=(0, 4))


def _key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if bare else _text(key)


def _text(value: str) -> str:
    # a JSON string is a TOML basic string but for DEL, which TOML wants escaped
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return _text(str(value))
