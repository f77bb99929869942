"""Reads a Job from a TOML file and `key=value` assignments, which win over the file. An unknown key is an error."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from shoal.errors import UserError, check_choice, did_you_mean, fits
from shoal.federated.settings import Federated
from shoal.jobs.config import SECTIONS, Auto, Job, Origins
from shoal.plan import AUTO, NONE, Plan
from shoal.toml import read_toml

_hints = cache(get_type_hints)  # asked for in each generation of an elastic run, while its ranks wait
ASKS = "name", "measure", "allow"
"""Keys of [plan] that are no fields of a Plan: they ask the planner."""
RESOLVED = "# Every value of this run, and where it came from."
"""The first line of a run's resolved.toml."""
_SPOKEN = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "a table",
}
_MANY = {int: "whole numbers", float: "numbers", str: "texts"}
_TOML = {**_SPOKEN, int: "the whole number", float: "the number", str: "the text", list: "the list", dict: "the table"}


def load_job(path: str | Path, assignments: Sequence[str] = ()) -> tuple[Job, Origins]:
    """Returns the job of the TOML file `path`, and the origins of its values.

    assignments: "train.lr=1e-3" and the like, which replace values of the file; later ones win.

    `run.dir` is by default `runs/` and the file's name. Raises UserError with the key, the value and what is expected.
    """
    path = Path(path)
    content, named = read_toml(path, "job file"), f"runs/{path.stem}"
    chosen = bool(assignments) and _rows_were_chosen(path)  # who assigns nothing asks nobody anew
    return parse_job(content, assignments, where=str(path), default_dir=named, chosen=chosen)


def parse_job(
    content: Mapping[str, Any],
    assignments: Sequence[str] = (),
    *,
    where: str = "the job",
    default_dir: str = "runs/run",
    chosen: bool = False,
) -> tuple[Job, Origins]:
    """Returns the job of the tables `content` and the origins of its values, as `load_job` does.

    where: the name of the file in errors.
    default_dir: `run.dir` where it is not given.
    chosen: whether the microbatch is the planner's, which chooses again where it is asked.
    """
    tables: dict[str, dict[str, Any]] = {"model": {}, **{section: {} for section in SECTIONS}}
    origins: dict[str, str] = {}
    wheres: dict[str, str] = {}
    for section, table in content.items():
        _known(section, where, tables)
        if section == "plan" and table == AUTO:
            table = {"name": AUTO}
        if not isinstance(table, dict):
            more = ', or plan = "auto"' if section == "plan" else ""
            raise UserError(f"{section} = {table!r:.100} in {where}: expected a table, [{section}]{more}")
        for key, value in table.items():
            _check(section, key, value, where)
            tables[section][key] = value
            origins[f"{section}.{key}"] = "file"
    for assignment in assignments:
        section, path, value = _assignment(assignment)
        _known(section, f"--set {assignment}", tables)
        if not path:
            _leave_to_the_planner(tables["plan"], origins)
            if chosen and origins.get("train.microbatch") == "file":
                del tables["train"]["microbatch"], origins["train.microbatch"]
            path = ["name"]
        key = path[0]
        value = _or_nothing(section, key, _nested(tables[section].get(key), path[1:], value, f"--set {assignment}"))
        _check(section, key, value, f"--set {assignment}")
        tables[section][key] = value
        origins[f"{section}.{key}"] = "cli"
        wheres[f"{section}.{key}"] = f"--set {assignment}"
    if "name" not in tables["model"]:
        raise UserError(
            f'{where} does not say which model to train: give [model] with e.g. name = "gpt" and preset = "1m"'
        )
    if not isinstance(name := tables["model"]["name"], str):
        raise UserError(f'model.name = {name!r:.100}: expected a text, e.g. name = "gpt"')
    tables["run"].setdefault("dir", default_dir)
    auto = _auto(tables["plan"], {key: wheres.get(f"plan.{key}", where) for key in ASKS})
    if auto.measure and tables["run"].get("at"):
        raise UserError(f"plan.measure and run.at in {where}: plans are tried, or given by step; remove one of them")
    if tables["federated"] and not {"steps", "epochs", "seconds"} & tables["train"].keys():
        key, value = _as_long(Federated(**tables["federated"]))
        tables["train"][key] = value
        origins[f"train.{key}"] = "planner"
    parts = {section: kind(**tables[section]) for section, kind in SECTIONS.items() if section != "federated"}
    if tables["federated"] or "federated" in content:
        parts["federated"] = Federated(**tables["federated"])
    return Job(model=tables["model"], **parts, auto=auto), origins


