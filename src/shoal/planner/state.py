"""What an optimizer keeps of a parameter, from updates of tiny ones: no formula by the optimizer's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shoal.optim.fused.host_adam import HostAdam
from shoal.optim.groups import OptimizerFactory, is_fused, make_optimizer, needs_whole_parameters
from shoal.precision import Precision

PRIMES = (3, 5, 7, 11, 13, 17)
"""The sizes of a tiny parameter: by its size each dimension of its state is known again."""


@dataclass(frozen=True)
class State:
    """`nbytes(group, shape)`: bytes of the state of a parameter of an optimizer group. `whole_parameters`: no cut may
    go through one. `in_one_pass`: the update on the host needs no masters opened that are kept in halves."""

    nbytes: Callable[[int, torch.Size], int]
    whole_parameters: bool
    in_one_pass: bool


def optimizer_state(
    factory: OptimizerFactory, options: Sequence[dict[str, Any]], precision: Precision, shards: bool
) -> State:
    """Finds the state of the optimizer of `factory` with the groups of `options`. `shards`: chunks are cut; UserError
    if the optimizer cannot be, as the engine's."""

    @cache
    def by_dims(group: int, dims: int) -> list[tuple[list[int | None], int]]:
        """The state's tensors: of each dimension the parameter's dimension that it has, or None; and the bytes that do
        not depend on those."""
        tiny = nn.Parameter(torch.zeros(PRIMES[:dims], dtype=precision.master))
        optimizer = make_optimizer(factory, [{"params": [tiny], **options[group]}])
        for _ in range(2):
            tiny.grad = torch.zeros_like(tiny)
            optimizer.step()
        found = []
        for value in optimizer.state[tiny].values():
            if isinstance(value, Tensor):
                places = [PRIMES.index(size) if size in PRIMES[:dims] else None for size in value.shape]
                known = prod(size for size, place in zip(value.shape, places, strict=True) if place is not None)
                found.append((places, value.nbytes // known))
        return found

    def nbytes(group: int, shape: torch.Size) -> int:
        return sum(
            each * prod(shape[place] for place in places if place is not None)
            for places, each in by_dims(group, len(shape))
        )

    whole = shards and needs_whole_parameters(factory, options, precision.master)
    trial = make_optimizer(factory, [{"params": [nn.Parameter(torch.zeros(1, dtype=precision.master))], **options[0]}])
    fp32 = precision.master == precision.grad == torch.float32
    return State(nbytes, whole, fp32 and is_fused(trial) and HostAdam.takes(trial, []))
