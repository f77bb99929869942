"""Which places of the sources each test of this room comes to, on the simulated accelerator; see `places`."""

from __future__ import annotations

import ast
import builtins
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.checkpoint.writer import Writer
from tests.device.places import Branches, Orders, Place, paths, replace, tree
from tests.device.simulator import run

SEEN = "__seen__"
HOSTS = (threading.Event, subprocess.Popen, dist.Store, Writer)
"""What waits for something else than the accelerator."""
FINDERS = {"order": Orders, "branch": Branches}
Key = tuple[str, str, int]
"""A place: which of FINDERS finds it, its file, its number there."""


def places(finder: str) -> dict[Key, Place]:
    """All places of the sources that one of FINDERS finds."""
    found = {}
    for path in paths():
        visitor = FINDERS[finder](path)
        visitor.visit(tree(path))
        found |= {(finder, path, place.number): place for place in visitor.found}
    return found


@cache
def look_on() -> None:
    """Makes the functions of this process tell when they come to a place."""
    marked = {}
    for path in paths():
        changed = tree(path)
        finders = [visitor(path, partial(_marked, name)) for name, visitor in FINDERS.items()]
        for finder in finders:
            finder.visit(changed)
        if any(finder.found for finder in finders):
            marked[path] = changed
    replace(marked)


def _marked(finder: str, place: Place, node: Any, _: ast.AST) -> ast.AST:
    key = [ast.Constant(each) for each in (finder, place.path, place.number)]
    return ast.Call(ast.Name(SEEN, ast.Load()), [*key, node], [])


class Watched:
    """A program that leaves the places it has come to in `folder`, if it has used the accelerator."""

    def __init__(self, folder: str, program: Callable[..., Any]) -> None:
        self.folder, self.program = folder, program

    def __reduce__(self) -> tuple[Any, ...]:
        return _watched, (self.folder, self.program)

    def __call__(self, *args: Any) -> Any:
        found = note()
        try:
            return self.program(*args)
        finally:
            if torch.accelerator.max_memory_allocated():
                Path(self.folder, str(os.getpid())).write_text(json.dumps(sorted(found)))


def note() -> set[Key]:
    """The places that this process comes to from now on."""
    found: set[Key] = set()

    def seen(finder: str, path: str, number: int, value: Any) -> Any:
        if value is not False and not isinstance(getattr(value, "__self__", None), HOSTS):
            found.add((finder, path, number))
        return value

    setattr(builtins, SEEN, seen)
    return found


def _watched(folder: str, program: Callable[..., Any]) -> Watched:
    """As it comes to the nursery, of which each program is a fork."""
    setattr(builtins, SEEN, lambda *args: args[-1])
    look_on()
    return Watched(folder, program)


class Watch:
    """A plugin of pytest: the places that each test comes to, and the seconds that it takes."""

    def __init__(self) -> None:
        self.seen: dict[str, set[Key]] = {}
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began, here = time.monotonic(), note()
        with tempfile.TemporaryDirectory() as folder:
            run.around = partial(Watched, folder)
            try:
                return (yield)
            finally:
                run.around = None
                files = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
                self.seen[item.nodeid] = {tuple(key) for file in files for key in file}
                self.seen[item.nodeid] |= {key for key in here if key[0] == "branch"}  # on the stand-in that records
                self.seconds[item.nodeid] = time.monotonic() - began


def watch(arguments: list[str]) -> Watch:
    """Runs tests of this room in this process, all that come to the sources if none are named; ends it if one fails."""
    arguments = arguments or ["-m", "not matrix", "tests/device", "--ignore", "tests/device/test_simulator.py"]
    looking = Watch()
    note()
    look_on()
    code = pytest.main(["-q", "-p", "no:cacheprovider", *arguments], [looking])
    if code:
        sys.exit("the tests fail as the sources are")
    return looking
