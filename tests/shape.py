"""The shape of the house: how large its files and functions are, and who names what. `make shape` fails where something
exceeds a limit."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "shoal"

FILE, FUNCTION, PARAMETERS, ENGINE, LINE, NAMERS = 300, 60, 8, 150, 120, 4
AXES = {"dp": "", "cp": "parallel/context/", "tp": "parallel/tensor/", "ep": "parallel/expert/", "pp": "pipeline/"}
"""Each axis with its folder."""
NAMES_AXES = ("plan.py", "mesh.py", "assembly/compatibility.py")
"""Where axes are declared: they are counted nowhere here."""
NAMES_DEVICES = ("device/", "comm/nccl.py")

Excess = dict[str, int]
"""What is larger than its limit, and how large it is."""


def excess() -> Excess:
    """All that exceeds its limit in the sources as they stand."""
    found: Excess = {}
    axes: dict[str, list[str]] = {axis: [] for axis in AXES}
    for path in sorted(SOURCES.rglob("*")):
        if path.suffix not in (".py", ".c", ".h", ".js"):
            continue
        name, text = path.relative_to(SOURCES).as_posix(), path.read_text()
        lines = text.splitlines()
        if len(lines) > (ENGINE if name == "engine.py" else FILE):
            found[f"{name}: lines"] = len(lines)
        if wide := sum(len(line) > LINE for line in lines):
            found[f"{name}: lines over {LINE} characters"] = wide
        if path.suffix != ".py":
            continue
        nodes = list(ast.walk(ast.parse(text)))
        found |= {f"{name}: {what}": size for what, size in _large(nodes)}
        code = _without_docstrings(nodes)
        if not name.startswith(NAMES_DEVICES) and (devices := _devices(code)):
            found[f"{name}: names of devices"] = devices
        named = _names(code)
        for axis, folder in AXES.items():
            if name not in NAMES_AXES and not (folder and name.startswith(folder)) and axis in named:
                axes[axis].append(name)
    return found | {f"files that name {axis}": len(files) for axis, files in axes.items() if len(files) > NAMERS}


def _large(nodes: list[ast.AST]) -> Iterator[tuple[str, int]]:
    """Functions over FUNCTION lines, and constructors with over PARAMETERS parameters (but the engine's)."""
    for owner in nodes:
        for node in (
            getattr(owner, "body", []) if isinstance(owner, ast.Module | ast.ClassDef | ast.FunctionDef) else []
        ):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            called = f"{getattr(owner, 'name', '')}.{node.name}".lstrip(".")
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > FUNCTION:
                yield f"lines of {called}", size
            given = len(node.args.args) - 1 + len(node.args.kwonlyargs)
            if node.name == "__init__" and given > PARAMETERS and called != "Engine.__init__":
                yield f"parameters of {called}", given


def _devices(code: list[ast.AST]) -> int:
    """Places that name CUDA, as a string or as a module, or ask a tensor for it."""
    return sum(
        (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.search(r"\bcuda\b", node.value) is not None
        )
        or (isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda"))
        for node in code
    )


def _without_docstrings(nodes: list[ast.AST]) -> list[ast.AST]:
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    return [node for node in nodes if id(node) not in skipped]


_NAMING = {ast.Attribute: "attr", ast.keyword: "arg", ast.Name: "id", ast.Constant: "value"}
"""Where nodes of these kinds have the name of an axis: `plan.cp`, a keyword `cp=`, a variable, a string "cp"."""


def _names(code: list[ast.AST]) -> set[object]:
    """All that code names."""
    return {getattr(node, _NAMING[type(node)]) for node in code if type(node) in _NAMING}


def main() -> None:
    found = excess()
    for what, size in found.items():
        print(f"{size:6} {what}")
    files = list(SOURCES.rglob("*.py"))
    print(f"{sum(len(path.read_text().splitlines()) for path in files)} lines in {len(files)} files of src/shoal")
    print("the limits above are exceeded" if found else "the shape holds")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
