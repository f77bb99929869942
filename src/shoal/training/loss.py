"""The contract of a loss: what `loss(model, microbatch)` returns, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shoal.device import to_device
from shoal.errors import UserError
from shoal.module.border import checkpoints_outside
from shoal.module.compiling import branching
from shoal.parallel.axis import Axis

Loss = Callable[[nn.Module, Mapping[str, Tensor]], Any]


@dataclass(frozen=True)
class Sums:
    """What a loss returned for one microbatch, checked: sum and count as scalars, auxiliary means by name.

    number: the count, where the loss has given a plain number
    """

    total: Tensor
    count: Tensor
    aux: dict[str, Tensor]
    number: float | None = None

    def counting_nothing(self) -> Sums:
        """Gives these sums weight 0: their backward gives zeros."""
        return Sums(self.total * 0, self.count * 0, self.aux)


def call_loss(loss: Loss, module: nn.Module, microbatch: Mapping[str, Tensor]) -> Sums:
    """Runs `loss` and checks its contract; UserError says what it returned instead."""
    with branching(), checkpoints_outside():
        result = loss(module, microbatch)
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise UserError(
            f"loss returned {_describe(result)}: return (sum, count), or (sum, count, auxiliary losses by name)"
        )
    _check_values(result[0], module, microbatch)
    total, count = result[0], result[1] if isinstance(result[1], Tensor) else torch.full((), result[1])
    if not isinstance(total, Tensor) or total.dim() != 0 or count.dim() != 0:
        raise UserError(
            f"loss returned ({_describe(result[0])}, {_describe(result[1])}): both must be single numbers (use "
            f"reduction='sum')"
        )
    aux = {}
    for name, value in sorted(result[2].items() if len(result) == 3 else ()):
        value, weight = value if isinstance(value, tuple) else (value, 1.0)
        mean = value / weight
        if isinstance(mean, Tensor) and mean.dim() != 0:
            raise UserError(f"loss returned {_describe(mean)} as auxiliary loss {name}: it must be a single number")
        aux[name] = to_device(mean if isinstance(mean, Tensor) else torch.full((), mean), total.device)
    return Sums(total, to_device(count, total.device), aux, None if count is result[1] else float(result[1]))


def _check_values(total: Any, module: nn.Module, microbatch: Mapping[str, Tensor]) -> None:
    """Raises UserError for a loss that is made of a tensor without values, though nothing that was given is."""
    if not isinstance(total, FakeTensor):
        return
    given = chain(microbatch.values(), module.parameters())  # a dry run counts what it is asked for as used
    if not any(isinstance(each, FakeTensor) for each in given):
        raise UserError(
            "the forward takes a tensor from outside of the model that has no values: code of the model has kept it "
            "from a run without values (the model is built and traced so): keep it in a buffer of the module, or in "
            "functools.lru_cache or a dict beside the classes, from which such tensors are dropped"
        )


def sums_of(loss: Loss, module: nn.Module, microbatch: Mapping[str, Tensor], axes: Sequence[Axis]) -> Sums:
    """Runs `loss` on a microbatch of which ranks along `axes` have parts. Raises UserError for a loss or a model that
    cannot be computed of a part."""
    with ExitStack() as stack:
        for axis in axes:
            stack.enter_context(axis.around_loss())
        sums = call_loss(loss, module, microbatch)
    for axis in axes:
        axis.ran(sums.number)
    return sums


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
