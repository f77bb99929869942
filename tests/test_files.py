"""Files of tests are dealt anew when a process ends in the middle of a test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.files import Files

pytestmark = pytest.mark.fast
TESTS = ["a.py::1", "a.py::2", "a.py::3", "b.py::1", "c.py::1", "d.py::1"]


class Process:
    """Stands in for a process: notes what it is given."""

    def __init__(self) -> None:
        self.given: list[str] = []
        self.shutting_down, self.gateway = False, SimpleNamespace(id="gw")

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += [TESTS[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


def dealt(processes: int) -> tuple[Files, list[Any]]:
    """A beginning with so many processes, all of which know the tests."""
    option = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(option=option, getvalue=lambda name: [f"{processes}*popen"])
    files, nodes = Files(config), [Process() for _ in range(processes)]
    for node in nodes:
        start(files, node)
    files.schedule()
    return files, nodes


def start(files: Files, node: Any) -> None:
    files.add_node(node)
    files.add_node_collection(node, TESTS)


def end(files: Files, node: Any, tests: list[str]) -> None:
    for test in tests:
        files.mark_test_complete(node, TESTS.index(test))


def test_a_test_that_ends_its_process_is_not_run_again():
    files, (first, second) = dealt(2)
    assert first.given == TESTS[:3] and second.given == TESTS[3:]
    end(files, first, ["a.py::1"])
    assert files.remove_node(first) == "a.py::2"
    start(files, new := Process())
    files.schedule()
    assert new.given == ["a.py::3"] and new.shutting_down, "it begins the last test: no other comes"
    end(files, second, second.given), end(files, new, new.given)
    assert not files.has_pending


def test_files_come_before_a_process_has_only_one_test_left():
    files, (only,) = dealt(1)
    for place, test in enumerate(TESTS):
        assert only.given[place] == test and (place + 1 < len(only.given) or only.shutting_down)
        end(files, only, [test])
    assert only.given == TESTS and files.remove_node(only) is None


def test_a_process_that_is_starting_gets_no_files():
    files, (first, second) = dealt(2)
    files.add_node(new := Process())  # its tests are not known yet
    assert files.remove_node(first) == "a.py::1" and files.remove_node(second) == "b.py::1"
    assert not new.given and files.has_pending
    files.add_node_collection(new, TESTS)
    files.schedule()
    end(files, new, ["a.py::2"])
    assert new.given == ["a.py::2", "a.py::3", "c.py::1", "d.py::1"]


def test_a_folder_whose_processes_are_dear_stays_in_one_process(monkeypatch):
    monkeypatch.setattr("tests.files.TOGETHER", ("dear",))
    monkeypatch.setitem(globals(), "TESTS", ["dear/a.py::1", "dear/a.py::2", "dear/b.py::1", "dearer.py::1", "c.py::1"])
    _, (first, second) = dealt(2)
    assert first.given == TESTS[:3] and second.given == TESTS[3:]
