"""What of src/shoal each test runs through: lines and branches, in its own process, in ranks and in what it starts.

    make coverage                                 # measures, and prints lines and branches of all that was measured
    python -m tests.covered lost kept.txt         # what only other tests run through than those that the file names
    python -m tests.covered spare tests/parity    # tests of a room whose lines and branches the others have as well
    python -m tests.covered thin                  # adds to tests/thinned.txt dear rows without which nothing is lost

Needs the package coverage. The measurements lie in build/coverage, with what each test cost meanwhile.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import coverage
import pytest

ROOT = Path(__file__).parents[1]
THINNED = ROOT / "tests/thinned.txt"
FOLDER = ROOT / "build/coverage"
DATA = FOLDER / "data"
DEAR, KEPT = 0.25, 1 / 8  # CPU seconds of a row that is measured meanwhile, and the least part of a table that stays
STAY = ("tests/test_docs.py", "tests/benchmarks/")  # what is promised, not what is computed
TEST = "SHOAL_TEST"  # the test that a process was started by
SETTINGS = f"""\
[run]
branch = True
source = {ROOT / "src/shoal"}
data_file = {DATA}
parallel = True
context = ${{{TEST}-}}
sigterm = True
patch = _exit
"""
Arc = tuple[int, int, int]
"""A file's number, and the lines that followed each other in it."""


class Measured:
    """A function of ranks that notes what it runs through. A rank may be killed after any call, so each is saved."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.test = os.environ.get(TEST, "")

    def __call__(self, *args: Any) -> Any:
        measurement = _measurement()
        measurement.start()
        measurement.switch_context(self.test)
        try:
            return self.fn(*args)
        finally:
            measurement.stop()
            measurement.save()


@cache
def _measurement() -> coverage.Coverage:
    """This process's own, whose contexts are switched."""
    os.environ.pop(TEST, None)
    return coverage.Coverage(data_suffix=True, config_file=str(FOLDER / "settings"), context=None)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begins before anything of the sources is imported: writes the settings, and has every process that is started
    from here on read them."""
    if getattr(early_config.known_args_namespace, "numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        return  # this one only shares the tests out
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "settings").write_text(SETTINGS)
    (FOLDER / "sitecustomize.py").write_text("import coverage\n\ncoverage.process_startup()\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    _measurement().start()
    from tests import pool  # here, since it imports the sources

    pool.around = Measured
    os.environ["COVERAGE_PROCESS_START"] = str(FOLDER / "settings")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not getattr(config.option, "numprocesses", None):
        _measurement().stop()
        _measurement().save()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    os.environ[TEST] = item.nodeid
    _measurement().switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        _measurement().switch_context("")
        del os.environ[TEST]


def report() -> None:
    """Prints lines and branches by file and in all."""
    measurement = coverage.Coverage(config_file=str(FOLDER / "settings"), data_file=str(DATA), data_suffix=False)
    measurement.combine(strict=False, keep=False)
    measurement.save()
    measurement.report(skip_covered=True)


def arcs_by_test() -> dict[str, set[Arc]]:
    """What each test runs through; "" has what is there without any."""
    found: dict[str, set[Arc]] = {}
    with sqlite3.connect(DATA) as data:
        names = dict(data.execute("select id, context from context"))
        for test, file, start, end in data.execute("select context_id, file_id, fromno, tono from arc"):
            found.setdefault(names[test], set()).add((file, start, end))
    return found


def costs() -> dict[str, float]:
    """CPU seconds of each test, from what `--junitxml` wrote beside the measurements."""
    found = {}
    for file in FOLDER.glob("*.xml"):
        for case in ElementTree.parse(file).iter("testcase"):
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            found[name] = sum(float(p.get("value", 0)) for p in case.iter("property") if p.get("name") == "cpu")
    return found


def tests_of_lines() -> dict[tuple[Path, int], dict[str, float]]:
    """The tests of `make test` that run through each line of a file below src, with their CPU seconds."""
    seconds, found = costs(), dict[tuple[Path, int], dict[str, float]]()
    thinned = set(THINNED.read_text().splitlines())
    with sqlite3.connect(DATA) as data:
        paths = {number: Path(path).relative_to(ROOT / "src") for number, path in data.execute("select * from file")}
        names = dict(data.execute("select id, context from context"))
        for test, file, line in data.execute("select distinct context_id, file_id, abs(tono) from arc"):
            if names[test] and names[test] not in thinned:
                found.setdefault((paths[file], line), {})[names[test]] = seconds.get(names[test], 1.0)
    return found


def lost(kept: set[str]) -> dict[str, list[tuple[int, int]]]:
    """By file, the lines that follow each other in some test and in none of `kept`, which `pytest --collect-only -q`
    lists."""
    arcs = arcs_by_test()
    remaining = set().union(*(arcs[test] for test in arcs if test in kept or not test))
    found: dict[str, list[tuple[int, int]]] = {}
    with sqlite3.connect(DATA) as data:
        paths = dict(data.execute("select id, path from file"))
    for file, start, end in sorted(set().union(*arcs.values()) - remaining):
        found.setdefault(paths[file], []).append((start, end))
    return found


def spare(room: str, may: Callable[[str], bool] = lambda test: True) -> dict[str, float]:
    """Tests of a room without which nothing less is run through, with their CPU seconds; of two alike the dearer.

    may: whether a test may be left out, asked once it is known that it can be
    """
    arcs, seconds = arcs_by_test(), costs()
    times: Counter[Arc] = Counter(arc for each in arcs.values() for arc in each)
    found = {}
    for test in sorted(filter(lambda name: name.startswith(room), arcs), key=lambda name: -seconds.get(name, 0.0)):
        if all(times[arc] > 1 for arc in arcs[test]) and may(test):
            found[test] = seconds.get(test, 0.0)
            times.subtract(arcs[test])
    return found


def thin() -> set[str]:
    """Rows of tables that are left to the matrix: those that are already, and those that are spare and dear; KEPT of
    each table stays."""
    seconds, thinned = costs(), set(THINNED.read_text().splitlines())
    left = Counter(test.partition("[")[0] for test in seconds.keys() - thinned)
    rows = left + Counter(test.partition("[")[0] for test in thinned)

    def may(test: str) -> bool:
        table = test.partition("[")[0]
        short = left[table] - 1 < max(1, KEPT * rows[table])
        if "[" not in test or test.startswith(STAY) or seconds.get(test, 0.0) < DEAR or short:
            return False
        left[table] -= 1
        return True

    return thinned | spare("tests/", may).keys()


if __name__ == "__main__":
    if sys.argv[1] == "report":
        report()
    elif sys.argv[1] == "lost":
        for path, steps in lost(set(Path(sys.argv[2]).read_text().splitlines())).items():
            print(path, *(f"{start}->{end}" for start, end in steps))
    elif sys.argv[1] == "thin":
        THINNED.write_text("".join(f"{row}\n" for row in sorted(thin())))
    else:
        for test, taken in spare(sys.argv[2]).items():
            print(f"{taken:8.2f} s  {test}")
