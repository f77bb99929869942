"""Local training of one client after the other, in one module: any model that torch can train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.federated.flat import Flat
from shoal.federated.recipe import LocalOptimizer, Recipe, Trained, limited, mean_of, norm_of
from shoal.federated.together import WithLoss


class OneByOne:
    """Trains `module`, whose parameters and buffers stay where they are: a forward may have them from elsewhere, such
    as a list of its own; see `Together`."""

    size = 1

    def __init__(self, module: nn.Module, flat: Flat, recipe: Recipe, tensors: Mapping[str, Tensor], mu: float) -> None:
        self._flat, self._recipe, self._tensors, self._mu = flat, recipe, tensors, mu
        self._module = module
        device = next(module.parameters()).device
        self._start = torch.zeros(flat.size, dtype=flat.dtype, device=device)
        named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self._parameters = [each for _, each in named]
        self._values = [each.detach() for each in self._parameters]
        self._optimizer = LocalOptimizer(recipe, named, self._values)
        self._loss = WithLoss(module, recipe.loss)
        self._kept = {name: buffer.clone() for name, buffer in module.named_buffers() if name not in set(flat.buffers)}

    def train(self, starts: Tensor, rows: Tensor, steps: Sequence[int], factor: float) -> Trained:
        """Trains a client for each row of `rows`, as `Together.train`."""
        done = [
            self._one(starts if starts.dim() == 1 else starts[index], rows[index, :count], factor)
            for index, count in enumerate(steps)
        ]
        moved, losses, counts = zip(*done, strict=True)
        return Trained(torch.stack(moved), torch.stack(losses), torch.stack(counts))

    def _one(self, start: Tensor, rows: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        self._module.train()
        self._begin(start)
        self._optimizer.begin(factor)
        parameters = self._parameters
        anchors = self._flat.views(self._start)[: len(parameters)]
        losses = torch.zeros((), dtype=torch.float64, device=self._start.device)
        counts = torch.zeros_like(losses)
        for batch in rows.to(self._start.device):
            total, count, auxiliary = self._loss({key: values[batch] for key, values in self._tensors.items()})
            gradients: tuple[Tensor | None, ...]
            gradients = torch.autograd.grad(mean_of(total, count) + auxiliary, parameters, allow_unused=True)
            with torch.no_grad():
                if self._mu:
                    # not in place: two parameters may have one gradient, or all its elements one place
                    gradients = tuple(
                        None if gradient is None else gradient + self._mu * (parameter - anchor)
                        for gradient, parameter, anchor in zip(gradients, parameters, anchors, strict=True)
                    )
                if self._recipe.clip:
                    factor_ = limited(norm_of(gradients), self._recipe.clip)
                    gradients = tuple(each if each is None else each * factor_ for each in gradients)
                self._optimizer.step(gradients)
                losses += total.detach()
                counts += count
        return self._start - self._ended(), losses, counts

    @torch.no_grad()
    def _begin(self, start: Tensor) -> None:
        """Puts `start` into the module."""
        self._start.copy_(start)
        views = self._flat.views(self._start)
        torch._foreach_copy_(self._values, views[: len(self._values)])
        buffers = dict(self._module.named_buffers())
        for name, view in zip(self._flat.buffers, views[len(self._values) :], strict=True):
            buffers[name].copy_(view)
        for name, value in self._kept.items():
            buffers[name].copy_(value)

    def _ended(self) -> Tensor:
        """Returns the vector of the module after its steps: a forward may have bound buffers anew."""
        named = dict(zip(self._flat.names, self._values, strict=True))
        return self._flat.vector(named | dict(self._module.named_buffers()))
