"""Logits whose vocabulary is cut among ranks: losses are computed on them without gathering.

`ShardedLogits` stands in for a tensor [.., V], of which a rank has [.., v]. It implements the operations between a
model's head and its loss (`flatten`, `view`, `float`, `cross_entropy`, `log_softmax` with `nll_loss`, products with
numbers); any other operation gathers first, so every program is right and the usual ones are fast. A plain tensor of
this rank's columns would silently give a wrong loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shoal.comm.functional import copy_to, reduce_from
from shoal.device import applied
from shoal.errors import UserError
from shoal.parallel.tensor.likelihood import PURPOSE, Likelihood, at_columns, here_or_elsewhere

if TYPE_CHECKING:
    from shoal.parallel.tensor.region import Region


class ShardedLogits:
    """This rank's columns `local` [.., lengths[rank]] of logits [.., V].

    Rank r of `region` has the `lengths[r]` columns behind those of the ranks before it.
    """

    def __init__(self, local: Tensor, lengths: Sequence[int], region: Region) -> None:
        self.local, self._lengths, self._region = local, tuple(lengths), region

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _check_changes_nothing(getattr(func, "__name__", ""))
        known = _KNOWN.get(func)
        result = known(*args, **(kwargs or {})) if known is not None else NotImplemented
        if result is NotImplemented:
            args, kwargs = tree_map_only(ShardedLogits, ShardedLogits.whole, (args, kwargs or {}))
            result = func(*args, **kwargs)
        return result

    def __getattr__(self, name: str) -> Any:
        # no gathering just to find that tensors lack the attribute
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"logits that are cut among ranks have no {name}, as tensors have none")
        _check_changes_nothing(name)
        return getattr(self.whole(), name)

    def __getitem__(self, index: Any) -> Any:
        rows = index if isinstance(index, tuple) else (index,)
        taken = sum(
            row.dim() if isinstance(row, Tensor) and row.dtype == torch.bool else row is not None for row in rows
        )
        if any(row is Ellipsis for row in rows) or taken >= self.local.dim():
            return self.whole()[index]
        return self._with(self.local[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        _check_changes_nothing("__setitem__")

    def whole(self) -> Tensor:
        """Returns the logits [.., V], gathered. Collective; all ranks must do the same with the result."""
        return self._region.whole(self.local, self._lengths)

    def _with(self, local: Tensor) -> ShardedLogits:
        return ShardedLogits(local, self._lengths, self._region)

    # the attributes of a tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self.local.shape[:-1], sum(self._lengths)])

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.local.dim()

    @property
    def ndim(self) -> int:
        return self.local.dim()

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def requires_grad(self) -> bool:
        return self.local.requires_grad

    def is_floating_point(self) -> bool:
        return self.local.is_floating_point()

    def why_it_stays(self, layer: str) -> str:
        """Why these logits are not sent to another stage (`parallel.axis.StaysHere`)."""
        return (
            f"{layer} gives logits of which each rank along tp has a part, to layers of another stage: keep it whole, "
            f'plan.placements = {{"{layer}" = "whole"}}, or give it and all that comes behind it to the last stage '
            "(plan.stages)"
        )

    # operations on the way to a loss

    def to(self, *args: Any, **kwargs: Any) -> ShardedLogits:
        return self._with(self.local.to(*args, **kwargs))

    def float(self) -> ShardedLogits:
        return self._with(self.local.float())

    def contiguous(self) -> ShardedLogits:
        return self._with(self.local.contiguous())

    def detach(self) -> ShardedLogits:
        return self._with(self.local.detach())

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if end_dim % self.dim() == self.dim() - 1 and start_dim % self.dim() != self.dim() - 1:
            return self.whole().flatten(start_dim, end_dim)
        return self._with(self.local.flatten(start_dim, end_dim))

    def view(self, *shape: Any) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list | torch.Size) else shape
        if not sizes or isinstance(sizes[0], torch.dtype) or sizes[-1] not in (-1, sum(self._lengths)):
            return self.whole().view(*shape)
        rows = [size for size in sizes[:-1] if size != -1]
        if sizes[-1] == -1 and torch.Size(rows).numel() != self.local.shape[:-1].numel():
            return self.whole().view(*shape)
        return self._with(self.local.reshape(*sizes[:-1], self.local.shape[-1]))

    reshape = view

    def __mul__(self, other: Any) -> Any:
        return self._with(self.local * other) if isinstance(other, int | float) else self.whole() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._with(self.local / other) if isinstance(other, int | float) else self.whole() / other

    def tanh(self) -> ShardedLogits:
        return self._with(self.local.tanh())

    # losses

    def log_softmax(self, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
        """Returns the log-softmax, cut as the logits are; over any other dim than the last one, of the gathered
        logits."""
        if dim is None or dim % self.dim() != self.dim() - 1:
            return F.log_softmax(self.whole(), dim, dtype=dtype)
        local = self.local if dtype is None else self.local.to(dtype)
        largest = self._region.group.all_reduce(local.detach().amax(-1, keepdim=True), "max", PURPOSE)
        shifted = local - largest
        total = reduce_from(shifted.exp().sum(-1, keepdim=True), self._region.group, PURPOSE)
        # each rank subtracts it from its own columns, so its gradients are summed
        return self._with(shifted - copy_to(total.log(), self._region.group, PURPOSE))

    def picked(self, target: Tensor) -> Tensor:
        """Returns the value at `target` [N] of each row of these logits [N, V]: [N], the same on all ranks."""
        return reduce_from(at_columns(self.local, *self._here(target)), self._region.group, PURPOSE)

    def likelihood(self, target: Tensor) -> Tensor:
        """Returns -log softmax at `target` [N] of these logits [N, V]: [N], the same on all ranks."""
        return applied(Likelihood, self.local, *self._here(target), self._region.group)[0]

    def _here(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the column in `local` of each target (0 where another rank has it), and a mask of those others."""
        start = sum(self._lengths[: self._region.rank])
        return here_or_elsewhere(target, start, self.local.shape[-1], sum(self._lengths), "a target")


