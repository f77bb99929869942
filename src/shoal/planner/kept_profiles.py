"""Profiles that were made before, kept on the disk: a model is traced once as long as neither it nor Shoal changes.

They lie in `profiles` beside `machine.json`, one file each, by a hash of what the trace depends on: the model's
settings, its row of data, the format, the ways to divide it, and the sources of Shoal, torch and transformers. A file
that cannot be read is made anew; the oldest are removed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from shoal.planner.degrees import Ways
from shoal.planner.kept import folder, writer
from shoal.planner.positions import Positions
from shoal.planner.prepare import Subject
from shoal.planner.profile import Cut, Message, PartProfile, Profile
from shoal.planner.temporaries import Lives
from shoal.planner.trace import Statistics
from shoal.replace import replace_text

MOST = 64
"""Profiles that are kept."""


def kept(settings: object, subject: Subject, ways: Ways, make: Callable[[], Profile]) -> Profile:
    """The profile that `make` makes, or made before for the same `settings` of a model, row, format and `ways`, under
    such placements, in their order, as of patterns that match the last one counts."""
    asked = settings, list((subject.plan.placements or {}).items()), sorted(ways.items())
    path = folder() / "profiles" / f"{name_of(asked, subject)}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = _read(json.loads(path.read_text(encoding="utf-8")))
        os.utime(path)  # it is in use
        return found
    made = make()
    with suppress(OSError, RuntimeError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(_written(made)), end=writer())
        _forget_oldest(path.parent)
    return made


def name_of(settings: object, subject: Subject) -> str:
    """A name that a model with other `settings`, another row of data or format, or other sources does not have."""
    row = sorted((key, tuple(each.shape), str(each.dtype)) for key, each in subject.sample.items())
    return hashlib.sha256(repr((settings, row, subject.precision, _sources())).encode()).hexdigest()[:32]


@cache
def _sources() -> tuple[Any, ...]:
    """What traces are made by: the files of Shoal, and the versions of the libraries whose operations are counted."""
    root = Path(__file__).parents[1]
    found = sorted((str(path), path.stat()) for path in root.rglob("*.py"))
    files = [(name, each.st_size, each.st_mtime_ns) for name, each in found]
    others = []
    for name in ("transformers", "peft"):
        with suppress(PackageNotFoundError):
            others.append((name, version(name)))
    return files, torch.__version__, others


def _forget_oldest(profiles: Path) -> None:
    files = sorted(profiles.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in files[:-MOST]:
        path.unlink(missing_ok=True)


def _written(profile: Profile) -> dict[str, Any]:
    """The profile as JSON values: blocks of a deep model are mostly the same part, which is written once."""
    parts = list(dict.fromkeys(map(id, profile.parts)))
    distinct = {id(part): asdict(part) for part in profile.parts}
    return {
        "parts": [distinct[each] for each in parts],
        "order": [parts.index(id(part)) for part in profile.parts],
        "lives": [asdict(each) for each in profile.lives],
        "parameters": profile.parameters,
        "refused": dict(profile.refused),
        "buffers": dict(profile.buffers),
        "statistics": profile.statistics,
        "tied": asdict(profile.tied),
        "tied_trained": asdict(profile.tied_trained),
        "tokens": profile.tokens,
        "positions": profile.positions,
        "num_experts": profile.num_experts,
    }


def _read(written: Mapping[str, Any]) -> Profile:
    parts = [_part(each) for each in written["parts"]]
    order, lives = written["order"], Lives(*(Cut(**each) for each in written["lives"]))
    own = written["parameters"], written["refused"], written["buffers"]
    counted = Statistics(*written["statistics"]), Cut(**written["tied"]), Cut(**written["tied_trained"])
    rows = written["tokens"], tuple(Positions(*each) for each in written["positions"]), written["num_experts"]
    return Profile(tuple(parts[at] for at in order), lives, *own, *counted, *rows)


def _part(written: Mapping[str, Any]) -> PartProfile:
    """A part: its quantities are tables, its messages a list of them."""
    values: dict[str, Any] = {key: Cut(**value) if isinstance(value, dict) else value for key, value in written.items()}
    values["messages"] = tuple(Message(**each) for each in written["messages"])
    return PartProfile(**values)
