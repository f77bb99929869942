"""Modules of torch.jit (scripted or traced) in a model: they run as they are, and hooks do not see inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.errors import UserError

DRAWS = (
    *("dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_", "rrelu"),
    *("feature_alpha_dropout", "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
    *("bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "uniform_", "exponential_", "native_dropout"),
)
"""Operations of torch that draw."""


def is_scripted(module: nn.Module) -> bool:
    """Whether torch.jit has made `module`."""
    return isinstance(module, torch.jit.ScriptModule)


def scripted_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the outermost modules of torch.jit in `module`, by name."""
    parts: dict[str, nn.Module] = {}
    for name, each in module.named_modules():
        if is_scripted(each) and not any(name.startswith(f"{outer}.") for outer in parts):
            parts[name] = each
    return parts


def drawn_by(part: nn.Module) -> str:
    """Names an operation of `part`, of torch.jit, that draws; "" for none."""
    return next((each for each in DRAWS if _calls(part, each)), "")


def check_scripted(module: nn.Module, replicas: int) -> None:
    """Raises UserError for a part with BatchNorm, whose running statistics several `replicas` could not merge."""
    for name, part in scripted_parts(module).items() if replicas > 1 else ():
        if _calls(part, "batch_norm"):
            raise UserError(
                f"{name} is a module of torch.jit with BatchNorm, whose running statistics replicas cannot merge: give "
                "the module that it was made of, or take plan.dp = 1"
            )


def _calls(part: Any, operation: str) -> bool:
    return bool(part.inlined_graph.findAllNodes(f"aten::{operation}", recurse=True))
