"""Tensor parallelism as an axis: ranks have parts of the same matrices, and see the same samples."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from traceback import walk_tb

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shoal.comm import World
from shoal.comm.silent import Silent
from shoal.errors import ShoalError, UserError
from shoal.mesh import Mesh
from shoal.module.build import Built
from shoal.parallel.axis import Axis, Remembers, in_order, together
from shoal.parallel.expert import Spread
from shoal.parallel.layout import Layout
from shoal.parallel.tensor.cuts import Cuts
from shoal.parallel.tensor.overlap import TokenRing
from shoal.parallel.tensor.parts_in_loss import Parts, PartsInLoss
from shoal.parallel.tensor.region import Region
from shoal.parallel.tensor.rules import kind_of
from shoal.parallel.tensor.slicing import Sliced, cut_among
from shoal.parallel.weights_in_loss import WeightsInLoss

SAME = 1e-5
"""How far the losses of ranks may be apart, relative to each other, where kernels round what they share another way."""


_GIVE = frozenset(["column", "packed", "qkv"])
"""Kinds of layers of which each rank computes some outputs."""


class TensorParallel(Axis):
    """Cuts the layers of a model as `cuts` says.

    region: the way into what ranks compute in parts, and out of it
    rules: the kind of each layer that is known
    """

    name = "tp"
    cuts_matrices = True

    def __init__(self, mesh: Mesh, world: World, cuts: Cuts) -> None:
        super().__init__(mesh, world)
        ring = TokenRing(self.group, self._lane()) if self.size > 1 else None
        self.region = Region(self.group, partial(world.group, "tp-sharers"), ring)
        self.rules, self._found = cuts.rules, cuts.found
        self.carried: Sequence[Remembers] = [self.region]

    def cut(self, built: Built, spread: Spread | None, experts: Sequence[str], elsewhere: Collection[str]) -> Sliced:
        """Cuts the module of `built` (see `cut_among`, also for experts, which ranks along another axis may share)."""
        sliced = cut_among(built, self.region, self.rules, spread, experts, elsewhere, self._found)
        self.shares_tokens = self.region.sequence
        self.sums_gradients = any(self.name in layout.reduce for layout in sliced.layouts.values())
        return sliced

    def watch(self, module: nn.Module, layouts: Mapping[str, Layout]) -> None:
        """Refuses losses that compute with parameters of `module` of which ranks have parts, or whose gradients they
        add up."""

        def why(name: str) -> str | None:
            layout = layouts.get(name)
            if layout is None:
                return None
            if not layout.alike:
                return f"plan.tp = {self.size}: the loss computes with {name}, of which each rank has a part"
            if self.name in layout.reduce:
                said = "whose gradient is the sum of those of all ranks, so that it would count more than once"
                return f"plan.tp = {self.size}: the loss computes with {name}, {said}"
            return None

        self._weights = WeightsInLoss(module, why, "plan.tp = 1")
        self._parts = PartsInLoss(module, self._parts_of, f"plan.tp = {self.size}", "plan.tp = 1")
        self._names = {id(each): name for name, each in module.named_modules()}

    def _parts_of(self, name: str) -> Parts:
        kind = kind_of(name, self.rules)
        if kind == "inside" or (self._found is not None and name in self._found.crossed):
            return Parts.GRADIENTS
        if kind in _GIVE or (self._found is not None and name in self._found.gives):
            return Parts.VALUES
        return Parts.NONE

    @contextmanager
    def around_loss(self) -> Iterator[None]:
        """Raises UserError for a forward that fails where layers were cut as the graph of another one shows."""
        with self._weights.looking(), self._parts.looking():
            try:
                yield
            except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError) as error:
                if self._found is None or isinstance(error, ShoalError | torch.OutOfMemoryError):
                    raise
                raise UserError(self._what_fails(error)) from error

    def _what_fails(self, error: Exception) -> str:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        owners = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
        name = next((self._names[id(each)] for each in reversed([*owners]) if id(each) in self._names), "")
        pattern = ".".join(filter(None, (re.sub(r"(?<![^.])\d+(?![^.])", "*", name), "**")))
        return (
            f"plan.tp = {self.size}: {name or 'the model'} fails ({type(error).__name__}: {first}). Where one process "
            "can run it, it computes with a size that the inputs on which its layers were cut have not shown: keep "
            f'them whole (Engine(tensor_rules={{"{pattern}": "whole"}})), or take plan.tp = 1'
        )

    def why_no_hook(self, layout: Layout | None) -> str | None:
        if layout is not None and not layout.alike:
            return f"plan.tp = {self.size}: each rank has a part of it"
        if layout is not None and self.name in layout.reduce:
            return f"plan.tp = {self.size}: each rank has the gradient of its tokens alone"
        return None

    def add_squares(self, squares: Tensor) -> Tensor:
        return self.group.all_reduce(squares, purpose="norm")

    def check_sums(self, sums: Tensor) -> None:
        told = self.group.all_gather_object([0.0] * len(sums) if isinstance(sums, FakeTensor) else sums.tolist())
        if not all(math.isfinite(each) for each in told[0]):
            return
        for place, values in enumerate(zip(*told, strict=True)):
            if all(math.isclose(each, values[0], rel_tol=SAME) for each in values):
                continue
            raise UserError(
                f"plan.tp = {self.size}: {'the loss' if place < 2 else 'an auxiliary loss'} sums up to "
                f"{', '.join(f'{each:.6g}' for each in values)} on ranks that share matrices: it reads weights, of "
                "which each has a part. Leave a penalty on weights to the optimizer (weight_decay), or take plan.tp = 1"
            )

    def gather_names(self, names: list[str], order: Iterable[str]) -> list[str]:
        return in_order(self.group.all_gather_object(names), order)

    def gather_squares(self, squares: Mapping[str, float], layouts: Mapping[str, Layout]) -> Mapping[str, float]:
        cut = {name for name in squares if not layouts[name].alike}
        return together(self.group.all_gather_object(dict(squares)), cut)


def confirming(mesh: Mesh, world: World) -> Region | None:
    """Returns a region of the ranks along tp, in which they confirm a cut together; None for one rank, and in a world
    that does not exist."""
    group = world.group(TensorParallel.name, mesh.ranks(TensorParallel.name))
    if group.size == 1 or group.transports["cpu"].carrier == Silent.carrier:
        return None
    return Region(group, partial(world.group, "tp-sharers"))