def _check_changes_nothing(name: str) -> None:
    """Raises UserError for the method or function `name` if it changes a tensor, or hooks into it: that would be the
    gathered copy, which nothing else reads."""
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name in ("__setitem__", "register_hook", "retain_grad"):
        raise UserError(
            f"{name} of logits that are cut among ranks (plan.tp) would be that of a copy, which is gathered for it: "
            "take logits = logits.clone() before, which gathers them, or keep the head whole (plan.placements)"
        )


def _of_the_whole(operator: str) -> Callable[..., Any]:
    """Returns a method that gathers the logits and applies `operator` to them."""

    def apply(logits: ShardedLogits, *others: Any) -> Any:
        others = tuple(other.whole() if isinstance(other, ShardedLogits) else other for other in others)
        return getattr(logits.whole(), operator)(*others)

    return apply


_BINARY = [
    "add",
    "radd",
    "sub",
    "rsub",
    "rtruediv",
    "pow",
    "rpow",
    "matmul",
    "floordiv",
    "mod",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
]
for _name in (*_BINARY, "neg", "abs", "len", "iter", "bool", "float", "int"):
    setattr(ShardedLogits, f"__{_name}__", _of_the_whole(f"__{_name}__"))
ShardedLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


def _loss_of(losses: Callable[[ShardedLogits, Tensor], Tensor]) -> Callable[..., Any]:
    """Makes a loss, with the parameters of torch's, of a function that gives the losses of logits and targets."""

    def loss(
        input: Any,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        usual = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
        if not usual or not _is_rows(input, target):
            return NotImplemented
        return _loss(partial(losses, input), target, ignore_index, reduction)

    return loss


def _is_rows(logits: Any, target: Any) -> bool:
    """True for logits [N, V] and class numbers [N]."""
    plain = isinstance(target, Tensor) and not target.is_floating_point()
    return isinstance(logits, ShardedLogits) and plain and logits.dim() == 2 and target.dim() == 1


def _loss(of: Callable[[Tensor], Tensor], target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Reduces the losses of all targets as torch's losses do, with 0 for ignored ones; `of` gives the losses of targets
    [N]."""
    ignored = target == ignore_index
    losses = of(target.masked_fill(ignored, 0)).masked_fill(ignored, 0)
    if reduction == "mean":
        return losses.sum() / (~ignored).sum()
    return losses.sum() if reduction == "sum" else losses


_KNOWN: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _loss_of(ShardedLogits.likelihood),
    F.nll_loss: _loss_of(lambda logits, target: -logits.picked(target)),
    F.log_softmax: ShardedLogits.log_softmax,
    torch.log_softmax: lambda logits, dim, dtype=None: logits.log_softmax(dim, dtype=dtype),
    torch.flatten: ShardedLogits.flatten,
    torch.tanh: ShardedLogits.tanh,
}
"""Implementations of torch's functions for cut logits; one that returns NotImplemented gathers first."""
