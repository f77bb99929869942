"""Finds the order in which a module calls its children, from the source of its forward. `nn.Module` registers them in
the order of their creation, which may differ."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

_parsing = threading.Lock()
"""CPython 3.11 raises SystemError where two threads make a syntax tree at once: they count its depth together. Ranks
may be threads."""


def children_as_called(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns `module.named_children()` in the order in which the forward first uses them.

    A child that the forward does not name keeps its position behind the one registered before it; without source all
    keep the order of registration. A wrong guess cannot give wrong numbers: a stage that would need what a later one
    computes is refused when the model is first run.
    """
    children = list(module.named_children())
    names = [name for name, _ in children]
    uses = _Uses(type(module), set(names))
    uses.follow("forward")
    place, last = dict[str, int](), -1
    for name in names:
        last = place[name] = uses.found.index(name) if name in uses.found else last
    return sorted(children, key=lambda child: place[child[0]])


class _Uses(ast.NodeVisitor):
    """Collects in `found` the attributes `names` of self, in the order in which methods of the class `of` use them.

    The target of a call comes after its arguments.
    """

    def __init__(self, of: type, names: set[str]) -> None:
        self._names, self._followed = names, set[tuple[type, str]]()
        self._of, self._self = of.__mro__, "self"  # the classes searched for a method
        self._behind: Sequence[type] = ()  # the classes that super() searches
        self.found: list[str] = []

    def follow(self, method: str, among: Sequence[type] | None = None) -> None:
        """Visits a method once: that of the class, or of the first of `among` that has it."""
        among = self._of if among is None else among
        owner = next((each for each in among if method in vars(each)), None)
        function: Callable[..., Any] | None = None if owner is None else inspect.getattr_static(owner, method)
        if owner is None or (owner, method) in self._followed or not inspect.isroutine(function):
            return
        self._followed.add((owner, method))
        try:
            source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
            with _parsing:
                (tree,) = ast.parse(source).body
        except (OSError, TypeError, SyntaxError, ValueError):
            return  # made at run time: no source
        if isinstance(tree, ast.FunctionDef) and tree.args.args:
            before = self._self, self._behind
            self._self, self._behind = tree.args.args[0].arg, self._of[self._of.index(owner) + 1 :]
            for statement in tree.body:
                self.visit(statement)
            self._self, self._behind = before

    def visit_Call(self, node: ast.Call) -> None:
        for argument in (*node.args, *node.keywords):
            self.visit(argument)
        self.visit(node.func)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._of_self(node)
        if name in self._names:
            self.found += [str(name)] if name not in self.found else []
        elif name is not None:
            self.follow(name)
        elif (
            isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name) and node.value.func.id == "super"
        ):
            self.follow(node.attr, self._behind)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Skips `self.norm is None`, which does not use the module."""
        if not any(isinstance(each, ast.Is | ast.IsNot) for each in node.ops):
            self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        for each in (*node.generators, node.elt):
            self.visit(each)

    def _of_self(self, node: ast.AST) -> str | None:
        """Returns the name of the attribute of self that `node` is, if it is one."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self._self:
            return node.attr
        return None
