"""The settings that a caller gives a run, compared with those that a checkpoint was trained with: what is given now
wins, and each change is reported in a line.

Unchanged settings go on as saved. An optimizer's option that was given alike then and now has the saved value, which
the loop may have changed since (a learning rate lowered by hand), and an unchanged schedule goes on from its saved
state. An optimizer of another kind takes over the state that it knows, or starts without.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.optim.lr import Course
from shoal.optim.optimizer import ChunkOptimizer

Options = Mapping[str, Any]

OTHER_ORDER = ": an epoch's samples will not come exactly once"


class Given:
    """The settings that an engine was given; made together with its optimizer and schedule.

    optimizer: of the engine
    course: its schedule; None: none
    settings: other values that a checkpoint records and whose changes are reported, by name of the engine's parameter
    """

    def __init__(self, optimizer: ChunkOptimizer, course: Course | None, settings: Options) -> None:
        self._optimizer, self._course = optimizer, course
        self.record = as_json({**settings, "schedule": None if course is None else course.about()})
        """For a checkpoint; `state.optimizer_extra` adds the options of each group."""

    def go_on(self, extra: Options, scheduler: Options | None) -> list[str]:
        """Sets the schedule to where it goes on, after optimizer and weights have been read; returns a line for each
        change.

        extra: JSON state of the checkpoint
        scheduler: the saved state of the schedule
        """
        then, now = extra.get("given", {}), self.record
        lines = self._of_the_optimizer(extra)
        changed = [key for key in now if key != "schedule" and key in then and now[key] != then[key]]
        lines += [
            line(key, now[key], then[key]) + (OTHER_ORDER if key in ("seed", "global_batch") else "") for key in changed
        ]
        is_another = "schedule" in then and then["schedule"] != now["schedule"]
        if is_another:
            lines += _of_schedules(then["schedule"] or {}, now["schedule"] or {})
        groups, fresh = self._optimizer.torch.param_groups, self._optimizer.given
        if self._course is None:
            for group, given in zip(groups, fresh, strict=True) if is_another else ():
                group["lr"] = given["lr"]
        elif scheduler is None:
            self._course.begin_at(extra["step"])
        elif is_another or self._starts_elsewhere(extra) or len(scheduler.get("base_lrs", groups)) != len(groups):
            self._course.begin_at(scheduler.get("last_epoch", extra["step"]))
        else:
            self._course.go_on(scheduler)
        return lines

    def _starts_elsewhere(self, extra: Options) -> bool:
        saved = given_by_name(extra)
        pairs = zip(self._optimizer.members, self._optimizer.given, strict=False)
        return any(as_json(now["lr"]) != saved.get(members[0], now).get("lr") for members, now in pairs)

    def _of_the_optimizer(self, extra: Options) -> list[str]:
        lines, kind = [], self._optimizer.kind
        if extra.get("optimizer", kind) != kind:
            lines.append(line("optimizer", kind, extra["optimizer"]))
        saved, changed = given_by_name(extra), dict[tuple[str, str, str], list[str]]()
        for members, options in zip(self._optimizer.members, self._optimizer.given, strict=False):
            then = saved.get(members[0], {})
            for key, now in as_json(options).items():
                if key in then and then[key] != now:
                    changed.setdefault((key, str(now), str(then[key])), []).extend(members)
        everywhere = {key: sum(each[0] == key for each in changed) == 1 for key, _, _ in changed}
        for (key, now_is, was), members in changed.items():
            of = (
                ""
                if everywhere[key]
                else f" of {members[0]}" + (f" and {len(members) - 1} more" if len(members) > 1 else "")
            )
            lines.append(line(key + of, now_is, was))
        return lines


def line(what: str, now: Any, then: Any) -> str:
    """Returns the line that reports a change."""
    return f"{what} = {now} is used from here on; the checkpoint was trained with {then}"


def given_by_name(extra: Options) -> dict[str, Options]:
    """Returns the options that the optimizer was given for each parameter, by name, from a checkpoint's JSON state."""
    found = {}
    for group in extra["groups"]:
        options = group["options"]
        given = group.get("given", {**options, "lr": options.get("initial_lr", options.get("lr"))})
        found.update(dict.fromkeys(group["members"], given))
    return found