def _auto(plan: dict[str, Any], where: Mapping[str, str]) -> Auto:
    """Takes `name`, `measure` and `allow` out of [plan], which are no fields of a Plan. `where`: who gives each."""
    name, measure, allow = plan.pop("name", None), plan.pop("measure", 0), plan.pop("allow", [])
    if name is not None and name != AUTO:
        raise UserError(
            f'plan.name = {name!r} in {where["name"]}: a plan has no name; plan = "auto" has the planner find it'
        )
    if type(measure) is not int or measure < 0:
        raise UserError(f"plan.measure = {measure!r} in {where['measure']}: give the number of plans to try, e.g. 3")
    if measure and name != AUTO:
        raise UserError(
            f'plan.measure = {measure} in {where["measure"]} tries plans of the planner: give plan.name = "auto" '
            "beside it"
        )
    if allow and name != AUTO:
        raise UserError(
            f'plan.allow = {allow!r} in {where["allow"]} is for the planner: give plan.name = "auto" beside it, or '
            "plan.exchange"
        )
    return Auto(name == AUTO, measure, allowed(allow, f"plan.allow in {where['allow']}"), not plan and name is None)


def allowed(names: Any, what: str) -> tuple[str, ...]:
    """Names of exchanges that a plan may have. Raises UserError for what is none."""
    if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
        raise UserError(f'{what}: give names of exchanges, e.g. ["bf16", "bytegrad"]')
    if names:
        from shoal.exchange.named import ALGORITHMS  # imports torch

        for name in names:
            check_choice(f'{what}: "{name}" is no exchange: give one of', name, ALGORITHMS)
    return tuple(dict.fromkeys(names))


def _as_long(federated: Federated) -> tuple[str, Any]:
    """Returns the limit of a training in one place that is as long as that of each client: `shoal train` of the same
    job shows what federating costs."""
    if federated.local_steps is not None:
        return "steps", federated.rounds * federated.local_steps
    return "epochs", max(1, round(federated.rounds * (federated.local_epochs or 1.0)))


def plan_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a plan that assignments like "plan.zero=3" give. Raises UserError for other ones."""
    fields: dict[str, Any] = {}
    for assignment in assignments:
        section, path, value = _assignment(assignment)
        if section != "plan":
            raise UserError(f"--set {assignment}: while a run trains only its plan can change, e.g. --set plan.zero=3")
        if not path or path[0] in ASKS:
            raise UserError(
                f"--set {assignment}: the planner is not asked while a run trains; give fields of a plan, or end the "
                "run and start it again with --set plan=auto, which goes on from its last checkpoint"
            )
        value = _nested(fields.get(path[0]), path[1:], value, f"--set {assignment}")
        _check(section, path[0], value, f"--set {assignment}")
        fields[path[0]] = value
    return fields


def plan_pins(pins: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a plan that pins like "tp=8", or "memory=none" for no budget, give, whose values
    `check_pins` checks. Raises UserError for other fields, and values of another type."""
    found: dict[str, Any] = {}
    known = [each.name for each in fields(Plan)]
    for pin in pins:
        name, equals, written = pin.partition("=")
        key, *path = name.strip().split(".")
        if not equals or not all((key, *path, written.strip())):
            raise UserError(f"--pin {pin}: write it as key=value, such as --pin tp=8")
        if key not in known:
            hint = f" Write --pin {pin.strip().removeprefix('plan.')}." if key == "plan" else did_you_mean(key, known)
            if key == "microbatch":
                hint = f" Write --set train.{pin.strip()}."
            raise UserError(f'--pin {pin}: a plan has no key "{key}".{hint} Keys: {", ".join(known)}')
        value = _value(written)
        value = None if (name.strip(), value) == ("memory", "none") else value  # all stays on the device
        before, given = _given(found, (key, *path))
        if before and given != value:
            raise UserError(f"--pin {pin}: another --pin gives {before}: leave out one of them")
        value = _nested(found.get(key), path, value, f"--pin {pin}")
        _check("plan", key, value, f"--pin {pin}")
        found[key] = value
    return found


