"""Changes one operator, sign, flag or number of a source file at a time, and prints the changes that its tests do not
notice.

    python -m tests.mutate src/shoal/optim/lr.py tests/test_engine.py -k schedule

The first argument is the file; the rest goes to pytest. Each change is made in a copy of the sources, in a process
forked from one that has imported torch. A change that survives either makes no difference or lacks a test.
"""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SECONDS = 120  # a change may make a loop endless
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


def main(file: str, *arguments: str) -> int:
    """Prints a line for each change that survives; returns how many."""
    path = Path(file).resolve().relative_to(ROOT / "src")
    tree = ast.parse((ROOT / "src" / path).read_text(encoding="utf-8"))
    survivors = number = 0
    with tempfile.TemporaryDirectory() as directory:
        sources = Path(directory) / "src"
        shutil.copytree(ROOT / "src", sources)
        before = ast.unparse(tree).splitlines()
        (sources / path).write_text("\n".join(before))
        if notices(sources, list(arguments)):
            sys.exit("the tests fail without a change")
        for line in changes(tree):
            after = ast.unparse(tree).splitlines()
            (sources / path).write_text("\n".join(after))
            number += 1
            if not notices(sources, list(arguments)):
                survivors += 1
                old, new = next((old, new) for old, new in zip(before, after, strict=True) if old != new)
                print(f"{path}:{line}\n  - {old.strip()}\n  + {new.strip()}", flush=True)
    print(f"{survivors} of {number} changes survive")
    return survivors


if __name__ == "__main__":
    import torch  # noqa: F401  before the fork: two seconds for each change

    main(*sys.argv[1:])
