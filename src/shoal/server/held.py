"""A module that holds parameters by name and computes nothing: what a server has of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import UserError

Given = nn.Module | Mapping[str, Tensor]


class Held(nn.Module):
    """Copies of the parameters `names` of `given`, and of a model's persistent `buffers` if asked for, in modules that
    are nested as the names say. A BatchNorm whose statistics it has is one here, too: it says how they are kept."""

    def __init__(self, given: Given, names: Collection[str], buffers: bool) -> None:
        super().__init__()
        for path, module in given.named_modules() if isinstance(given, nn.Module) and buffers else ():
            if path and isinstance(module, _BatchNorm) and module.track_running_stats:
                owner, leaf = self._owner(path)
                owner.add_module(leaf, nn.BatchNorm1d(module.num_features, module.eps, module.momentum, affine=False))
        for name, parameter in named(given).items():
            if name in names:
                owner, leaf = self._owner(name)
                value = parameter.detach().clone()
                trained = parameter.requires_grad if isinstance(parameter, nn.Parameter) else value.is_floating_point()
                owner.register_parameter(leaf, nn.Parameter(value, requires_grad=trained))
        if isinstance(given, nn.Module) and buffers:
            parameters = dict(given.named_parameters(remove_duplicate=False))
            for name, value in given.state_dict().items():
                if name not in parameters and isinstance(value, Tensor):  # no extra state of a module
                    owner, leaf = self._owner(name)
                    owner.register_buffer(leaf, value.detach().clone())

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        owner: nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        return owner, leaf


def named(given: Given) -> dict[str, Tensor]:
    """Returns the parameters of a model, or a table of them, by name. Raises UserError for anything else."""
    if isinstance(given, nn.Module):
        return dict(given.named_parameters())
    if isinstance(given, Mapping) and all(isinstance(value, torch.Tensor) for value in given.values()):
        return dict(given)
    raise UserError(f"a {type(given).__name__} holds no parameters: give a torch module, or a dict of tensors by name")
