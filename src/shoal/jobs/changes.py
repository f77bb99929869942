"""Changes of a job between two attempts of a run. The new value wins and is reported; a change that the trained weights
do not allow is refused.

Learning rate, schedule, optimizer, clipping, precision and batch are compared by the engine (see checkpoint.given).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

from shoal.checkpoint.given import OTHER_ORDER, line
from shoal.errors import UserError
from shoal.jobs.config import Job, tables
from shoal.jobs.names import TOKENIZER
from shoal.models import build

Tables = Mapping[str, Mapping[str, Any]]

OTHER_HELD_OUT = f"{OTHER_ORDER}, and what was held out then may be trained on"

SOFT = ("loss", "noise", "capacity_factor", "drop", "balance_loss", "z_loss", "balance_rate")
"""Settings of a model, beside its dropouts, that may change because the weights do not depend on them."""

FIXED = {
    "train.seed": "it decides which documents are held out and in which order samples come",
    "data.validation": "documents that were held out would be trained on, or the other way round",
}


def remembered(job: Job, tokenizer: str | None, content: str, classes: Sequence[str]) -> dict[str, Any]:
    """Returns the part of a job that checkpoints record, as JSON values. `tokenizer`: the tokenizer's fingerprint;
    `content`, `classes`: of the data, as Settled has them."""
    kept = {section: table for section, table in tables(job).items() if section in ("model", "data")}
    kept["train"] = {"seed": job.train.seed, "sync_bn": job.train.sync_bn}
    return json.loads(json.dumps({**kept, "tokenizer": tokenizer, "content": content, "classes": list(classes)}))


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a line for each value that differs between two `remembered` jobs. Raises UserError for a fixed one."""
    before, after = _in_whole(then, now) if then["model"] != now["model"] else (_flat(then), _flat(now))
    lines = []
    for key in {**before, **after}:
        was, is_now = before.get(key), after.get(key)
        if was == is_now or key in ("tokenizer", "data.tokenizer", "content", "classes"):
            continue
        if key in FIXED:
            raise _fixed(key, is_now, was, FIXED[key])
        if key.startswith("model.") and not _is_soft(key):
            raise _fixed(key, is_now, was, "its weights are those of the model that it was")
        lines.append(line(key, _shown(is_now), _shown(was)))
    if then.get("tokenizer") != now.get("tokenizer"):
        was = before.get("data.tokenizer")
        remedy = _shown(was) if was == "bytes" else f"the directory {TOKENIZER!r} of the run that made the checkpoint"
        raise UserError(
            f"data.tokenizer = {_shown(after.get('data.tokenizer'))} gives other ids than the tokenizer that the "
            f"checkpoint was trained with ({_shown(was)}), "
            f"and that cannot change. Give {remedy}, or another run.dir to start anew"
        )
    if "content" in then and then["content"] != now["content"] and _of_the_data(then) == _of_the_data(now):
        source = _shown(now["data"].get("source"))
        lines.append(f"data.source = {source} has changed since the checkpoint{OTHER_HELD_OUT}")
    if then.get("classes", now["classes"]) != now["classes"]:
        lines.append(line("the order of classes", ", ".join(now["classes"]), ", ".join(then["classes"])))
    return lines


def _of_the_data(about: Tables) -> list[Any]:
    """Returns what says which data a job has."""
    return [about["data"].get(key) for key in ("source", "field", "size")]


def _in_whole(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns two jobs, flat, with all settings of their models, since one may give what is the other's default; with
    none where the models are the same, however they are given."""
    before, after = _flat(then), _flat(now)
    try:
        whole, is_now = (_flat({"model": _with_defaults(each["model"])}) for each in (then, now))
    except UserError:  # a file of the earlier model is gone
        return before, after
    if whole != is_now:
        return before | whole, after | is_now
    model = {key for key in (*before, *after) if key.startswith("model.")}
    return _without(before, model), _without(after, model)


def _with_defaults(model: Mapping[str, Any]) -> dict[str, Any]:
    return _without(model, {"preset", "config"}) | build(model).values


def _without(table: Mapping[str, Any], keys: Set[str]) -> dict[str, Any]:
    return {key: table[key] for key in table if key not in keys}


def _is_soft(key: str) -> bool:
    name = key.rpartition(".")[2]
    return name in SOFT or name.endswith("dropout")


def _fixed(key: str, now: Any, then: Any, why: str) -> UserError:
    return UserError(
        f"{key} = {_shown(now)}, but the checkpoint was trained with {_shown(then)}, and that cannot change: {why}. "
        f'Give {_shown(then)}, or another run.dir to start anew (with run.resume = "auto" or "never")'
    )


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found.update(_flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value})
    return found


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)
