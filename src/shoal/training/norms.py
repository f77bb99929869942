"""Gradients by name, after the exchange: their norms, clipping by a function of the user's, and themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shoal.chunks import Chunk
from shoal.errors import UserError
from shoal.parallel.axis import together
from shoal.parallel.layout import Layout
from shoal.training.setup import StepGroups

ClipRule = Callable[[Mapping[str, float]], float | Mapping[str, float]]
"""Takes the norms of all gradients by name, in the unit of the mean and the same on every rank, and gives a factor for
all of them, or factors by name (1 where there is none)."""


def norms_by_name(
    chunks: Sequence[Chunk], layouts: Mapping[str, Layout], unit: float, groups: StepGroups
) -> dict[str, float]:
    """Gives the norms of all gradients, times `unit`, in the order of `layouts`, stage by stage, the same bits on every
    rank."""
    cut = {slot.name for chunk in chunks if chunk.is_cut for slot in chunk.slots}
    squares: dict[str, float] = {}
    for chunk in chunks:
        slots = [] if chunk.copy_number else chunk.owned.slots  # one of those who keep the same stretch counts it
        sums = [slot.view(chunk.owned.gradient).double().square().sum() for slot in slots]
        squares.update(zip((slot.name for slot in slots), torch.stack(sums).tolist() if sums else [], strict=True))
    told = together(groups.partners.all_gather_object(squares), cut)
    found: Mapping[str, float] = {name: told[name] for name in layouts if name in told}
    for axis in groups.axes:
        found = axis.gather_squares(found, layouts)
    return {name: math.sqrt(value) * unit for name, value in found.items()}


def by_layer(norms: Mapping[str, float]) -> dict[str, float]:
    """`norms` of parameters as norms of layers: a block that repeats is called as up to its number ("blocks.3"), other
    parameters go by their module ("embed")."""
    found: dict[str, float] = {}
    for name, norm in norms.items():
        parts = name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
        layer = ".".join(parts[: number + 1]) or name
        found[layer] = math.hypot(found.get(layer, 0.0), norm)
    return found


def clip_by(rule: ClipRule, norms: Mapping[str, float], chunks: Sequence[Chunk]) -> float:
    """Asks `rule`: multiplies the gradients in `chunks` by the factors that it names, or returns the one for all."""
    answer = rule(dict(norms))
    factors = answer if isinstance(answer, Mapping) else {"": answer}
    if unknown := [name for name in factors if name and name not in norms]:
        raise UserError(
            f"clip gave a factor for {unknown[0]}, which is no parameter that is trained; names are such as "
            f"{next(iter(norms))}"
        )
    for name, factor in factors.items():
        if not (isinstance(factor, int | float) and math.isfinite(factor) and factor >= 0):
            of = f" for {name}" if name else ""
            raise UserError(f"clip gave {factor!r}{of}: give finite numbers from 0 on, or a dict of them by name")
    if not isinstance(answer, Mapping):
        return float(answer)
    for chunk in chunks:
        for slot in chunk.owned.slots:
            if (factor := factors.get(slot.name, 1.0)) != 1.0:
                slot.view(chunk.owned.gradient).mul_(factor)
    return 1.0


@torch.no_grad()
def whole_gradients(chunks: Sequence[Chunk], kept: Sequence[Tensor]) -> dict[str, Tensor]:
    """By name, from `kept`, which this rank owns of each chunk; whole over the ranks that cut them, which all call
    it."""
    found: dict[str, Tensor] = {}
    for chunk, flat in zip(chunks, kept, strict=True):
        flat = chunk.gathered(flat, "gradients")
        found.update({slot.name: slot.view(flat).clone() for slot in chunk.slots})
    return found
