"""Changes one operator, sign, flag or number of the sources at a time, and prints the changes that no test notices.

    python -m tests.mutate src/shoal/optim/lr.py tests/test_engine.py -k schedule  # all of a file; then as for pytest
    python -m tests.mutate sample 8 src/shoal/optim src/shoal/chunks              # 8 of each room, always the same

Of a sample, each change is shown to tests that run through its line, those of its room first and the quick ones before
the slow, for TESTS_SECONDS at most; tests/covered.py must have measured them. Each change is made in a copy of the
sources, in a process forked from one that has imported torch. A change that survives either makes no difference or
lacks a test.
"""

from __future__ import annotations

import ast
import contextlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SECONDS = 120  # a change may make a loop endless
TESTS_SECONDS = 20.0
ROOT = Path(__file__).parents[1]
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.USub: ast.UAdd,
}
MESSAGES = (ast.Raise, ast.JoinedStr)  # what is said, not what is computed
FIELDS = ("annotation", "returns", "type_params")  # types


def changes(tree: ast.AST) -> Iterator[int]:
    """Changes the tree in place, one place at a time, and puts it back after each; gives the line."""
    for node in list(_computed(tree)):
        if isinstance(node, ast.Compare):
            for place, operator in enumerate(node.ops):
                if type(operator) in SWAPS:
                    node.ops[place] = SWAPS[type(operator)]()
                    yield node.lineno
                    node.ops[place] = operator
        elif isinstance(node, ast.BinOp | ast.BoolOp | ast.UnaryOp) and type(node.op) in SWAPS:
            operator, node.op = node.op, SWAPS[type(node.op)]()
            yield node.lineno
            node.op = operator
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
            value = node.value
            node.value = not value if isinstance(value, bool) else value + 1
            yield node.lineno
            node.value = value


def _computed(node: ast.AST) -> Iterator[ast.AST]:
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in FIELDS and not isinstance(child, MESSAGES):
                yield child
                yield from _computed(child)


def notices(sources: Path, arguments: list[str]) -> bool:
    """Whether the tests fail, or do not end in time, with these sources."""
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(SECONDS)
        os.environ["PYTHONPATH"] = f"{sources}:{ROOT}"
        sys.path.insert(0, str(sources))
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
            code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *arguments])
        os._exit(int(code))
    return os.waitpid(child, 0)[1] != 0


@dataclass(frozen=True)
class Change:
    """One change of a file of the sources: its line, and that line before and after."""

    path: Path
    line: int
    before: str
    after: str
    text: str
    """The whole file with it."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}\n  - {self.before}\n  + {self.after}"


def changes_of(path: Path) -> list[Change]:
    """All changes of a file, given by its path below src."""
    tree = ast.parse((ROOT / "src" / path).read_text(encoding="utf-8"))
    before, found = ast.unparse(tree).splitlines(), []
    for line in changes(tree):
        after = ast.unparse(tree).splitlines()
        old, new = next((old, new) for old, new in zip(before, after, strict=True) if old != new)
        found.append(Change(path, line, old.strip(), new.strip(), "\n".join(after)))
    return found


def survives(sources: Path, change: Change, arguments: list[str]) -> bool:
    """Makes a change, has the tests look at it, takes it back; prints it if they do not notice."""
    whole = (ROOT / "src" / change.path).read_text(encoding="utf-8")
    (sources / change.path).write_text(change.text, encoding="utf-8")
    survived = not notices(sources, arguments)
    (sources / change.path).write_text(whole, encoding="utf-8")
    if survived:
        print(change, flush=True)
    return survived


def whole_file(sources: Path, file: str, arguments: list[str]) -> None:
    """Makes every change of a file; pytest has `arguments`."""
    if notices(sources, arguments):
        sys.exit("the tests fail without a change")
    found = changes_of(Path(file).resolve().relative_to(ROOT / "src"))
    survivors = sum(survives(sources, change, arguments) for change in found)
    print(f"{survivors} of {len(found)} changes survive")


def sample(sources: Path, number: int, rooms: list[str]) -> None:
    """Makes `number` changes of each room, and of its lines that some test runs through."""
    from tests.covered import tests_of_lines

    tests = tests_of_lines()
    for room in rooms:
        files = [path.resolve().relative_to(ROOT / "src") for path in sorted(Path(room).rglob("*.py"))]
        found = [change for path in files for change in changes_of(path) if (path, change.line) in tests]
        drawn = random.Random(room).sample(found, min(number, len(found)))
        own = "tests" + room.removeprefix("src/shoal")
        shown = [(change, _chosen(tests[change.path, change.line], own)) for change in drawn]
        if shown and notices(sources, shown[0][1]):
            sys.exit(f"tests of {room} fail without a change")
        survivors = sum(survives(sources, change, chosen) for change, chosen in shown)
        print(f"{room}: {survivors} of {len(drawn)} changes survive, of {len(found)}", flush=True)


def _chosen(seconds: dict[str, float], own: str) -> list[str]:
    """As many tests as TESTS_SECONDS are enough for, three at least: those whose names begin with `own` first."""
    left, chosen = TESTS_SECONDS, list[str]()
    for test in sorted(seconds, key=lambda test: (not test.startswith(own), seconds[test])):
        left -= seconds[test]
        if left < 0 and len(chosen) >= 3:
            break
        chosen.append(test)
    return chosen


def main(first: str, *arguments: str) -> None:
    """Runs one of the two commands above."""
    with tempfile.TemporaryDirectory() as directory:
        sources = Path(directory) / "src"
        shutil.copytree(ROOT / "src", sources)
        if first == "sample":
            sample(sources, int(arguments[0]), list(arguments[1:]))
        else:
            whole_file(sources, first, list(arguments))


if __name__ == "__main__":
    import torch  # noqa: F401  before the fork: two seconds for each change

    main(*sys.argv[1:])
