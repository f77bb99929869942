"""The places of src/shoal at which an accelerator's work is put in order, and the branches that only an accelerator
takes; and functions of a running program put in the place of others.

    wait            a call statement of WAITS or ROOM's, or a reference to one        removed: nothing
    event           a call that records one                                           an event behind no work
    record_stream   what keeps memory for another stream                              nothing
    pinned          `pin_memory()`, `pin_memory=`, `pinned=`                          pageable memory
"""

from __future__ import annotations

import ast
import gc
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/shoal"
METHODS = {
    **dict.fromkeys(("wait_stream", "wait_event", "wait", "synchronize"), "wait"),
    **dict.fromkeys(("record_event", "record"), "event"),
    "record_stream": "record_stream",
}
ROOM = {
    **dict.fromkeys(("finish", "finish_all", "synchronize"), "wait"),
    **dict.fromkeys(("record_event", "timed_event"), "event"),
    "record_use": "record_stream",
}
"""Functions of the room of devices, where they come from there."""
PINNED = ("pin_memory", "pinned")
NO_EVENT = "__no_event__"
"""Name of a builtin that makes an event which nobody has recorded."""
ON_HOSTS = ("stream", "event", "module", "capability")
"""Names of what is None of a CPU."""
ASKING = ("backend", "current_stream", "new_stream", "record_event", "timed_event", "compute_capability")
"""Functions whose result is None of a CPU."""
ACCELERATORS_ONLY = ("comm/nccl.py",)


@dataclass(frozen=True)
class Place:
    """A place of a file below SOURCES: the `number`-th that is found there; `text` is what stands there."""

    path: str
    line: int
    kind: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.kind}: {self.text}"


Change = Callable[[Place, ast.AST, ast.AST], ast.AST]
"""Gives what is to stand at a place instead, from the expression there that is watched, and what stays without it."""


class Orders(ast.NodeTransformer):
    """Finds the places of a file at which work is put in order; `change` may put something else there."""

    def __init__(self, path: str, change: Change | None = None) -> None:
        self._path, self._change = path, change
        self._room: set[str] = set(ROOM) if path.startswith("device/") else set()
        self.found: list[Place] = []

    def _at(self, node: Any, kind: str, whole: ast.AST, removed: ast.AST) -> Any:
        place = Place(self._path, node.lineno, kind, len(self.found), ast.unparse(whole))
        self.found.append(place)
        return node if self._change is None else ast.copy_location(self._change(place, node, removed), node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.module == "shoal.device":
            self._room |= {each.name for each in node.names} & set(ROOM)
        return node

    def _kind(self, called: ast.expr) -> str | None:
        if isinstance(called, ast.Name):
            return ROOM[called.id] if called.id in self._room else None
        return METHODS.get(called.attr) if isinstance(called, ast.Attribute) else None

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        kind = self._kind(call.func) if isinstance(call, ast.Call) else None
        if not isinstance(call, ast.Call) or kind is None:
            return self.generic_visit(node)
        changed = self._at(call.func, kind, call, ast.Pass())
        if isinstance(changed, ast.Pass):
            return changed
        call.func = changed
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        kind = self._kind(node.func)
        if kind == "event":
            changed = self._at(node.func, kind, node, ast.Name(NO_EVENT, ast.Load()))
            if isinstance(changed, ast.Name) and changed.id == NO_EVENT:
                return ast.copy_location(ast.Call(changed, [], []), node)
            node.func = changed
        elif isinstance(node.func, ast.Attribute) and node.func.attr in PINNED:
            return self._at(node, "pinned", node, node.func.value)
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)  # not the attribute, which is called here
        else:
            node.func = self.visit(node.func)
        node.args = [self.visit(each) for each in node.args]
        node.keywords = [self.visit(each) for each in node.keywords]
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if node.arg in PINNED and not (isinstance(node.value, ast.Constant) and node.value.value is False):
            node.value = self._at(node.value, "pinned", node, ast.Constant(False))
            return node
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """A wait that is handed on, to be called later."""
        if METHODS.get(node.attr) == "wait" and isinstance(node.ctx, ast.Load):
            return self._at(node, "wait", node, ast.parse("lambda *_: None", mode="eval").body)
        return self.generic_visit(node)


