"""Removes one wait, event, `record_stream` or pinned allocation of the sources at a time; prints what no test reports.

    python -m tests.device.mutate                       # all of them
    python -m tests.device.mutate comm/lane.py optim    # of these files and folders of src/shoal
    python -m tests.device.mutate comm -- -m matrix tests/device    # by these tests: as for pytest

The list is made from the sources (`places`). The tests of this room that come to a place, as a first run of them shows,
are run without it until one fails; a program that hangs is ended, which its test reports. The functions of a running
program are replaced, so nothing is imported or compiled again.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

from tests.device.places import NO_EVENT, Orders, Place, replace, tree
from tests.device.simulator import run
from tests.device.watch import Key, places, watch

LONGEST = 40.0
"""Seconds after which a program has hung: most take two."""
DEVICES = ("cuda", "sim")
NOWHERE = Place("comm/lane.py", 0, "", -1, "")


class Without:
    """A program that runs with `place` removed."""

    def __init__(self, place: Place, program: Callable[..., Any]) -> None:
        self.place, self.program = place, program

    def __call__(self, *args: Any) -> Any:
        setattr(builtins, NO_EVENT, lambda: torch.Event(torch.accelerator.current_accelerator(), enable_timing=True))
        changed = tree(self.place.path)
        Orders(self.place.path, lambda at, node, removed: removed if at == self.place else node).visit(changed)
        replace({self.place.path: changed})
        return self.program(*args)


class Failures:
    """A plugin of pytest: the first test that failed, and why."""

    def __init__(self) -> None:
        self.first: tuple[str, str] | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.first is None:
            self.first = report.nodeid, _why(report.longreprtext)


def _why(text: str) -> str:
    """What a test has reported: the first kind of defect, or what else it saw."""
    if found := re.search(r"Report\(kind='(\w+)'", text):
        return found[1]
    signs = {"it took longer": "hangs", "not documented": "host waits", "the simulated program failed": "error"}
    return next((what for sign, what in signs.items() if sign in text), "numbers")


def reports(place: Place, tests: Iterable[str]) -> tuple[str, str] | None:
    """The first of the tests that fails without `place`, and why; None if all pass."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        run.around, run.longest = partial(Without, place), LONGEST
        failures = Failures()
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
            pytest.main(["-q", "-x", "-vv", "-p", "no:cacheprovider", *tests], [failures])
        os.write(writer, json.dumps(failures.first).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as answer:
        first = json.load(answer)
    return None if first is None else (first[0], first[1])


def main(arguments: list[str]) -> None:
    """Removes each place in turn; fails if a removal is not reported."""
    mark = arguments.index("--") if "--" in arguments else len(arguments)
    chosen, looking = tuple(arguments[:mark]) or "", watch(arguments[mark + 1 :])
    os.environ.pop("SHOAL_TEST_SESSION", None)  # the nurseries outlive the sessions of tests from here on
    for name in DEVICES:
        run.nursery(name)
    all_of_them = {key: place for key, place in places("order").items() if place.path.startswith(chosen)}
    if first := reports(NOWHERE, sorted(looking.seen)[:20]):
        sys.exit(f"the tests fail without a change: {first}")
    successes: Counter[str] = Counter()
    found: dict[Key, bool] = {}
    for key, place in all_of_them.items():
        through = [test for test, seen in looking.seen.items() if key in seen]
        if not through:
            print(f"not reached  {place}", flush=True)
            continue
        through.sort(key=lambda test: (-successes[test], looking.seconds[test]))
        first = reports(place, through)
        found[key] = first is not None
        if first is None:
            print(f"SURVIVES     {place}, in {len(through)} tests", flush=True)
        else:
            successes[first[0]] += 1
            print(f"{first[1]:12} {place}, by {first[0]}", flush=True)
    _print_table(all_of_them, found)
    sys.exit(not all(found.values()))


def _print_table(all_of_them: Iterable[Key], found: dict[Key, bool]) -> None:
    """A line for each file: reported, removed, and there."""
    there, removed = (Counter(path for _, path, _ in keys) for keys in (all_of_them, found))
    reported = Counter(path for (_, path, _), was in found.items() if was)
    print("| file | reported | removed | there |\n|---|---|---|---|")
    for path, number in there.items():
        print(f"| `{path}` | {reported[path]} | {removed[path]} | {number} |")
    print(f"| all | {reported.total()} | {removed.total()} | {there.total()} |")


if __name__ == "__main__":
    from tests.device import mutate  # by its name: the nurseries import it

    mutate.main(sys.argv[1:])
