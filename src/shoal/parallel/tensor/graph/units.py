"""The modules in which a cut that was found is confirmed: the smallest that hold both ends of one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.parallel.tensor.graph.confirm import Unit
from shoal.parallel.tensor.graph.dims import Atom, Dim, leaves
from shoal.parallel.tensor.graph.flow import Flow
from shoal.parallel.tensor.graph.roles import Roles
from shoal.parallel.tensor.graph.trace import Call, tensors_in
from shoal.parallel.tensor.piece import Piece


def units_of(
    flow: Flow,
    roles: Roles,
    chosen: frozenset[Atom],
    taken: Callable[[Tensor], Piece | None],
    is_one: Callable[[Tensor], bool],
) -> list[tuple[Unit, frozenset[Atom]]]:
    """Returns a unit for each layer that ends a cut, each module once, with the atoms that are cut there.

    taken: the part of a tensor that a rank has; None for a whole one
    is_one: whether that is one part; results that are put behind each other have several, and are compared where they
        have gone on to be whole
    """

    def cut(dim: Dim) -> frozenset[Atom]:
        return frozenset(leaves(dim)) & chosen

    begins = [(use.op.call, cut(use.columns if use.lookup else use.rows)) for use in flow.uses]
    ends = [(use.op.call, cut(use.columns)) for use in flow.uses if not use.lookup]
    found: dict[int, Unit] = {}
    atoms: dict[int, frozenset[Atom]] = {}
    for end, its in ends:
        if not its:
            continue
        call = _around(end, [begin for begin, theirs in begins if theirs & its])
        while call is not None and (
            _takes_modules(call) or not all(map(is_one, (*_parted(call, roles).values(), *_results(call))))
        ):
            call = call.above
        if call is None:
            continue
        given, parted = tensors_in((call.args, call.kwargs)), _parted(call, roles)
        takes = [taken(each) if at in parted else None for at, each in enumerate(given)]
        gives = [taken(each) for each in _results(call)]
        judged = frozenset(at for at, each in enumerate(given) if id(each) in roles.whole)
        found[id(call)] = Unit(call, takes, gives, judged)
        atoms[id(call)] = atoms.get(id(call), frozenset()) | its
    return [(unit, atoms[key]) for key, unit in found.items()]


def _takes_modules(call: Call) -> bool:
    """Returns whether a call is given modules: by itself it would run with those of the model, not with copies."""
    return any(isinstance(each, nn.Module) for each in tree_leaves((call.args, call.kwargs)))


def _parted(call: Call, roles: Roles) -> dict[int, Tensor]:
    """The arguments of which a rank has a part before the call, by place."""
    sliced, given = roles.sliced.get(call.name, {}), tensors_in((call.args, call.kwargs))
    return {at: each for at, each in enumerate(given) if id(each) in roles.parts and at not in sliced}


def _results(call: Call) -> list[Tensor]:
    return [each for each in tensors_in(call.result) if each.is_floating_point()]


def _around(end: Call, begins: list[Call]) -> Call | None:
    """Returns the innermost call that holds `end` and one of `begins`."""
    call: Call | None = end
    while call is not None and not any(begin.inside(call) for begin in begins):
        call = call.above
    return call