def options_to_go_on(current: Options, group: Options, given: Options) -> dict[str, Any]:
    """Returns the options that an optimizer's group takes over from a saved one: those not given differently now.

    current: options of the group
    group: the saved group
    given: options that the caller gave now
    """
    now, then = as_json(given), group.get("given", group["options"])
    kept = {key: value for key, value in group["options"].items() if key in current and then.get(key) == now.get(key)}
    return {key: _like(current[key], value) for key, value in kept.items()}


def _like(now: Any, value: Any) -> Any:
    """Returns the saved `value` of an option as the optimizer has it `now`: a tensor, a tuple, or itself."""
    if isinstance(now, Tensor):
        return torch.as_tensor(value).to(now)
    return tuple(value) if isinstance(value, list) else value


def state_that_fits(
    optimizer: ChunkOptimizer, extra: Options, saved: Mapping[str, tuple[int, ...]]
) -> tuple[set[str], str]:
    """Returns the keys of the saved state that `optimizer` takes over, and a line if it starts without.

    extra: JSON state of the checkpoint
    saved: shapes of all tensors in the checkpoint

    There are no keys if it needs others too. The result is the same on every rank.
    """
    there: dict[str, set[str]] = {}
    for title in saved:
        if title.startswith("optim."):
            name, _, key = title.removeprefix("optim.").rpartition(".")
            there.setdefault(name, set()).add(key)
    for name, values in extra["optim"].items():
        there.setdefault(name, set()).update(values)
    every = set[str]().union(*there.values())
    if not there or (extra.get("optimizer", optimizer.kind) == optimizer.kind and not _changed(optimizer, extra)):
        return every, ""
    needed = {
        dims: optimizer.keys_of(dims)
        for dims in {len(saved[f"model.{name}"]) for name in there if f"model.{name}" in saved}
    }
    if all(needed[len(saved[f"model.{name}"])] <= keys for name, keys in there.items() if f"model.{name}" in saved):
        return set[str]().union(*needed.values()), ""
    return set(), (
        f"the state of the optimizer starts anew: {optimizer.kind} needs {_words(set[str]().union(*needed.values()))}, "
        f"the checkpoint has {_words(every)}"
    )


def _changed(optimizer: ChunkOptimizer, extra: Options) -> bool:
    """True if an option is given differently that may decide which state there is."""
    saved = given_by_name(extra)
    then = [json.dumps({key: each[key] for key in sorted(each) if key not in _NO_STATE}) for each in saved.values()]
    now = [
        json.dumps(as_json({key: each[key] for key in sorted(each) if key not in _NO_STATE}))
        for each in optimizer.given
    ]
    return not set(now) <= set(then)  # a stage of a pipeline may have fewer groups


_NO_STATE = ("lr", "weight_decay")


def _of_schedules(then: Options, now: Options) -> list[str]:
    if then.get("class") != now.get("class") or not now:
        return [line("schedule", _spoken(now), _spoken(then))]
    before, after = _flat(then), _flat(now)
    if before.get("function") != after.get("function"):
        return [line("schedule", _spoken(now), _spoken(then))]
    keys = [
        key
        for key in {**before, **after}
        if before.get(key) != after.get(key) and not isinstance(after.get(key), dict | list)
    ]
    if not keys:  # nested parts of the schedule differ
        return [line("schedule", f"{now['class']} with other parts", "what it was then")]
    return [line(f"schedule: {key}", after.get(key, "nothing"), before.get(key, "nothing")) for key in keys]


def _flat(about: Options) -> dict[str, Any]:
    found = dict[str, Any]()
    for key, value in about.items():
        if key == "lr_lambdas" and len(value) == 1:
            found.update(value[0])
        elif key != "class":
            found[key] = value
    return found


def _spoken(about: Options) -> str:
    if not about:
        return "none"
    values = _flat(about)
    name = values.pop("function", about["class"])
    return f"{name} ({', '.join(f'{key} {value}' for key, value in values.items())})" if values else str(name)


def _words(keys: Collection[str]) -> str:
    return ", ".join(sorted(keys)) or "none"


def as_json(values: Any) -> Any:
    """Returns values as they come back from a checkpoint: a tuple is a list."""
    return json.loads(json.dumps(values, default=lambda value: value.item() if hasattr(value, "item") else str(value)))