class Branches(ast.NodeTransformer):
    """Finds the statements and values that only an accelerator comes to, and the questions whether there is one;
    `change` may put something else there."""

    def __init__(self, path: str, change: Change | None = None) -> None:
        self._path, self._change = path, change
        self._all = path in ACCELERATORS_ONLY
        self._only = False
        self.found: list[Place] = []

    def _at(self, node: Any, kind: str, text: str) -> Any:
        place = Place(self._path, node.lineno, kind, len(self.found), text.splitlines()[0])
        self.found.append(place)
        return node if self._change is None else ast.copy_location(self._change(place, node, node), node)

    def _body(self, body: list[Any], inside: bool) -> list[Any]:
        """`body` with a mark before each statement of its accelerator's part, which is all of it if `inside`."""
        before, self._only = self._only, inside
        marked: list[Any] = []
        for statement in body:
            plain = not isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)
            if self._only and plain and not _is_text(statement):
                nothing = ast.copy_location(ast.Constant(None), statement)
                mark = self._at(nothing, "statement", ast.unparse(statement))
                marked.append(ast.copy_location(ast.Expr(mark), statement))
            leaves = _leaves_hosts(statement)
            marked.append(self.visit(statement))
            self._only = self._only or leaves
        self._only = before
        return marked

    def visit_If(self, node: ast.If) -> ast.AST:
        on_host, inside = value(node.test, False), self._only
        node.test = self.visit(node.test)
        node.body = self._body(node.body, inside or on_host is False)
        node.orelse = self._body(node.orelse, inside or on_host is True)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        on_host = None if self._only else value(node.test, False)
        self.generic_visit(node)
        if on_host is False:
            node.body = self._at(node.body, "value", ast.unparse(node.body))
        elif on_host is True:
            node.orelse = self._at(node.orelse, "value", ast.unparse(node.orelse))
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        asks = isinstance(node.func, ast.Name) and node.func.id == "is_accelerator"
        return self._at(node, "question", ast.unparse(node)) if asks else node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field, old in ast.iter_fields(node):
            if isinstance(old, list) and old and isinstance(old[0], ast.stmt):
                function = isinstance(node, ast.FunctionDef)
                setattr(node, field, self._body(old, self._only or (self._all and function)))
            elif isinstance(old, list):
                setattr(node, field, [self.visit(each) if isinstance(each, ast.AST) else each for each in old])
            elif isinstance(old, ast.AST):
                setattr(node, field, self.visit(old))
        return node


def value(node: ast.expr, on_accelerator: bool) -> bool | None:
    """What a condition is of on a host, or on an accelerator, if the room of devices alone decides it; None if not."""
    match node:
        case ast.Call(func=ast.Name(id="is_accelerator")) | ast.Attribute(attr="is_cuda"):
            return on_accelerator
        case ast.Compare(
            left=ast.Attribute(attr="type"), ops=[op], comparators=[ast.Constant(value="cpu" | "cuda" as kind)]
        ):
            return isinstance(op, ast.Eq) == ((kind == "cuda") == on_accelerator)
        case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]):
            return isinstance(op, ast.IsNot) == on_accelerator if _is_none_on_hosts(left) else None
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = value(operand, on_accelerator)
            return None if inner is None else not inner
        case ast.NamedExpr(value=inside):
            return value(inside, on_accelerator)
        case ast.BoolOp(op=op, values=values):
            parts = [value(each, on_accelerator) for each in values]
            decides = isinstance(op, ast.Or)
            return decides if decides in parts else None if None in parts else not decides
    return None


def _is_none_on_hosts(node: ast.expr) -> bool:
    match node:
        case ast.NamedExpr(value=inside):
            return _is_none_on_hosts(inside)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.lstrip("_") in ON_HOSTS
        case ast.Call(func=ast.Name(id=name)):
            return name in ASKING
    return False


def _leaves_hosts(node: ast.stmt) -> bool:
    """Whether hosts do not come to what is behind this statement."""
    return (
        isinstance(node, ast.If)
        and not node.orelse
        and isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue)
        and value(node.test, False) is True
    )


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def tree(path: str) -> ast.Module:
    """A file of the sources, parsed."""
    return ast.parse((SOURCES / path).read_text(encoding="utf-8"))


def paths() -> list[str]:
    """All files below SOURCES."""
    return [file.relative_to(SOURCES).as_posix() for file in sorted(SOURCES.rglob("*.py"))]


def replace(trees: Mapping[str, ast.Module]) -> None:
    """Puts the functions of changed files, by path, in the place of those of this process, decorated ones too."""
    made = {}
    for path, changed in trees.items():
        name = ".".join(("shoal", *Path(path).with_suffix("").parts)).removesuffix(".__init__")
        file = importlib.import_module(name).__file__
        assert file is not None
        made |= {
            (file, *_key(code)): code for code in _codes(compile(ast.fix_missing_locations(changed), file, "exec"))
        }
    gc.unfreeze()  # or the functions that a nursery has kept from being collected were not found
    for each in gc.get_objects():
        if type(each) is FunctionType:  # not isinstance, which asks what answers with a warning
            new = made.get((each.__code__.co_filename, *_key(each.__code__)))
            each.__code__ = each.__code__ if new is None else new


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno
