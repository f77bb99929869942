"""The parameters of each part of a traced model, and how many elements they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn

from shoal.chunks.make import EXPERTS
from shoal.pipeline.units import Unit
from shoal.planner.prepare import Prepared


def shared_among(module: nn.Module, parts: Sequence[Sequence[Tensor]]) -> dict[str, tuple[int, int]]:
    """Finds the parameters that several parts have: the elements of each, all but once, and those with gradients."""
    often = Counter(id(each) for own in parts for each in own)
    found = {}
    for name, each in module.named_parameters():
        if (more := often[id(each)] - 1) > 0:
            found[name] = more * each.numel(), more * each.numel() * each.requires_grad
    return found


def parameters_of(module: nn.Module, units: Sequence[Unit]) -> list[list[Tensor]]:
    """The parameters of each part; the first has those that are in none, as a token of classes beside the layers is."""
    found = [{id(each): each for each in unit.module.parameters()} for unit in units]
    inside = {number for own in found for number in own}
    if found:
        found[0] |= {id(each): each for each in module.parameters() if id(each) not in inside}
    return [list(own.values()) for own in found]


def elements_of(ready: Prepared, own: Sequence[Tensor]) -> tuple[int, int, int, int, int]:
    """Elements of a part's `own` parameters: all, trained, of stacked experts that are trained, and of the largest; and
    the number of those trained."""
    known = {id(parameter): name for name, parameter in ready.local.module.named_parameters()}
    keys = {name: key for name, _, key in ready.parameters}
    found = [(each.numel(), keys[known[id(each)]]) for each in own if id(each) in known]
    return (
        sum(size for size, _ in found),
        sum(size for size, key in found if key.trainable),
        sum(size for size, key in found if key.group == EXPERTS and key.trainable),
        max((size for size, _ in found), default=0),
        sum(key.trainable for _, key in found),
    )
