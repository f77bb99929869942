"""Finds the order in which a module calls its children, from the source of its forward. `nn.Module` registers them in
the order of their creation, which may differ."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import nn

from shoal.pipeline.loops import index_of, side_by_side, turn_of

_READS = frozenset(["config", "device", "dtype", "keys", "parameters", "shape", "training"])
"""Attributes of a child that are read without a use of it."""

_parsing = threading.Lock()
"""CPython 3.11 raises SystemError where two threads make a syntax tree at once: they count its depth together. Ranks
may be threads."""


def children_as_called(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns `module.named_children()` in the order in which the forward first uses them.

    Of lists that a loop goes through side by side (`zip(self.a, self.b)`, `self.a[i]` and `self.b[i]`) the items come
    in turn, under names like "a.0"; those of one that a loop goes through backwards from the last one on. A child that
    the forward does not name keeps its position behind the one registered before it; without source all keep the order
    of registration. A wrong guess cannot give wrong numbers: a stage that would need what a later one computes is
    refused when the model is first run.
    """
    return _ordered(module, _uses_of(module))


def children_called(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns `children_as_called` without those of which the forward only computes with their weights
    (`self.relative.weight`), and which it never calls."""
    uses = _uses_of(module)
    return [(name, child) for name, child in _ordered(module, uses) if name in uses.called or name not in uses.read]


def is_named(module: nn.Module, name: str) -> bool:
    """Whether the forward of `module` uses its child `name`; also where it has no source or names no child."""
    found = _uses_of(module).found
    return not found or name in found


def _uses_of(module: nn.Module) -> _Uses:
    uses = _Uses(type(module), {name: frozenset(child._parameters.keys()) for name, child in module.named_children()})
    uses.follow("forward")
    uses.follow_aside()
    return uses


def _ordered(module: nn.Module, uses: _Uses) -> list[tuple[str, nn.Module]]:
    children = list(module.named_children())
    names = [name for name, _ in children]
    place, last = dict[str, int](), -1
    for name in names:
        last = place[name] = uses.found.index(name) if name in uses.found else last
    return _in_turn(sorted(children, key=lambda child: place[child[0]]), uses)


def _in_turn(children: Sequence[tuple[str, nn.Module]], uses: _Uses) -> list[tuple[str, nn.Module]]:
    """Returns `children` with the items of lists that are `beside` each other in turn, where the first list was, and
    the items of those that a loop goes through `backwards` from the last one on; of dicts in a list what they hold, in
    the order of the `keys` by which a loop takes it; and a child that a loop calls in one turn alone behind the item of
    that turn."""
    lists = {name: list(child.named_children()) for name, child in children if isinstance(child, nn.ModuleList)}
    turned = [name for name in lists if uses.backwards.get(name)]
    for name in turned:
        lists[name].reverse()
    groups: dict[str, list[str]] = {}
    for each in uses.beside:
        names = [name for name in each if name in lists and name not in groups]
        if len(names) > 1:
            groups.update(dict.fromkeys(names, names))
    once = {name: at for name, at in uses.once.items() if name not in lists and at[1] < len(lists.get(at[0], ()))}
    for name in (*turned, *(each for each in uses.keys if each in lists), *(of for of, _ in once.values())):
        groups.setdefault(name, [name])
    found: list[tuple[str, nn.Module]] = []
    given = set[str]()
    for name, child in children:
        if name not in groups:
            found += [] if name in once else [(name, child)]
        elif name not in given:
            given |= set(groups[name])
            items = [[(each, f"{each}.{key}", item) for key, item in lists[each]] for each in groups[name]]
            for turn, together in enumerate(zip_longest(*items)):
                here = [item for item in together if item is not None]
                found += [each for of, key, item in here for each in _held(key, item, uses.keys.get(of, ()))]
                found += [each for each in children if once.get(each[0]) in [(of, turn) for of in groups[name]]]
    return found


def _held(name: str, item: nn.Module, keys: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Returns an item of a list, or of a dict what it holds: what is under `keys` in their order, then the rest."""
    if not isinstance(item, nn.ModuleDict) or not keys:
        return [(name, item)]
    order = [*(key for key in keys if key in item), *(key for key in item if key not in keys)]
    return [(f"{name}.{key}", item[key]) for key in order]


class _Uses(ast.NodeVisitor):
    """Collects in `found` the attributes of self that are in `weights`, modules by name, in the order in which methods
    of the class `of` use them; in `read` those of which they take one of their `weights`, in `called` those that they
    use otherwise; in `beside` those of which a loop uses one item after the other, in the order of its body; in
    `backwards` whether it begins with the last one; in `once` those that it uses in one turn.

    The target of a call comes after its arguments. What an `if` does that ends with a return (adapters without prompts)
    and what comes behind it are two ways through a method: a child that only the second uses comes before those that it
    uses later, also before those of the first. A method whose result nobody takes (which scales weights before layers
    run) comes last.
    """

    def __init__(self, of: type, weights: Mapping[str, Collection[str]]) -> None:
        self._weights, self._names, self._followed = weights, weights.keys(), set[tuple[type, str]]()
        self._of, self._self = of.__mro__, "self"  # the classes searched for a method
        self._behind: Sequence[type] = ()  # the classes that super() searches
        self.found: list[str] = []
        self.read, self.called = set[str](), set[str]()
        self.beside: list[list[str]] = []
        self.backwards: dict[str, bool] = {}  # of each list, whether the first loop through it goes from its end on
        self._items: dict[str, str] = {}  # the list of which a variable of the loops around is an item
        self._variables: dict[str, bool] = {}  # of the loops around, and whether they go down
        self._turn: list[str] = []  # the lists of which the loop has used an item
        self._indices = set[str]()  # those of the loops around that count from 0 on
        self.once: dict[str, tuple[str, int]] = {}  # what a loop calls in one turn alone: the list, and which item's
        self.keys: dict[str, list[str]] = {}  # of lists of dicts, those that a loop takes of an item
        self._aside: list[str] = []  # methods whose results nobody takes
        self._ends: list[tuple[int, list[str]]] = []  # of the method: how many were found before an `if`, and its own

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
            before = self._self, self._behind, self._ends
            self._self, self._behind, self._ends = tree.args.args[0].arg, self._of[self._of.index(owner) + 1 :], []
            for statement in tree.body:
                self.visit(statement)
            self._merge()
            self._self, self._behind, self._ends = before

    def follow_aside(self) -> None:
        for method in self._aside:
            self.follow(method)

    def visit_Expr(self, node: ast.Expr) -> None:
        method = self._of_self(node.value.func) if isinstance(node.value, ast.Call) else None
        if method is None or method in self._names:
            self.generic_visit(node)
            return
        for argument in (*node.value.args, *node.value.keywords):  # type: ignore[attr-defined]
            self.visit(argument)
        self._aside.append(method)

    def _merge(self) -> None:
        """Puts back what was found in ways that ended."""
        for number, ended in reversed(self._ends):
            self.found[number:] = _merged(ended, self.found[number:])

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        before, self._ends, number = self._ends, [], len(self.found)
        for statement in node.body:
            self.visit(statement)
        turn = turn_of(node.test, self._indices)
        if turn is not None and self._turn:
            self.once |= dict.fromkeys(self.found[number:], (self._turn[-1], turn))
        if _returns(node.body):
            self._merge()
            self._ends = [(number, self.found[number:])]
            del self.found[number:]
        self._ends = [*before, *self._ends]
        for statement in node.orelse:
            self.visit(statement)

    def visit_Call(self, node: ast.Call) -> None:
        for argument in (*node.args, *node.keywords):
            self.visit(argument)
        self.visit(node.func)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _READS and self._is_within_self(node.value):
            return
        name, of = self._of_self(node), self._of_self(node.value)
        if of is not None and node.attr in self._weights.get(of, ()):
            self.read.add(of)
            self._find(of)
            return
        if name in self._names:
            self.called.add(str(name))
            self._find(str(name))
        elif name is not None:
            self.follow(name)
        elif (
            isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name) and node.value.func.id == "super"
        ):
            self.follow(node.attr, self._behind)
        self.generic_visit(node)

    def _find(self, name: str) -> None:
        self.found += [name] if name not in self.found else []

    def visit_For(self, node: ast.For) -> None:
        before = self._items, self._variables, self._turn, self._indices
        self.visit(node.iter)
        variable, through = side_by_side(node)
        lists = [each for each, _ in through]
        names = [self._of_self(each) for each in lists]
        own = [variable] if len(lists) == 1 else variable.elts if isinstance(variable, ast.Tuple) else []
        items = {each.id: name for each, name in zip(own, names, strict=False) if isinstance(each, ast.Name) and name}
        for name, (_, down) in zip(names, through, strict=True):
            if name:
                self.backwards.setdefault(name, down)
        down = len(through) == 1 and through[0][1]
        inside = {each.id: down for each in ast.walk(node.target) if isinstance(each, ast.Name)}
        self._items, self._variables, self._turn = {**self._items, **items}, {**self._variables, **inside}, []
        self._indices = self._indices | index_of(node)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)
        used = [*self._turn, *(name for name in names if name and len(lists) > 1)]
        self.beside.append([name for name in dict.fromkeys(used) if name in self._names])
        self._items, self._variables, self._turn, self._indices = before

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self._items:
            self._turn.append(self._items[node.id])

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        name = self._of_self(node.value)
        if isinstance(node.value, ast.Name) and node.value.id in self._items and isinstance(node.slice, ast.Constant):
            keys = self.keys.setdefault(self._items[node.value.id], [])
            keys += [node.slice.value] if isinstance(node.slice.value, str) and node.slice.value not in keys else []
        inside = [each.id for each in ast.walk(node.slice) if isinstance(each, ast.Name) and each.id in self._variables]
        if name and inside:
            self._turn.append(name)
            self.backwards.setdefault(name, isinstance(node.slice, ast.Name) and self._variables[inside[0]])

    def visit_Compare(self, node: ast.Compare) -> None:
        """Skips `self.norm is None`, which does not use the module."""
        if not any(isinstance(each, ast.Is | ast.IsNot) for each in node.ops):
            self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        for each in (*node.generators, node.elt):
            self.visit(each)

    def _is_within_self(self, node: ast.AST) -> bool:
        """Whether `node` is what lies in an attribute of self, such as `self.layers[0].norm.weight`: nothing is
        called."""
        while isinstance(node, ast.Attribute | ast.Subscript):
            if self._of_self(node) is not None:
                return True
            node = node.value
        return False

    def _of_self(self, node: ast.AST) -> str | None:
        """Returns the name of the attribute of self that `node` is, if it is one."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self._self:
            return node.attr
        return None


def _returns(statements: Sequence[ast.stmt]) -> bool:
    last = statements[-1]
    return isinstance(last, ast.Return) or (isinstance(last, ast.With) and _returns(last.body))


def _merged(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Returns `first` with those that `second` alone has: before the ones that come later there, else last."""
    found = list(first)
    for place, name in enumerate(second):
        if name not in found:
            found.insert(min((found.index(each) for each in second[place:] if each in found), default=len(found)), name)
    return found
