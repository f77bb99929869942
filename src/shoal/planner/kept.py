"""What is known of this machine from one run of Shoal to the next: `machine.json` in `~/.cache/shoal`, or below
XDG_CACHE_HOME. Each entry says of what it is in its key, and when it was made in its value."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from shoal.device import hardware_name, is_accelerator
from shoal.locked import locked
from shoal.replace import replace_text

DAY = 86400.0
STALE = 30 * DAY
"""Seconds after which what is kept does not count any more, as nothing does that is a DAY ahead of the clock."""
METHOD = 6
"""Of how rates are measured: what an earlier version has kept does not count."""
PATIENCE = 60.0
"""Seconds for which a process waits for others that measure, which takes them a few."""


def folder() -> Path:
    """Where it is kept."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "shoal"


def read(key: str) -> dict[str, Any] | None:
    """What is kept under `key`; None where nothing is, or it is too old."""
    found = _all().get(key)
    if isinstance(found, dict) and isinstance(found.get("at"), int | float):
        return found if -DAY < time.time() - found["at"] < STALE else None
    return None


def keep(key: str, value: dict[str, Any]) -> None:
    """Keeps `value`, which has the time "at" which it was made, in place of what was kept under `key`. Where no file
    can be written nothing is kept."""
    _change(lambda known: {**known, key: value})


def forget(key: str) -> None:
    """Keeps nothing under `key` any more."""
    _change(lambda known: {name: value for name, value in known.items() if name != key})


@contextmanager
def in_turn(known: Callable[[], Any]) -> Iterator[Any]:
    """Gives what is `known`; where that is None, what is once the processes of this host have ended that measure, or
    None while others wait for this one: at once they would take cores from each other, and measure the same. Nobody
    waits for longer than PATIENCE, nor where no file can be written."""
    with ExitStack() as held:
        if (found := known()) is None:
            with suppress(OSError, RuntimeError):
                place = folder() / f"measures-{os.uname().nodename}"
                place.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(place, PATIENCE))
            found = known()
        yield found


def ago(at: float) -> str:
    """Says how long ago something was, by its Unix time."""
    seconds = max(0.0, time.time() - at)
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 3600:.1f} hours ago" if seconds < 172800 else f"{seconds / 86400:.0f} days ago"


def key_of(what: str, device: torch.device, *others: object) -> str:
    """A key that no other machine, device, version of torch or way to measure has."""
    name = f"{os.uname().nodename} {hardware_name(device) or 'CPU'}"
    return " ".join(map(str, (what, name, *others, torch.__version__, f"method {METHOD}")))


def threads_of(device: torch.device, on_host: int) -> int:
    """Threads of each of so many ranks of this host, at most as many as this process has; all where an accelerator
    computes."""
    own = torch.get_num_threads()
    return own if is_accelerator(device) else min(own, max(1, (os.cpu_count() or 1) // on_host))


def crowding(device: torch.device, on_host: int) -> float:
    """How many threads of the ranks of this host share a core; 1 where each has one of its own, or is not on a core."""
    shared = on_host * threads_of(device, on_host) / (os.cpu_count() or 1)
    return 1.0 if is_accelerator(device) else max(1.0, shared)


def writer() -> str:
    """Tells this process apart from all others that may write here, also from other hosts."""
    return f"{os.uname().nodename}.{os.getpid()}.tmp"


def _change(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Writes what `change` makes of all that is kept, while nobody else does so."""
    with suppress(OSError, RuntimeError):
        folder().mkdir(parents=True, exist_ok=True)
        with locked(folder()):
            if (made := change(known := _all())) == known:
                return
            replace_text(folder() / "machine.json", json.dumps(made, indent=1), end=writer())


def _all() -> dict[str, Any]:
    with suppress(OSError, ValueError, RuntimeError):
        content = json.loads((folder() / "machine.json").read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}
