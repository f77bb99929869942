"""Confirms a cut that was found from a graph: modules are run with parts beside whole ones, on small random inputs.

Each distinct module that holds both ends of a cut is run once before training, forward and backward, in evaluation mode
and in fp64 with weights drawn for it. The model itself, its buffers and generators are not touched. A graph does not
show a number in the mathematics (the mean over a width that the module keeps): what differs by more than rounding then
stays whole.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shoal.module.build import Built
from shoal.parallel.layout import Layout
from shoal.parallel.tensor.graph.trace import Call, tensors_in
from shoal.parallel.tensor.logits import ShardedLogits
from shoal.parallel.tensor.piece import Piece
from shoal.parallel.tensor.region import Region

CLOSE = 1e-4
"""Largest difference that counts as rounding, of the largest value: modules may compute in fp32 inside."""
_WIDE = 1 << 24
"""Parameters up to which a module is run in fp64."""


@dataclass(frozen=True)
class Unit:
    """A call of a module that holds both ends of a cut.

    takes, gives: the parts of its input tensors and of its results that a rank has; None for whole ones
    judged: places of the inputs whose gradients are compared: others have none, or are summed outside of it
    """

    call: Call
    takes: Sequence[Piece | None]
    gives: Sequence[Piece | None]
    judged: frozenset[int]

    @property
    def signature(self) -> str:
        """Says which units are alike."""
        module, given = self.call.module, tensors_in((self.call.args, self.call.kwargs))
        numbers = [
            (name, value)
            for each in module.modules()
            for name, value in each.__dict__.items()
            if isinstance(value, int | float | str) and not name.endswith(("idx", "id", "index", "number"))
        ]
        shapes = [(name, tuple(each.shape)) for name, each in module.named_parameters()]
        return repr((type(module), numbers, shapes, [tuple(each.shape) for each in given], self.takes, self.gives))


Cutter = Callable[[str, Built, Region], tuple[nn.Module, Mapping[str, Layout]]]
"""Makes of a module of some name what a rank has of it; returns it with the layouts of its parameters."""


@dataclass
class Ran:
    """Results of a module, and the gradients of its inputs and, by name, of its parameters."""

    results: list[Tensor]
    inputs: list[Tensor | None]
    parameters: dict[str, Tensor | None]


def differs(unit: Unit, region: Region, cutter: Cutter, keeps_numbers: bool) -> str:
    """Runs `unit` whole and cut, on all ranks of `region`; returns what differs, the same on all, "" if nothing does.

    Collective. A module that fails only where it is cut differs. One that does not run whole, whatever it is tried on,
    is not judged, unless it `keeps_numbers` that are others on a rank: what it does with them no shape shows.
    """
    module, seed = unit.call.module, zlib.crc32(unit.signature.encode())
    dtypes = [torch.float64] if sum(each.numel() for each in module.parameters()) <= _WIDE else []
    for dtype, positive in itertools.product((*dtypes, torch.float32), (False, True)):
        draw, whole = torch.Generator().manual_seed(seed), _copy(module)
        _fill(whole, draw, dtype, positive)
        drawn = partial(_drawn, draw=draw, dtype=dtype)
        given = tree_map_only(Tensor, drawn, (unit.call.args, unit.call.kwargs))
        try:
            wanted = _run(whole, given, None, unit, seed)
        except Exception:  # whatever a module raises on inputs that it was not made for
            continue
        if all(each.isfinite().all() for each in wanted.results):
            return _compared(unit, region, cutter, whole, given, wanted)
    return f"{unit.call.name or 'the model'} does not run on what it could be tried on" if keeps_numbers else ""


def _compared(unit: Unit, region: Region, cutter: Cutter, whole: nn.Module, given: Any, wanted: Ran) -> str:
    """Runs `unit` with the parts of the values of `whole`, which has given what is `wanted`; returns what differs."""
    seed = zlib.crc32(unit.signature.encode())
    cut, layouts = cutter(unit.call.name, Built(_copy(unit.call.module), lambda key, tensor: tensor, "given"), region)
    _take_parts(cut, whole, layouts)
    try:
        worst, what = _worst(wanted, _run(cut, given, region, unit, seed), unit, layouts, region)
    except Exception as error:
        worst, what = 1e30, f"{type(error).__name__}: {error}"
    worst = float(region.group.all_reduce(torch.tensor(worst, dtype=torch.float64), "max", "confirm"))
    what = what or "on another rank"
    return (
        "" if worst <= CLOSE else f"{unit.call.name or 'the model'} gives other numbers with a part than whole ({what})"
    )


def _copy(module: nn.Module) -> nn.Module:
    """Returns a copy of a module that shares its tensors, and runs in evaluation mode."""
    tensors = (*module.parameters(), *module.buffers())
    copied = deepcopy(module, {id(each): each for each in tensors})
    copied.eval()  # which one that has a `train` of its own need not return
    return copied


def _fill(module: nn.Module, draw: torch.Generator, dtype: torch.dtype, positive: bool) -> None:
    """Gives the parameters and buffers of a copy values of its own, small enough that nothing overflows; `positive`
    ones, of which there are roots and logarithms."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for key, each in owner._parameters.items():
            if each is not None and id(each) not in made:
                value = torch.randn(each.shape, generator=draw, dtype=dtype)
                value = value / max(1, each.shape[1:].numel()) ** 0.5 if each.dim() > 1 else 1 + value / 4
                value = value.abs() if positive else value
                made[id(each)] = nn.Parameter(value, requires_grad=each.requires_grad)
            if each is not None:
                owner._parameters[key] = made[id(each)]
        owner._buffers.update(
            {key: _drawn(each, draw, dtype) for key, each in owner._buffers.items() if each is not None}
        )


