"""BatchNorm over ranks: running statistics that equal those of one process, and statistics over the global batch."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from shoal.comm.collectives import Group
from shoal.comm.functional import copy_to, reduce_from
from shoal.device import is_accelerator
from shoal.errors import UserError
from shoal.module.stand_in import whole_model


class RunningStatistics:
    """Merges the running statistics of replicas that normalised different microbatches of one step.

    With momentum m one update is x -> a x + b with a = 1 - m. So n updates in sequence, cut into the ranks' runs,
    compose exactly: x_n = a^n x_0 + sum over ranks r of a^(updates after r) (y_r - a^(updates of r) x_0), where y_r is
    the value that rank r arrived at from x_0. Without momentum (cumulative average over n_0 + n batches) the sums add.
    Ranks tell each other their updates, since a layer need not run in every microbatch; then each sends its term, and
    the sum is the result. Counts of updates stay on the device, for which the host does not wait.
    """

    def __init__(self, root: nn.Module) -> None:
        found = {
            name: each
            for name, each in root.named_modules()
            if isinstance(each, _BatchNorm) and each.track_running_stats and each.running_mean is not None
        }
        self._names, self._layers = list(found), list(found.values())
        self._before: list[tuple[Tensor, Tensor]] = []

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def written(self) -> str | None:
        """The name of a layer whose statistics a forward would change now; None for none."""
        layers = zip(self._names, self._layers, strict=True)
        return next((name or "the model" for name, layer in layers if layer.training), None)

    @property
    def numel(self) -> int:
        """How many numbers `values` and `term` have."""
        return sum(2 * layer.num_features + 1 for layer in self._layers)

    def values(self) -> Tensor:
        """Returns the statistics (fp64, flat), those of each layer with its number of updates."""
        found = [each for layer in self._layers for each in (_flat(layer), _updates(layer).view(1))]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.float64)

    def put(self, values: Tensor) -> None:
        """Sets the statistics to what `values` gave."""
        sizes = [size for layer in self._layers for size in (2 * layer.num_features, 1)]
        parts = iter(values.split(sizes))
        for layer, flat, (updates,) in zip(self._layers, parts, parts, strict=True):
            self._write(layer, flat.to(_flat(layer).device), updates)

    def begin(self) -> None:
        """Stores the statistics at the start of the step."""
        self._before = [(_flat(layer), _updates(layer)) for layer in self._layers]

    def restore(self) -> None:
        """Restores the statistics of the start of the step, for a step that will not be applied."""
        for layer, (x0, n0) in zip(self._layers, self._before, strict=True):
            self._write(layer, x0, n0)

    def updates(self) -> Tensor:
        """Returns how often this rank has updated each layer since the start of the step (fp64 [layers])."""
        return torch.stack([_updates(layer) - n0 for layer, (_, n0) in zip(self._layers, self._before, strict=True)])

    def term(self, after: Tensor | None = None) -> Tensor:
        """Returns this rank's summand (fp64, flat).

        after: updates of each layer by the ranks that follow (fp64 [layers]); None: there are none
        """
        terms = []
        for index, (layer, (x0, n0)) in enumerate(zip(self._layers, self._before, strict=True)):
            updates, y = _updates(layer) - n0, _flat(layer)
            if layer.momentum is None:
                term = y * (n0 + updates) - x0 * n0
            else:
                decay = 1.0 - layer.momentum
                kept = _power(decay, updates) * x0
                term = (1.0 if after is None else _power(decay, after[index])) * (y - kept)
            terms += [torch.where(updates > 0, term, 0.0), updates.view(1)]
        return torch.cat(terms) if terms else torch.empty(0, dtype=torch.float64)

    def commit(self, total: Tensor) -> None:
        """Writes the merged statistics from the sum of all ranks' terms."""
        parts = iter(total.split([size for x0, _ in self._before for size in (x0.numel(), 1)]))
        for layer, (x0, n0), term, (updates,) in zip(self._layers, self._before, parts, parts, strict=True):
            kept = n0 * x0 if layer.momentum is None else _power(1.0 - layer.momentum, updates) * x0
            merged = kept + term if layer.momentum is not None else (kept + term) / (n0 + updates)
            self._write(layer, torch.where(updates > 0, merged, _flat(layer)), n0 + updates)

    @staticmethod
    def _write(layer: _BatchNorm, flat: Tensor, batches: Tensor) -> None:
        mean, var = flat.chunk(2)
        cast(Tensor, layer.running_mean).copy_(mean)
        cast(Tensor, layer.running_var).copy_(var)
        cast(Tensor, layer.num_batches_tracked).copy_(batches)


def _flat(layer: _BatchNorm) -> Tensor:
    return torch.cat([cast(Tensor, layer.running_mean), cast(Tensor, layer.running_var)]).double()


def _updates(layer: _BatchNorm) -> Tensor:
    """How many there were so far (0-dim fp64)."""
    return cast(Tensor, layer.num_batches_tracked).double()


def _power(base: float, exponent: Tensor) -> Tensor:
    """`base` to the 0-dim `exponent`; on a CPU rounded as Python's powers, which are not torch's to the last bit."""
    if is_accelerator(exponent.device):
        return torch.pow(base, exponent)
    return torch.full((), base ** float(exponent), dtype=exponent.dtype)


def has_batch_statistics(root: nn.Module) -> bool:
    """True if the model's result depends, on any stage of a pipeline, on which samples share a microbatch."""
    return any(isinstance(module, _BatchNorm) for _, module in whole_model(root))


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm whose training statistics are those of the whole global batch, over `group`; runs on CPU and CUDA.

    It sums in fp32 or wider. The collectives are differentiable in both modes, so gradients equal those of one process
    with the whole batch. A rank may have zero samples.
    """

    _group: Group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions (samples, channels, ...), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        x = input if input.dtype == torch.float64 else input.float()
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        count = self._group.all_reduce(
            torch.full((), x.numel() // x.shape[1], dtype=torch.float64, device=x.device)
        ).to(x.dtype)
        mean = self._sum(x.sum(dims)) / count
        centred = x - mean.view(shape)
        var = self._sum(centred.square().sum(dims)) / count
        y = centred * torch.rsqrt(var + self.eps).view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        self._track(mean.detach(), (var * count / (count - 1)).detach())
        return y.to(input.dtype)

    def _sum(self, partial: Tensor) -> Tensor:
        """Returns the sum over the ranks, which each rank uses for its own samples (so gradients are summed too)."""
        return copy_to(reduce_from(partial, self._group), self._group)

    def _track(self, mean: Tensor, var: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        batches = cast(Tensor, self.num_batches_tracked).add_(1)
        weight = self.momentum if self.momentum is not None else 1.0 / float(batches)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(var.to(self.running_var.dtype), weight)


def synchronise(root: nn.Module, group: Group) -> None:
    """Makes each BatchNorm below `root` a `SyncBatchNorm` over `group`: the same object, with its hooks.

    Raises UserError for one whose forward does more.
    """
    for name, module in root.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        plain = _BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward
        if type(module).forward not in plain or is_parametrized(module):
            raise UserError(
                f"sync_bn: {name or 'the model'} is a {type(module).__name__}, a BatchNorm that does more than that, "
                "which would be lost: give microbatch= instead, or put what it adds beside a plain BatchNorm"
            )
        module.__class__ = SyncBatchNorm
        vars(module)["_group"] = group
