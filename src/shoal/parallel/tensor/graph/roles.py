"""What each module has to do where some atoms are cut: how products, lookups and elementwise operations of a trace come
out on a rank that has a part of these atoms, and where gradients have to be summed over the ranks.

A tensor is cut if it has one of the atoms, else every rank has all of it. A product with a weight whose rows are cut
takes a whole input (`column`), one whose columns are cut gives a sum (`row`). A whole tensor that meets a cut one has
the gradient of a part on every rank: these are summed where the tensor comes out of a layer (`entered`), or, of a
parameter, where it is used (`inside`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from shoal.parallel.tensor.graph.dims import Atom, leaves
from shoal.parallel.tensor.graph.flow import Flow, Use
from shoal.parallel.tensor.graph.owners import owner
from shoal.parallel.tensor.graph.trace import Call, Op, tensors_in

FULL, PARTIAL = 1, 2
_NEW = frozenset(["new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "scalar_tensor"])


@dataclass
class Roles:
    """What modules become, by name.

    kinds: "column", "row", "head", "vocabulary" or "multihead"
    inside: the names of parameters that all ranks have and use differently, by module
    entered: modules whose output enters the region
    sliced: places of arguments of which a rank takes its part: (index of the tensor among all, the tensor), by module
    buffers: buffers of which a rank uses its part, by module
    zones: calls in which operations work on cut tensors
    whole: ids of the tensors that have gradients, which are the same on every rank or those of its part
    parts: ids of the tensors that are cut because they are computed from parts of parameters
    gives: modules of which something cut comes out
    crossed: modules into which, or out of which, something goes that has the gradient of a part on each rank
    bad: atoms that cannot be cut after all, and why
    """

    kinds: dict[str, str] = field(default_factory=dict)
    inside: dict[str, set[str]] = field(default_factory=dict)
    entered: set[str] = field(default_factory=set)
    sliced: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    buffers: dict[str, set[str]] = field(default_factory=dict)
    zones: list[Call] = field(default_factory=list)
    parts: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    gives: set[str] = field(default_factory=set)
    crossed: set[str] = field(default_factory=set)
    bad: dict[Atom, str] = field(default_factory=dict)


def roles_of(flow: Flow, chosen: frozenset[Atom]) -> Roles:
    """Returns what modules have to do so that the `chosen` atoms are cut, and which of them cannot be."""
    return _Finding(flow, chosen).run()


class _Finding:
    def __init__(self, flow: Flow, chosen: frozenset[Atom]) -> None:
        self._flow, self._chosen, self.roles = flow, chosen, Roles()
        self._cut: dict[int, frozenset[Atom]] = {}
        self._made: dict[int, Op] = {}
        self._uses = {id(use.op): use for use in flow.uses}
        self._states: dict[int, int] = {}
        self._met: dict[int, frozenset[Atom]] = {}  # what tensors with gradients of a part meet
        self._grads = {key for key, each in flow.parameters.items() if each.requires_grad}
        self._entered: dict[str, frozenset[Atom]] = {}
        self._results: dict[int, list[Call]] = {}
        for call in flow.trace.calls:
            for tensor in tensors_in(call.result):
                self._results.setdefault(id(tensor), []).append(call)

    def run(self) -> Roles:
        for op in self._flow.trace.ops:
            self._forward(op)
        root = self._flow.trace.calls[0]
        for tensor in tensors_in(root.result):
            self._bad(self.cut(tensor), "it reaches the end of the model")
            self._states[id(tensor)] = FULL
        for op in reversed(self._flow.trace.ops):
            self._backward(op)
        for call in self._flow.trace.calls:
            if call.name in self.roles.entered and self._states.get(id(call.result)) not in (None, PARTIAL):
                self._bad(self._entered[call.name], f"{call.name} is used on whole and on cut tensors")
        for op in self._flow.trace.ops:
            self._crossings(op)
        self.roles.whole = {key for key in self._grads if self._states.get(key) != PARTIAL}
        return self.roles

    def cut(self, tensor: Tensor) -> frozenset[Atom]:
        """Returns the chosen atoms that a tensor has."""
        if id(tensor) not in self._cut:
            self._cut[id(tensor)] = self._flow.atoms(tensor) & self._chosen
        return self._cut[id(tensor)]

    def _bad(self, atoms: frozenset[Atom], why: str) -> None:
        for atom in atoms:
            self.roles.bad.setdefault(atom, why)

    # forward: how operations come out

    def _forward(self, op: Op) -> None:
        for result in op.outputs:
            if not any(result is each for each in op.inputs):  # `x.to(dtype)` may give x itself
                self._made.setdefault(id(result), op)
            if result.is_floating_point() and op.name != "detach" and any(id(x) in self._grads for x in op.inputs):
                self._grads.add(id(result))
        use = self._uses.get(id(op))
        if use is not None:
            self._used(use)
            return
        before = frozenset[Atom]().union(*map(self.cut, op.inputs))
        after = frozenset[Atom]().union(*map(self.cut, op.outputs))
        if before and not after and op.name not in _NEW:
            self._bad(before, f"{op.name} needs all of it")
        if after and any(id(x) in self.roles.parts or self._is_parameter(x) for x in op.inputs if self.cut(x)):
            self.roles.parts.update(id(x) for x in op.outputs)
            self._zone(op.call)
            for each in op.inputs:
                if self.cut(each) and id(each) not in self.roles.parts and not self._is_parameter(each):
                    self._slice(each, op.call)

    def _is_parameter(self, tensor: Tensor) -> bool:
        return id(tensor) in self._flow.parameters

    def _zone(self, call: Call) -> None:
        if not any(each is call for each in self.roles.zones):
            self.roles.zones.append(call)

    def _used(self, use: Use) -> None:
        rows, columns = (frozenset(leaves(dim)) & self._chosen for dim in (use.rows, use.columns))
        x, op = self.cut(use.x), use.op
        if use.lookup:
            if rows:
                self._become(use, rows, "vocabulary")
            elif columns:
                self.roles.parts.add(id(op.result))
                self._zone(op.call)
        elif rows and x:
            self._bad(rows | x, f"{op.call.name} has inputs that are cut")
        elif rows:
            kind = "head" if id(op) in self._flow.heads else "column"
            self._become(use, rows, kind)
            if kind == "column":
                self.roles.parts.add(id(op.result))
                self._zone(op.call)
        elif columns:
            if id(use.x) not in self.roles.parts:
                self._bad(columns, f"{op.call.name} has inputs that every rank has")
            if self.cut(op.result):
                self._bad(columns | self.cut(op.result), f"{op.call.name} has outputs that are cut too")
            self._become(use, columns, "row")
            self._zone(op.call)
        elif x:
            self.roles.parts.add(id(op.result))
            self._zone(op.call)

    def _become(self, use: Use, atoms: frozenset[Atom], kind: str) -> None:
        name, module = use.op.call.name, use.op.call.module
        what = owner(use, kind)
        if what is None or self.roles.kinds.setdefault(name, what) != what:
            self._bad(atoms, f"{name or 'the model'} ({type(module).__name__}) does more than a product")

    def _slice(self, tensor: Tensor, call: Call) -> None:
        """Has a tensor that every rank has whole, and that meets cut ones in `call`, cut where it comes in."""
        made = self._made.get(id(tensor))
        if made is not None and not made.call.inside(call) and any(made.call is zone for zone in self.roles.zones):
            self.roles.parts.add(id(tensor))  # made where sizes are those of a rank
            return
        given = list(tensors_in((call.args, call.kwargs)))
        place = next((at for at, each in enumerate(given) if each is tensor), None)
        if place is not None:
            self.roles.sliced.setdefault(call.name, {})[place] = tensor
        elif made is not None and made.call.inside(call):
            for each in made.inputs:
                if self.cut(each):
                    self._slice(each, call)
        else:
            named = [name for name, each in call.module._buffers.items() if each is tensor]
            if not named:
                self._bad(self.cut(tensor), f"{call.name or 'the model'} meets something that every rank has")
            self.roles.buffers.setdefault(call.name, set()).update(named)

    def _crossings(self, op: Op) -> None:
        """Notes the modules of which `op` takes a part, and those between which a tensor goes that has the gradient of
        a part."""
        for each in op.inputs:
            made = self._made.get(id(each))
            if made is None or made.call is op.call:
                continue
            if id(each) in self.roles.parts:
                self.roles.gives |= _left(made.call, op.call)
            elif self._states.get(id(each), 0) & PARTIAL:
                self.roles.crossed |= _left(made.call, op.call) | _left(op.call, made.call)

    # backward: where gradients are those of a part

    def _backward(self, op: Op) -> None:
        state, met = 0, frozenset[Atom]().union(*map(self.cut, op.outputs))
        cut = bool(met)
        for each in op.outputs:
            if not self.cut(each):
                its, theirs = self._leave_layer(each, op)
                state |= its
                met |= theirs
        use = self._uses.get(id(op))
        for each in op.inputs:
            if id(each) not in self._grads or self.cut(each):
                continue
            entered = use is not None and each is use.x and op.call.name in self.roles.kinds
            what = FULL if entered else PARTIAL if cut else state
            if self._is_parameter(each):
                self._of_parameter(each, op, what, met)
                continue
            self._states[id(each)] = self._states.get(id(each), 0) | what
            if what & PARTIAL:
                self._met[id(each)] = self._met.get(id(each), frozenset()) | met

    def _leave_layer(self, tensor: Tensor, op: Op) -> tuple[int, frozenset[Atom]]:
        """Returns how complete the gradient of `op` for a result is, after it is summed at the end of a layer, and what
        it meets on the way."""
        state, met = self._states.get(id(tensor), 0), self._met.get(id(tensor), frozenset())
        if state == FULL | PARTIAL:
            self._bad(met, f"{op.call.name or 'the model'} gives what is used whole and cut")
        calls = self._results.get(id(tensor), [])
        layer = next((call for call in calls if not isinstance(call.result, tuple | list | dict)), None)
        if state == PARTIAL and layer is not None and layer.name and layer.result is tensor:
            self.roles.entered.add(layer.name)
            self._entered[layer.name] = self._entered.get(layer.name, frozenset()) | met
            return FULL, frozenset()
        return state, met

    def _of_parameter(self, parameter: Tensor, op: Op, state: int, met: frozenset[Atom]) -> None:
        if not state & PARTIAL:
            return
        own = [name for name, each in op.call.module._parameters.items() if each is parameter]
        if not own or state != PARTIAL:
            self._bad(met, f"{op.call.name or 'the model'} uses a parameter on whole and on cut tensors")
            return
        self.roles.inside.setdefault(op.call.name, set()).update(own)


def _left(call: Call, other: Call) -> set[str]:
    """Returns the modules of `call`, and of those around it, inside of which `other` is not."""
    names, each = set[str](), call
    while each.above is not None and not other.inside(each):
        names.add(each.name)
        each = each.above
    return names