def _drawn(like: Tensor, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Returns a tensor of the shape and kind of `like`: positive numbers, ids of 0, masks that let all through."""
    if like.is_floating_point():
        return torch.rand(like.shape, generator=draw, dtype=dtype) + 0.1
    return (
        torch.ones(like.shape, dtype=like.dtype)
        if like.dtype == torch.bool
        else torch.zeros(like.shape, dtype=like.dtype)
    )


def _take_parts(cut: nn.Module, whole: nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Gives a cut copy the values of a whole one, of each parameter the part that a rank has."""
    values = dict(whole.named_parameters(remove_duplicate=False))
    made: dict[int, nn.Parameter] = {}
    for name, layout in layouts.items():
        before = cut.get_parameter(name)
        own = layout.own_part(values[name].detach()).clone()
        made[id(before)] = nn.Parameter(own, requires_grad=before.requires_grad)
    for name, owner in cut.named_modules():
        owner._parameters.update({key: made[id(each)] for key, each in owner._parameters.items() if each is not None})
        theirs = whole.get_submodule(name)._buffers
        owner._buffers.update({key: each if each is None else each.clone() for key, each in theirs.items()})


def _run(module: nn.Module, given: Any, region: Region | None, unit: Unit, seed: int) -> Ran:
    """Runs a module forward and backward; of a `region` with parts of what comes in and goes out."""
    whole, draw = tensors_in(given), torch.Generator().manual_seed(seed)
    own = [
        _leaf(each if piece is None or region is None else piece.of(each, region.rank, region.size))
        for each, piece in zip(whole, unit.takes, strict=True)
    ]
    by_whole = {id(each): part for each, part in zip(whole, own, strict=True)}
    args, kwargs = tree_map_only(Tensor, lambda each: by_whole[id(each)], given)
    results = [each for each in tensors_in(_gathered(module(*args, **kwargs))) if each.is_floating_point()]
    total = torch.zeros((), dtype=torch.float64)
    for result, piece in zip(results, unit.gives, strict=True):
        shape = list(result.shape)
        if piece is not None and region is not None:
            shape[piece.dim] *= region.size
        weights = torch.randn(shape, generator=draw, dtype=torch.float64)
        if piece is not None and region is not None:
            weights = piece.of(weights, region.rank, region.size)
        total = total + (result * weights).sum()
    total.backward()
    return Ran(
        [each.detach() for each in results],
        [each.grad for each in own],
        {name: each.grad for name, each in module.named_parameters() if each.requires_grad},
    )


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point())


def _gathered(result: Any) -> Any:
    if isinstance(result, ShardedLogits):
        return result.whole()
    if isinstance(result, Mapping):
        return {key: _gathered(each) for key, each in result.items()}
    return result


def _worst(wanted: Ran, found: Ran, unit: Unit, layouts: Mapping[str, Layout], region: Region) -> tuple[float, str]:
    """Returns the largest difference as a part of the largest value of its kind, and of what it is."""

    def part(each: Tensor, piece: Piece | None) -> Tensor:
        return each if piece is None else piece.of(each, region.rank, region.size)

    pairs = [
        (f"result {at}", 0, part(one, piece), other)
        for at, (one, other, piece) in enumerate(zip(wanted.results, found.results, unit.gives, strict=True))
    ]
    pairs += [
        (f"the gradient of input {at}", 1, part(one, piece), other)
        for at, (one, other, piece) in enumerate(zip(wanted.inputs, found.inputs, unit.takes, strict=True))
        if one is not None and other is not None and at in unit.judged
    ]
    pairs += [
        (f"the gradient of {name}", 2, layouts[name].own_part(one), other)
        for name, one in wanted.parameters.items()
        if one is not None and (other := found.parameters.get(name)) is not None
    ]
    largest = [
        max([1e-9, *(float(one.abs().max()) for _, of, one, _ in pairs if of == kind and one.numel())])
        for kind in range(3)
    ]
    differences = [
        (float((one - other).abs().max()) / max(float(one.abs().max()), 1e-3 * largest[kind]), what)
        if one.shape == other.shape
        else (1e30, f"{what} is {tuple(other.shape)} in place of {tuple(one.shape)}")
        for what, kind, one, other in pairs
        if one.numel()
    ]
    return max(((each if each == each else 1e30, what) for each, what in differences), default=(0.0, ""))
