"""Chooses the atoms along which the layers of a traced module are cut: as many parameters as can be, each along one
dim."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import combinations

from torch import Tensor

from shoal.parallel.tensor.graph.dims import Atom, block, leaves, resolve
from shoal.parallel.tensor.graph.flow import Flow, Handler
from shoal.parallel.tensor.graph.products import PRODUCTS
from shoal.parallel.tensor.graph.roles import Roles, roles_of
from shoal.parallel.tensor.graph.trace import Op, Trace, tensors_in
from shoal.parallel.tensor.graph.views import VIEWS

HANDLERS: dict[str, Handler] = {**VIEWS, **PRODUCTS}
LEAST = 0.01
"""Share of all parameters from which on an embedding or a head is worth the sum of its outputs."""
_EXACT = 14
"""Atoms that exclude each other of which all choices are tried."""


@dataclass(frozen=True)
class Pinned:
    """Atoms that are cut before all others, and those that are not."""

    cut: frozenset[Atom] = frozenset()
    others: frozenset[Atom] = frozenset()


def followed(trace: Trace, parameters: Sequence[Tensor], to_the_end: bool) -> Flow:
    """Follows the dims through `trace`; if it goes to the end of the model, its last layers may keep outputs cut."""
    heads: list[Op] = _heads(Flow(trace, parameters, HANDLERS), parameters) if to_the_end else []
    flow = Flow(trace, parameters, HANDLERS, frozenset(map(id, heads)))
    root = trace.calls[0]
    for tensor in tensors_in((root.args, root.kwargs)):
        for dim in flow.dims(tensor):
            block(dim, "an input of the model")
    return flow


def _heads(flow: Flow, parameters: Sequence[Tensor]) -> list[Op]:
    """Returns the products behind which no parameter is used, of weights that are large or also looked up."""
    after: set[int] = set()  # tensors behind which parameters are used
    uses = {id(use.op): use for use in flow.uses}
    looked_up = {id(use.weight) for use in flow.uses if use.lookup}
    whole, found = sum(each.numel() for each in parameters), []
    for op in reversed(flow.trace.ops):
        inputs = op.inputs
        use = uses.get(id(op))
        last = not any(id(each) in after for each in op.outputs)
        if use is not None and not use.lookup and last and use.weight.dim() == 2:
            large = use.weight.numel() >= LEAST * whole and use.weight.shape[0] > 1
            if large or id(use.weight) in looked_up:
                found.append(op)
        if not last or any(id(each) in flow.parameters for each in inputs):
            after.update(id(each) for each in inputs)
    return found


def selected(
    flow: Flow,
    ranks: int,
    whole: Collection[int],
    pinned: Pinned,
    fits: Callable[[Roles, frozenset[Atom]], dict[Atom, str]],
) -> tuple[frozenset[Atom], Roles, dict[Atom, str]]:
    """Returns the atoms to cut among `ranks`, what modules have to do for them, and why other atoms cannot be cut.

    whole: ids of parameters that stay whole; `pinned`: atoms about which a user has decided
    fits: tries the modules with their parts, and returns the atoms for which they do not run, and why
    """
    bad: dict[Atom, str] = {}
    beside = _beside(flow)
    while True:
        weights = _candidates(flow, ranks, whole, pinned, bad)
        chosen = frozenset(_independent(weights, _conflicts(beside, weights)))
        roles = roles_of(flow, chosen)
        wrong = dict(roles.bad) or (fits(roles, chosen) if chosen else {})
        if not wrong:
            return chosen, roles, bad
        bad |= wrong


def _candidates(
    flow: Flow, ranks: int, whole: Collection[int], pinned: Pinned, bad: Collection[Atom]
) -> dict[Atom, int]:
    """Returns the atoms that may be cut, with the number of elements of the parameters that have them."""
    weights: dict[Atom, int] = {}
    used = {id(use.weight) for use in flow.uses}
    total = sum(each.numel() for each in flow.parameters.values())
    products = {id(use.weight) for use in flow.uses if not use.lookup}
    refused: set[Atom] = set()
    uneven = _vocabularies(flow)
    for key, parameter in flow.parameters.items():
        here = dict.fromkeys(leaf for dim in flow.dims(parameter) for leaf in leaves(dim))  # alike on all ranks
        if key in whole:
            refused.update(here)
        for atom in here:
            if (
                atom in pinned.others
                or atom.blocked
                or atom in bad
                or atom.size < ranks
                or (atom.size % ranks and atom not in uneven)
            ):
                continue
            alone = key in used and key not in products
            small = alone and parameter.numel() < LEAST * total and atom in set(leaves(flow.dims(parameter)[0]))
            if small and atom not in pinned.cut:
                continue  # a table that is only looked up
            weights[atom] = weights.get(atom, 0) + parameter.numel() + (total if atom in pinned.cut else 0)
    return {atom: weight for atom, weight in weights.items() if atom not in refused}


def _vocabularies(flow: Flow) -> set[Atom]:
    """Returns the atoms of rows that are looked up, or make logits, and nothing else: these need not be cut evenly."""
    found: set[Atom] = set()
    for use in flow.uses:
        if use.lookup or id(use.op) in flow.heads:
            found.update(leaves(use.rows))
    others = [use.columns for use in flow.uses]
    others += [use.rows for use in flow.uses if not use.lookup and id(use.op) not in flow.heads]
    return found.difference(leaf for dim in others for leaf in leaves(dim))


def _beside(flow: Flow) -> list[list[Atom]]:
    """Returns the atoms that tensors have beside each other, each such list once: as often as they have them."""
    for parameter in flow.parameters.values():
        flow.dims(parameter)
    found: dict[tuple[int, ...], list[Atom]] = {}
    for dims in flow.of.values():
        factors = [{*leaves([factor])} for dim in dims for factor in resolve(dim)]
        places = [leaf for factor in factors for leaf in factor]  # the parts of a sum may be one atom
        found.setdefault(tuple(sorted(map(id, places))), places)
    return [*found.values()]


def _conflicts(beside: Sequence[Sequence[Atom]], atoms: Collection[Atom]) -> dict[Atom, set[Atom]]:
    """Returns, for each atom, those that some tensor has beside it; itself if a tensor has it twice."""
    found: dict[Atom, set[Atom]] = {atom: set() for atom in atoms}
    for each in beside:
        places = [atom for atom in each if atom in found]
        if len(places) > 1:
            for at, atom in enumerate(places):
                found[atom].update(places[:at] + places[at + 1 :])
    return found


def _independent(weights: dict[Atom, int], conflicts: dict[Atom, set[Atom]]) -> list[Atom]:
    """Returns atoms of which no two exclude each other, of the largest weight: exactly where few hang together."""
    left = [atom for atom in weights if atom not in conflicts[atom]]
    found: list[Atom] = []
    while left:
        group, waiting = [left[0]], [left[0]]
        while waiting:
            near = [each for each in left if each in conflicts[waiting[-1]] and each not in group]
            waiting.pop()
            group += near
            waiting += near
        left = [each for each in left if each not in group]
        found += _best(group, weights, conflicts)
    return found


def _best(group: list[Atom], weights: dict[Atom, int], conflicts: dict[Atom, set[Atom]]) -> list[Atom]:
    if len(group) > _EXACT:
        taken: list[Atom] = []
        for atom in sorted(group, key=lambda each: -weights[each] / (1 + len(conflicts[each] & set(group)))):
            if not conflicts[atom] & set(taken):
                taken.append(atom)
        return taken
    best: list[Atom] = []
    for number in range(1, len(group) + 1):
        for some in combinations(group, number):
            if any(one in conflicts[other] for one, other in combinations(some, 2)):
                continue
            if sum(weights[each] for each in some) > sum(weights[each] for each in best):
                best = list(some)
    return best