def _given(fields: Mapping[str, Any], path: Sequence[str]) -> tuple[str, Any]:
    """What `fields` give at `path`, or above it where that is no table, with how it is written; "" for nothing."""
    value: Any = fields
    name = ""
    for key in path:
        if not isinstance(value, Mapping):
            break
        if key not in value:
            return "", None
        value, name = value[key], f"{name}.{key}".removeprefix(".")
    return f"{name} = {'none' if value is None else repr(value):.100}", value


def _leave_to_the_planner(plan: dict[str, Any], origins: dict[str, str]) -> None:
    """Takes out the fields that the file gives: of a resolved.toml they are what was chosen, and all defaults."""
    for key in [each for each in plan if origins[f"plan.{each}"] == "file" and each not in ASKS]:
        del plan[key], origins[f"plan.{key}"]


def _rows_were_chosen(path: Path) -> bool:
    """Whether a job file is the resolved.toml of a run whose microbatch the planner chose."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return lines[:1] == [RESOLVED] and any(re.fullmatch(r"microbatch = \d+  # planner", line) for line in lines)


def _assignment(text: str) -> tuple[str, list[str], Any]:
    """Parses "train.lr=1e-3" to ("train", ["lr"], 0.001), "plan=auto" to ("plan", [], "auto"). A value that is not TOML
    is a text: train.precision=bf16."""
    name, equals, written = text.partition("=")
    section, *path = name.strip().split(".")
    if section == "plan" and not path and written.strip().strip('"') == AUTO:
        return section, [], AUTO
    if not equals or not path or not all(path):
        asks = ", or plan=auto to have the planner find it" if section == "plan" else ""
        raise UserError(f"--set {text}: write it as table.key=value, e.g. train.lr=1e-3{asks}")
    return section, path, _value(written)


def _value(written: str) -> Any:
    """Reads a value of TOML; what is none is a text."""
    try:
        return tomllib.loads(f"value = {written}")["value"]
    except (ValueError, RecursionError):  # also for a number of thousands of digits
        return written.strip()


def _nested(current: Any, path: Sequence[str], value: Any, where: str) -> Any:
    """Returns `current` with `value` at the keys `path` inside it; `value` itself where `path` is empty."""
    if not path:
        return value
    if not isinstance(current, Mapping | None):
        raise UserError(f"{where}: {path[0]!r} cannot be set inside {current!r}, which is not a table")
    inner = dict(current or {})
    return {**inner, path[0]: _nested(inner.get(path[0]), path[1:], value, where)}


def _or_nothing(section: str, key: str, value: Any) -> Any:
    """Returns the value; None for one that ends a field of the plan, as `shoal replan` takes it."""
    return None if section == "plan" and value == NONE and getattr(Plan(), key, NONE) is None else value


def _known(section: str, where: str, tables: Mapping[str, Any]) -> None:
    if section not in tables:
        raise UserError(
            f'unknown table "{section}" in {where}.{did_you_mean(section, list(tables))} Tables: {", ".join(tables)}'
        )


def _check(section: str, key: str, value: Any, where: str) -> None:
    """Raises UserError for an unknown key or a value of another type. The model itself checks `[model]`."""
    if section == "model" or (section == "plan" and key in ASKS):
        return
    hints = _hints(SECTIONS[section])
    if key not in hints:
        known = [*(each.name for each in fields(SECTIONS[section])), *(ASKS if section == "plan" else ())]
        others = [f"[{other}]" for other, kind in SECTIONS.items() if key in _hints(kind)]
        hint = f" It is a key of {' and '.join(others)}." if others else did_you_mean(key, known)
        raise UserError(f'unknown key "{section}.{key}" in {where}.{hint} Keys: {", ".join(known)}')
    if not fits(value, hints[key]):
        raise UserError(
            f"{section}.{key} in {where}: expected {_spoken(hints[key])}, not {_TOML.get(type(value), 'the value')} "
            f"{value!r}"
        )


def _spoken(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(dict.fromkeys(_spoken(member) for member in get_args(hint) if member is not NoneType))
    if get_origin(hint) is list:
        return "a list of texts" if get_args(hint)[0] is str else "a list of tables, [[...]]"
    if get_origin(hint) is Sequence:
        return f"a list of {_MANY.get(get_args(hint)[0], 'lists of texts')}"
    return _SPOKEN.get(hint, "a table")
