"""A model as one vector: its trained parameters, then the floating buffers that a state has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.module.build import build


class Flat:
    """Where the parameters and buffers of `module` lie in a vector, which is of fp32, or of fp64 where all that is
    trained is.

    names: of the trained parameters, each once. weights: elements of those; size: of those and the buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
        if not trained:
            raise UserError("the model has no parameter that is trained: nothing would change in any round")
        kept = {name: each for name, each in module.named_buffers() if name in module.state_dict()}
        floating = {name: each for name, each in kept.items() if each.is_floating_point()}
        self.dtype = torch.promote_types(torch.float32, _narrowest(trained.values()))
        self.names, self.buffers = list(trained), list(floating)
        self.shapes = [each.shape for each in (*trained.values(), *floating.values())]
        sizes = [math.prod(shape) for shape in self.shapes]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self.weights, self.size = sum(sizes[: len(trained)]), sum(sizes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns the parts of `flat` [..., size] in the shapes of the tensors: parameters, then buffers."""
        return [
            flat[..., start : start + math.prod(shape)].unflatten(-1, shape) if shape else flat[..., start]
            for start, shape in zip(self._starts, self.shapes, strict=True)
        ]

    def vector(self, state: Mapping[str, Tensor]) -> Tensor:
        """Returns the vector of a model's `state_dict`."""
        return torch.cat([state[name].detach().flatten().to(self.dtype) for name in (*self.names, *self.buffers)])

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns the parts of `flat` [size] by name, as views."""
        return dict(zip((*self.names, *self.buffers), self.views(flat), strict=True))

    def state(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns copies of the tensors in `flat`, by name."""
        return {name: view.clone() for name, view in self.named(flat).items()}


def _narrowest(tensors: Iterable[Tensor]) -> torch.dtype:
    return min((each.dtype for each in tensors), key=lambda dtype: dtype.itemsize)


def initial_module(model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Builds the model with the weights that `shoal.Engine` would give it under this seed, in the dtype of its
    vector."""
    module = _initial_module(model, seed)
    return module.double() if Flat(module).dtype == torch.float64 else module.float()  # complex buffers stay


def _initial_module(model: Callable[[], nn.Module], seed: int) -> nn.Module:
    built = build(model, seed)
    if built.how != "recorded":
        return built.module
    module = model()
    fake = {**dict(built.module.named_parameters()), **dict(built.module.named_buffers())}
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            tensor.copy_(built.value(name, fake[name]))
    return module
