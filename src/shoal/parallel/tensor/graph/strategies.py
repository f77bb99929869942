"""In which ways one operation of a trace may be computed by the ranks along one axis, each a part: found from what
`products` and `views` say of its dims, for this operation alone.

An atom of its dims that nothing blocks may be cut. What has the atom is a part on each rank, what lacks it is whole; a
product that sums over it gives summands. The gradient of an input lies as the input does, but for a whole input beside
parts: its gradients are summands. So backward is tied to forward: it is the same cut, with the dual placements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.parallel.tensor.graph.dims import Atom, Dim, leaves, mask, resolve, stretches
from shoal.parallel.tensor.graph.flow import Flow, Handler, Use
from shoal.parallel.tensor.graph.trace import Op, Trace, tensors_in
from shoal.parallel.tensor.graph.views import VIEWS

_LINEAR = frozenset(["add", "add_", "sub", "sub_", "__iadd__", "to", "float", "neg", "type_as"])
"""Operations besides views that give the sum of what they give of summands, where all inputs are summands."""
_SCALED = frozenset(["mul", "mul_", "div", "div_"])
"""Operations that pass summands on where the other factor is a number."""


@dataclass(frozen=True)
class Lies:
    """How ranks hold a tensor: `what` is "whole", "sum" (summands) or "cut": `dim`, of which the first rank has
    `stretches`."""

    what: str
    dim: int = -1
    stretches: tuple[tuple[int, int], ...] = ()

    @property
    def dual(self) -> Lies:
        """How its gradient lies."""
        return WHOLE if self.what == "sum" else self


WHOLE, SUM = Lies("whole"), Lies("sum")


@dataclass(frozen=True)
class Strategy:
    """A way to compute an operation.

    name: "whole", "column", "row", "vocabulary", "heads", "data", "sequence", "sum" or "part" (of anything else)
    inputs, gradients: how each of `op.inputs` lies, and the gradient that backward gives of it
    outputs: how each of `op.outputs` lies
    """

    name: str
    inputs: tuple[Lies, ...]
    gradients: tuple[Lies, ...]
    outputs: tuple[Lies, ...]

    @property
    def is_shared(self) -> bool:
        """Whether each rank does a part of the work."""
        return self.name not in ("whole", "sum")


class Ways:
    """The strategies of operations of the traced module that `flow` follows, among `ranks`.

    handlers: what operations do to dims, by their names, as those of `flow`
    """

    def __init__(self, flow: Flow, handlers: dict[str, Handler], ranks: int) -> None:
        self._flow, self._handlers, self._ranks = flow, handlers, ranks
        self._uses = {id(use.op): use for use in flow.uses}
        root = flow.trace.calls[0]
        given = [each for each in tensors_in((root.args, root.kwargs)) if each.dim()]
        self._rows = {leaf for each in given for leaf in leaves(flow.dims(each)[0])}
        of_tokens = [each for each in given if each.dim() == 3 or (each.dim() == 2 and not each.is_floating_point())]
        self._tokens = {leaf for each in of_tokens for leaf in leaves(flow.dims(each)[1])}

    def of(self, op: Op) -> list[Strategy]:
        """Returns the strategies of `op`, each once; the first is "whole"."""
        inputs, outputs = len(op.inputs), len(op.outputs)
        found = [Strategy("whole", (WHOLE,) * inputs, (WHOLE,) * inputs, (WHOLE,) * outputs)]
        if self._passes_sums(op):
            places = [SUM if each.is_floating_point() else WHOLE for each in op.inputs]
            found.append(Strategy("sum", tuple(places), (WHOLE,) * inputs, (SUM,) * outputs))
        local = self._alone(op)
        for atoms in self._choices(op, local):
            strategy = self._strategy(op, local, atoms)
            if strategy is not None and strategy not in found:
                found.append(strategy)
        return found

    def _alone(self, op: Op) -> Flow:
        """Follows `op` alone, whose inputs have dims of their own, cut into atoms as all of the trace cuts them."""
        parameters = [each for each in op.inputs if self._flow.parameter_of(each) is not None]
        local = Flow(Trace(), parameters, self._handlers)
        for each in op.inputs:
            local.of.setdefault(id(each), [_fresh(dim) for dim in self._flow.dims(each)])
        local.follow(op)
        return local

    def _choices(self, op: Op, local: Flow) -> Iterator[frozenset[Atom]]:
        """Yields the atoms that may be cut, with those that lie beside them in a dim of several tensors."""
        rows = {leaf for use in local.uses for leaf in leaves(use.rows)}
        uneven = rows if id(op) in self._flow.heads or any(use.lookup for use in local.uses) else set()
        seen: set[frozenset[Atom]] = set()

        def fits(atom: Atom) -> bool:
            return not atom.blocked and atom.size >= self._ranks and (atom.size % self._ranks == 0 or atom in uneven)

        for tensor in (*op.inputs, *op.outputs):
            for dim in local.dims(tensor):
                for factor in resolve(dim):
                    if factor.parts is None:
                        atoms = [factor]
                    else:
                        firsts = [next(filter(fits, leaves(part)), None) for part in factor.parts]
                        atoms = [each for each in firsts if each is not None]
                        if len(atoms) < len(factor.parts):
                            continue
                    chosen = frozenset(atoms)
                    if chosen not in seen and all(map(fits, atoms)):
                        seen.add(chosen)
                        yield chosen

    def _strategy(self, op: Op, local: Flow, atoms: frozenset[Atom]) -> Strategy | None:
        use = local.uses[0] if local.uses else None
        summed = use is not None and bool(atoms & set(leaves(use.rows if use.lookup else use.columns)))
        inputs = self._all(op.inputs, local, atoms)
        outputs = [SUM] * len(op.outputs) if summed else self._all(op.outputs, local, atoms)
        if inputs is None or outputs is None or not any(each != WHOLE for each in outputs):
            return None
        if any(each == WHOLE and result.is_floating_point() for each, result in zip(outputs, op.outputs, strict=True)):
            return None
        attends = op.name == "scaled_dot_product_attention"
        if attends and op.bound().get("is_causal") and inputs[0].dim == op.inputs[0].dim() - 2:
            return None  # which keys a rank's queries see is no question of a flag then
        gradients = [WHOLE if each == WHOLE and summed else SUM if each == WHOLE else each for each in inputs]
        return Strategy(self._name(op, use, atoms, local), tuple(inputs), tuple(gradients), tuple(outputs))

    def _all(self, tensors: Sequence[Tensor], local: Flow, atoms: frozenset[Atom]) -> list[Lies] | None:
        found = [self._lies(each, local, atoms) for each in tensors]
        return None if None in found else [each for each in found if each is not None]

    def _lies(self, tensor: Tensor, local: Flow, atoms: frozenset[Atom]) -> Lies | None:
        """Returns how `tensor` lies where `atoms` are cut; None where that is no cut of one dim."""
        dims = local.dims(tensor)
        cut = [at for at, dim in enumerate(dims) if atoms.intersection(leaves(dim))]
        if not cut:
            return WHOLE
        masks = [mask(dims[cut[0]], atoms, self._ranks, rank) for rank in range(self._ranks)]
        if len(cut) > 1 or not (np.sum(masks, axis=0) == 1).all():
            return None
        return Lies("cut", cut[0], tuple(stretches(masks[0])))

    def _name(self, op: Op, use: Use | None, atoms: frozenset[Atom], local: Flow) -> str:
        if use is not None and atoms & set(leaves(use.rows)):
            return "vocabulary" if use.lookup or id(op) in self._flow.heads else "column"
        if use is not None and atoms & set(leaves(use.columns)):
            return "column" if use.lookup else "row"
        for tensor in (*op.outputs, *op.inputs):
            for mine, its in zip(local.dims(tensor), self._flow.dims(tensor), strict=False):
                if atoms.intersection(leaves(mine)):
                    here = set(leaves(its))
                    if here & self._rows:
                        return "data"
                    if here & self._tokens:
                        return "sequence"
        return "heads" if op.name == "scaled_dot_product_attention" else "part"

    def _passes_sums(self, op: Op) -> bool:
        if not op.inputs or not all(each.is_floating_point() for each in op.outputs):
            return False
        if op.name in VIEWS:
            return op.name not in _NO_SUM
        tensors = sum(torch.is_tensor(each) for each in op.args)
        return (op.name in _LINEAR and len(op.args) == len(op.inputs)) or (op.name in _SCALED and tensors == 1)


_NO_SUM = {name for name in VIEWS if "pool" in name or name.startswith(("new_", "full")) or name.endswith("_like")} | {
    "pad",
    "constant_pad_nd",
    "scalar_tensor",
    "arange",
}
"""Views that are none of sums."""


def _fresh(dim: Dim) -> Dim:
    """Returns new atoms, as those of `dim` are refined."""
    return [
        Atom(atom.size, None if atom.parts is None else [_fresh(part) for part in atom.parts]) for atom in resolve(dim)
    ]
