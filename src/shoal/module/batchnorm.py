"""BatchNorm over ranks: running statistics that equal those of one process, and statistics over the global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from shoal.comm.collectives import Group
from shoal.comm.functional import copy_to, reduce_from
from shoal.device import is_accelerator
from shoal.errors import UserError
from shoal.module.buffer_values import persistent_buffers
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
        self._before = (torch.empty(0, dtype=torch.float64),) * 2
        self._tables = _Tables(torch.empty(0), torch.empty(0), None, ())

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
        return sum(self._sizes()) + len(self._layers)

    def values(self) -> Tensor:
        """Returns the statistics of all layers, and behind them the number of updates of each (fp64, flat)."""
        return torch.cat(self._now())

    def put(self, values: Tensor) -> None:
        """Sets the statistics to what `values` gave."""
        self._write(*values.split([sum(self._sizes()), len(self._layers)]))

    def begin(self) -> None:
        """Stores the statistics at the start of the step."""
        self._before = self._now()

    def restore(self) -> None:
        """Restores the statistics of the start of the step, for a step that will not be applied."""
        self._write(*self._before)

    def updates(self) -> Tensor:
        """Returns how often this rank has updated each layer since the start of the step (fp64 [layers])."""
        return self._counts() - self._before[1]

    def term(self, after: Tensor | None = None) -> Tensor:
        """Returns this rank's summand (fp64, flat as `values`).

        after: updates of each layer by the ranks that follow (fp64 [layers]); None: there are none
        """
        if not self._layers:
            return torch.empty(0, dtype=torch.float64)
        (x0, n0), (y, n) = self._before, self._now()
        tables, updates = self._found(y.device), n - n0
        term = y - tables.powers(updates) * x0
        if after is not None:
            term = tables.powers(after.to(y.device)) * term
        if tables.sums is not None:
            term = torch.where(tables.sums, y * n[tables.layers] - x0 * n0[tables.layers], term)
        return torch.cat([torch.where(updates[tables.layers] > 0, term, 0.0), updates])

    def commit(self, total: Tensor) -> None:
        """Writes the merged statistics from the sum of all ranks' terms."""
        if not self._layers:
            return
        (x0, n0), (y, _) = self._before, self._now()
        term, updates = total.to(y.device).split([len(x0), len(n0)])
        tables, n = self._found(y.device), n0 + updates
        merged = tables.powers(updates) * x0 + term
        if tables.sums is not None:
            merged = torch.where(tables.sums, (n0[tables.layers] * x0 + term) / n[tables.layers], merged)
        self._write(torch.where(updates[tables.layers] > 0, merged, y), n)

    def _now(self) -> tuple[Tensor, Tensor]:
        """The statistics (flat) and the updates so far (fp64, both)."""
        found = self._statistics()
        flat = torch.cat(found).double() if found else torch.empty(0, dtype=torch.float64)
        return flat, self._counts()

    def _statistics(self) -> list[Tensor]:
        return [cast(Tensor, each) for layer in self._layers for each in (layer.running_mean, layer.running_var)]

    def _sizes(self) -> list[int]:
        return [each.numel() for each in self._statistics()]

    def _counters(self) -> list[Tensor]:
        return [cast(Tensor, layer.num_batches_tracked) for layer in self._layers]

    def _counts(self) -> Tensor:
        counters = self._counters()
        return torch.stack(counters).double() if counters else torch.empty(0, dtype=torch.float64)

    def _write(self, flat: Tensor, updates: Tensor) -> None:
        if statistics := self._statistics():
            device = statistics[0].device
            torch._foreach_copy_(statistics, list(flat.to(device).split(self._sizes())))
            torch._foreach_copy_(self._counters(), list(updates.to(device).unbind()))

    def _found(self, device: torch.device) -> _Tables:
        momenta = tuple(layer.momentum for layer in self._layers)
        if self._tables.layers.device != device or self._tables.momenta != momenta:
            sizes = self._sizes()
            of_layers = torch.tensor(sizes).view(-1, 2).sum(1)
            layers = torch.repeat_interleave(of_layers, output_size=sum(sizes))  # which a dry run cannot read there
            sums = torch.tensor([momentum is None for momentum in momenta])[layers].to(device)
            left = torch.tensor([1.0 - (momentum or 0.0) for momentum in momenta], dtype=torch.float64)
            self._tables = _Tables(layers.to(device), left.to(device), sums if None in momenta else None, momenta)
        return self._tables


@dataclass(frozen=True)
class _Tables:
    """What is known of statistics that lie one behind the other: of which of the `layers` each is; what an update
    leaves of those of a layer (`left`); and which are averages over all batches (`sums`), None for none."""

    layers: Tensor
    left: Tensor
    sums: Tensor | None
    momenta: tuple[float | None, ...]

    def powers(self, updates: Tensor) -> Tensor:
        """What so many updates of each layer leave of its statistics. On a CPU rounded as Python's powers, which are
        not torch's to the last bit."""
        if is_accelerator(updates.device):
            return torch.pow(self.left, updates)[self.layers]
        bases = (1.0 - (momentum or 0.0) for momentum in self.momenta)
        powers = [base ** float(number) for base, number in zip(bases, updates, strict=True)]
        return torch.tensor(powers, dtype=torch.float64)[self.layers]


def has_batch_statistics(root: nn.Module) -> bool:
    """True if the model's result depends, on any stage of a pipeline, on which samples share a microbatch."""
    return any(isinstance(module, _BatchNorm) for _, module in whole_model(root))


def other_buffers(root: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint has, by name, without those of BatchNorm."""
    return {name: value for name, owner, value in persistent_buffers(root) if not isinstance(owner, _BatchNorm)}


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
