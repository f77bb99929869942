"""Finds how the layers of a model can be cut from its own graph, where no rules are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.module.build import Built
from shoal.module.printed import printed
from shoal.module.record import has_values
from shoal.parallel.layout import Layout
from shoal.parallel.tensor.graph.confirm import Unit, differs
from shoal.parallel.tensor.graph.dims import Atom, Dim, leaves, mask, resolve, stretches
from shoal.parallel.tensor.graph.draws import draws_of
from shoal.parallel.tensor.graph.flow import Flow
from shoal.parallel.tensor.graph.found import Found, Parts
from shoal.parallel.tensor.graph.inputs import traced
from shoal.parallel.tensor.graph.local import Local
from shoal.parallel.tensor.graph.roles import Roles
from shoal.parallel.tensor.graph.select import Pinned, followed, selected
from shoal.parallel.tensor.graph.trace import Trace, fake_mode, goes_on_elsewhere
from shoal.parallel.tensor.graph.units import units_of
from shoal.parallel.tensor.piece import Piece
from shoal.parallel.tensor.region import Region
from shoal.parallel.tensor.slicing import cut_among

UNUSED = "it is not used on the inputs on which the model was tried"


def found_in(
    module: nn.Module,
    ranks: int,
    stays_whole: Callable[[str], bool],
    region: Region | None = None,
    wanted: Callable[[str], str | None] = lambda name: None,
) -> Found:
    """Returns how `module`, as it was built, is cut among `ranks`; what is found nothing for stays whole.

    stays_whole: says of a module's name that its parameters are not to be cut
    region: of the ranks that confirm it together, each with its part; None: it is not confirmed
    wanted: how a layer is to be cut, if that can be, before all others: "column", "row" or "vocabulary"
    """
    mode = fake_mode(module)
    # a model that was built on the CPU has real buffers, which forwards write to
    real = [(each, each.clone()) for each in module.buffers() if has_values(each)]
    found = [
        _cut_of(trace, mode, ranks, stays_whole, region, wanted, _used_outside(trace.calls[0].module, module))
        for trace in traces_of("", module, mode)
    ]
    with torch.no_grad():
        for buffer, value in real:
            buffer.copy_(value)
    return _together(found)


def _used_outside(part: nn.Module, module: nn.Module) -> set[int]:
    """Ids of the parameters of `part` that other modules of `module` have too, of which its trace does not know."""
    inside = {id(each) for each in part.modules()}
    others = (each for each in module.modules() if id(each) not in inside)
    return {id(parameter) for each in others for parameter in each.parameters(recurse=False)}


def traces_of(name: str, module: nn.Module, mode: FakeTensorMode, fail: set[str] | None = None) -> Iterator[Trace]:
    """Yields a trace of `module`, or of the parts of it that run by themselves, if it does not, or in part alone.
    `fail`: those that were found not to, as those that are like them do not either."""
    if not any(True for _ in module.parameters()) or not list(module.children()):
        return
    fail = set() if fail is None else fail
    shapes = [(key, tuple(each.shape), each.dtype) for key, each in module.named_parameters()]
    looks = repr((type(module), printed(module), shapes))
    whole = None if looks in fail else traced(name, module, mode)
    if whole is not None and not goes_on_elsewhere(whole):
        yield whole
        return
    fail.add(looks)
    for key, child in module.named_children():
        yield from traces_of(f"{name}.{key}".lstrip("."), child, mode, fail)


def _cut_of(
    trace: Trace,
    mode: FakeTensorMode,
    ranks: int,
    stays_whole: Callable[[str], bool],
    region: Region | None,
    wanted: Callable[[str], str | None],
    outside: set[int],
) -> Found:
    root = trace.calls[0]
    parameters = list(root.module.parameters())
    flow = followed(trace, parameters, root.name == "")
    whole = outside | {
        id(each)
        for name, owner in root.module.named_modules()
        if stays_whole(f"{root.name}.{name}".strip("."))
        for each in owner.parameters(recurse=False)
    }
    whole |= flow.parameters.keys() - flow.used  # what their module does with them is not known
    local, verdicts = Local(flow, mode, ranks), dict[str, str]()

    def fits(roles: Roles, chosen: frozenset[Atom]) -> dict[Atom, str]:
        wrong = _unequal(flow, roles, chosen, ranks) or local.fits(roles, chosen)
        if not wrong and region is not None:
            found = _Describing(flow, roles, chosen, ranks)
            wrong = _unconfirmed(found.units(), found.found(local, {}), region, verdicts)
        return wrong

    chosen, roles, bad = selected(flow, ranks, whole, _pinned(flow, wanted), fits)
    return _Describing(flow, roles, chosen, ranks).found(local, bad)


def _pinned(flow: Flow, wanted: Callable[[str], str | None]) -> Pinned:
    """Returns the atoms that are to be cut, and those that are not, so that layers are cut as they are `wanted`."""
    cut, others = set[Atom](), set[Atom]()
    for use in flow.uses:
        what = wanted(use.op.call.name)
        if what is not None:
            mine, its = (use.columns, use.rows) if what == "row" else (use.rows, use.columns)
            cut |= set(leaves(mine))
            others |= set(leaves(its))
    return Pinned(frozenset(cut), frozenset(others - cut))


def _unconfirmed(
    units: Sequence[tuple[Unit, frozenset[Atom]]], found: Found, region: Region, verdicts: dict[str, str]
) -> dict[Atom, str]:
    """Returns the atoms of modules that compute something else with parts than whole; `verdicts` are those so far."""

    def cutter(name: str, built: Built, region: Region) -> tuple[nn.Module, Mapping[str, Layout]]:
        inner = found.within(name)
        sliced = cut_among(built, region, inner.rules, found=inner)
        return sliced.built.module, sliced.layouts

    wrong: dict[Atom, str] = {}
    for unit, atoms in units:
        key = f"{unit.signature} {found.within(unit.call.name)}"
        if key not in verdicts:
            verdicts[key] = differs(unit, region, cutter, any(found.within(unit.call.name).patches.values()))
        wrong |= dict.fromkeys(atoms, verdicts[key]) if verdicts[key] else {}
    return wrong


def _unequal(flow: Flow, roles: Roles, chosen: frozenset[Atom], ranks: int) -> dict[Atom, str]:
    """Returns the atoms of parameters that ranks would have partly alike, and of arguments of which none can be
    taken."""
    for parameter in flow.parameters.values():
        for dim in flow.dims(parameter):
            here = frozenset(leaves(dim)) & chosen
            if here and not (np.sum([mask(dim, here, ranks, rank) for rank in range(ranks)], axis=0) == 1).all():
                return dict.fromkeys(here, "some rows of a layer stay whole beside others that are cut")
    for places in roles.sliced.values():
        for tensor in places.values():
            for dim in flow.dims(tensor):
                here = frozenset(leaves(dim)) & chosen
                if here and _piece(0, dim, chosen) is None:
                    return dict.fromkeys(here, "an argument has parts of several tensors")
    return _odd_draws(flow, chosen)


def _odd_draws(flow: Flow, chosen: frozenset[Atom]) -> dict[Atom, str]:
    """Returns the atoms of tensors from which is dropped, where it is not known of which part each draw is."""
    orders, odd = draws_of(flow.trace, lambda tensor: bool(_atoms(flow, chosen, tensor)))
    for name, calls in orders.items():
        pieces = [[_drawn(flow, tensor, chosen) for tensor in order] for order in calls]
        if name in odd or any(order != pieces[0] for order in pieces) or any(None in order for order in pieces):
            atoms = [_atoms(flow, chosen, tensor) for order in calls for tensor in order if tensor is not None]
            return dict.fromkeys(frozenset[Atom]().union(*atoms), f"{name} drops elements of several dims")
    return {}


def _atoms(flow: Flow, chosen: frozenset[Atom], tensor: Tensor) -> frozenset[Atom]:
    return frozenset(leaf for dim in flow.dims(tensor) for leaf in leaves(dim)) & chosen


def _drawn(flow: Flow, tensor: Tensor | None, chosen: frozenset[Atom]) -> Piece | str | None:
    """Returns the part of a tensor from which is dropped; "" if it is whole, None if the part is none of one dim."""
    if tensor is None:
        return ""
    return next(_pieces(flow.dims(tensor), chosen), None)


def _pieces(dims: Sequence[Dim], chosen: frozenset[Atom]) -> Iterator[Piece]:
    """Yields the parts of the dims of a tensor, counted from the last: what is traced by itself may have been given
    more of those before it, or fewer, than the model gives it."""
    return filter(None, (_piece(at - len(dims), dim, chosen) for at, dim in enumerate(dims)))


def _piece(at: int, dim: Dim, chosen: frozenset[Atom]) -> Piece | None:
    """Returns the part of a dim of which one atom is cut; None if it is not one factor of the dim."""
    atoms = resolve(dim)
    places = [place for place, atom in enumerate(atoms) if atom in chosen]
    if len(places) != 1:
        return None
    inner = 1
    for atom in atoms[places[0] + 1 :]:
        inner *= atom.size
    return Piece(at, atoms[places[0]].size, inner if places[0] else None)


class _Describing:
    """Puts what was found of a trace into plain data."""

    def __init__(self, flow: Flow, roles: Roles, chosen: frozenset[Atom], ranks: int) -> None:
        self._flow, self._roles, self._chosen, self._ranks = flow, roles, chosen, ranks

    def found(self, local: Local, bad: dict[Atom, str]) -> Found:
        root, roles = self._flow.trace.calls[0], self._roles
        every = root.module.named_parameters(remove_duplicate=False)
        named = [(f"{root.name}.{name}".lstrip("."), each) for name, each in every]
        parts = {name: self._parts(each) for name, each in named if self._cuts(each)}
        modules = {f"{root.name}.{name}".strip("."): each for name, each in root.module.named_modules()}
        return Found(
            dict(roles.kinds),
            parts,
            local.patches,
            {name: frozenset(each) for name, each in roles.inside.items()},
            sorted(roles.entered),
            {
                name: {place: self._taken(tensor) for place, tensor in places.items()}
                for name, places in roles.sliced.items()
            },
            {
                name: {each: self._parts(_buffer(modules[name], each)) for each in sorted(buffers)}
                for name, buffers in roles.buffers.items()
            },
            self._whole(bad),
            self._draws(),
            *(roles.gives, roles.crossed),
        )

    def units(self) -> list[tuple[Unit, frozenset[Atom]]]:
        def taken(tensor: Tensor) -> Piece | None:
            return self._taken(tensor) if self._cuts(tensor) else None

        def is_one(tensor: Tensor) -> bool:
            return not self._cuts(tensor) or _drawn(self._flow, tensor, self._chosen) is not None

        return units_of(self._flow, self._roles, self._chosen, taken, is_one)

    def _draws(self) -> dict[str, tuple[Piece | None, ...]]:
        orders, _ = draws_of(self._flow.trace, self._cuts)
        return {
            name: tuple(None if tensor is None else self._taken(tensor) for tensor in calls[0])
            for name, calls in orders.items()
            if self._roles.kinds.get(name) != "multihead"
        }

    def _cuts(self, tensor: Tensor) -> bool:
        return any(leaf in self._chosen for dim in self._flow.dims(tensor) for leaf in leaves(dim))

    def _parts(self, tensor: Tensor) -> Parts:
        dims = self._flow.dims(tensor)
        at = next(at for at, dim in enumerate(dims) if any(leaf in self._chosen for leaf in leaves(dim)))
        by_rank = (stretches(mask(dims[at], self._chosen, self._ranks, rank)) for rank in range(self._ranks))
        return at, tuple(tuple(each) for each in by_rank)

    def _taken(self, tensor: Tensor) -> Piece:
        return next(_pieces(self._flow.dims(tensor), self._chosen))

    def _whole(self, bad: dict[Atom, str]) -> dict[str, str]:
        """Returns why layers that are products stay whole."""
        found: dict[str, str] = {}
        for use in self._flow.uses:
            name = use.op.call.name
            if name in self._roles.kinds or self._cuts(use.weight):
                continue
            why = [bad[leaf] for dim in (use.rows, use.columns) for leaf in leaves(dim) if leaf in bad]
            why += [f"{leaf.blocked} needs all of it" for leaf in leaves(use.rows) if leaf.blocked]
            if why:
                found.setdefault(name, why[0])
        root = self._flow.trace.calls[0]
        for name, owner in root.module.named_modules():
            own = [id(each) for each in owner.parameters(recurse=False)]
            if own and self._flow.used.isdisjoint(own):
                found[f"{root.name}.{name}".strip(".")] = UNUSED
        return found


def _buffer(module: nn.Module, name: str) -> Tensor:
    found = module._buffers[name]
    assert found is not None
    return found


def _together(found: Sequence[Found]) -> Found:
    """Joins what was found of several parts of a model."""

    def joined(of: Sequence[Any]) -> Any:
        if isinstance(of[0], Mapping):
            return {name: value for each in of for name, value in each.items()}
        return [name for each in of for name in each]

    names = [each.name for each in fields(Found)]
    return Found(**{name: joined([getattr(each, name) for each in found]) for name in names}) if found else Found()
