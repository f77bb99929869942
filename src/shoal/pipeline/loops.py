"""What a loop goes through, read from its source: which lists side by side, from which end on, and in which turn what
its body does in one alone."""

from __future__ import annotations

import ast
from collections.abc import Collection


def side_by_side(loop: ast.For) -> tuple[ast.expr, list[tuple[ast.expr, bool]]]:
    """Returns the variable of a loop, or the tuple of them, and what it goes through, each with whether from its end
    on: what `zip` or `enumerate` is given."""
    variable = loop.target
    through, down = _forwards(loop.iter)
    if _calls(through, "enumerate") and isinstance(variable, ast.Tuple) and len(variable.elts) == 2:
        variable = variable.elts[1]
        through, inner = _forwards(through.args[0])  # type: ignore[attr-defined]
        down ^= inner
    if not _calls(through, "zip"):
        return variable, [(through, down)]
    lists = [_forwards(each) for each in through.args]  # type: ignore[attr-defined]
    return variable, [(each, inner ^ down) for each, inner in lists]


def index_of(loop: ast.For) -> set[str]:
    """Returns the variable of a loop that counts from 0 on, as a set: that of `enumerate(x)`, or of `range(n)`."""
    target, through = loop.target, loop.iter
    if not isinstance(through, ast.Call) or len(through.args) != 1:
        return set()
    if _calls(through, "enumerate") and isinstance(target, ast.Tuple):
        target = target.elts[0]
    elif not _calls(through, "range"):
        return set()
    return {target.id} if isinstance(target, ast.Name) else set()


def turn_of(test: ast.expr, indices: Collection[str]) -> int | None:
    """Returns the turn of the loop in which a condition holds that compares one of `indices` with a number (`i == 0 and
    self.conv is not None`); None if it does not."""
    for each in ast.walk(test):
        if isinstance(each, ast.Compare) and len(each.ops) == 1 and isinstance(each.ops[0], ast.Eq):
            index, number = each.left, each.comparators[0]
            if isinstance(index, ast.Name) and index.id in indices and isinstance(number, ast.Constant):
                return number.value if isinstance(number.value, int) else None
    return None


def _forwards(through: ast.expr) -> tuple[ast.expr, bool]:
    """Returns what a loop goes through, and whether from its end on: of `reversed(x)`, `x[::-1]` that is x; of
    `range(n, -1, -1)` it is itself."""
    down = False
    while True:
        if _calls(through, "reversed"):
            down = not down
        elif isinstance(through, ast.Subscript) and isinstance(through.slice, ast.Slice):
            cut = through.slice
            if cut.lower or cut.upper or not _is_minus_one(cut.step):
                return through, down
            through, down = through.value, not down
            continue
        elif not _calls(through, "list") and not _calls(through, "tuple"):
            break
        through = through.args[0]  # type: ignore[attr-defined]
    if _calls(through, "range") and len(through.args) == 3:  # type: ignore[attr-defined]
        down ^= _is_minus_one(through.args[2])  # type: ignore[attr-defined]
    return through, down


def _is_minus_one(node: ast.expr | None) -> bool:
    return node is not None and ast.unparse(node) == "-1"


def _calls(node: ast.expr, name: str) -> bool:
    """True if `node` calls the function `name` with arguments."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name and bool(node.args)
