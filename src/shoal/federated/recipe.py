"""What every client of a simulation does alike: the model, its loss, the optimizer of its local steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.assembly.arguments import check_optimizer
from shoal.errors import UserError
from shoal.models.losses import Loss
from shoal.optim.fused.optimizer import OptimizerFactory
from shoal.optim.groups import GroupRule, group_options


def constant(number: int) -> float:
    """Returns the factor of a learning rate that stays."""
    return 1.0


@dataclass(frozen=True)
class Recipe:
    """The training of a client.

    model: a factory. loss: as in `shoal.Engine`, (sum, count). optimizer, param_groups: of its local steps; its state
        begins anew each time. batch: samples of a local step. clip: largest norm of a gradient; None: any.
    seed: of the weights, and of every draw. rate: the factor of the learning rate in a round, of its number.
    measure: what an evaluation shows beside the loss, (sum, count) too, such as right answers.
    """

    model: Callable[[], nn.Module]
    loss: Loss
    optimizer: OptimizerFactory
    batch: int
    seed: int = 0
    clip: float | None = None
    param_groups: GroupRule | None = None
    rate: Callable[[int], float] = constant
    measure: Loss | None = None

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)
        if self.batch < 1:
            raise UserError(f"Recipe: batch = {self.batch}: give how many samples a local step takes, from 1 on")


@dataclass(frozen=True)
class Trained:
    """What clients have done.

    moved: weights before minus weights after, [clients, size].
    losses, counts: sums of the loss over the local steps and what they are divided by, [clients].
    """

    moved: Tensor
    losses: Tensor
    counts: Tensor


class LocalOptimizer:
    """The optimizer of a recipe over `tensors`, which are given for the parameters `named`, in their order."""

    def __init__(self, recipe: Recipe, named: Sequence[tuple[str, nn.Parameter]], tensors: Sequence[Tensor]) -> None:
        groups = group_options(named, recipe.param_groups)
        self.parameters = [nn.Parameter(tensor, requires_grad=tensor.is_floating_point()) for tensor in tensors]
        self._values = list(tensors)
        placed = dict(zip((name for name, _ in named), self.parameters, strict=True))
        members = groups.members(placed)
        self._torch = recipe.optimizer(
            [
                {"params": [placed[name] for name in own], **options}
                for own, options in zip(members, groups.options, strict=True)
            ]
        )
        self._rates = [group["lr"] for group in self._torch.param_groups]
        self._plain = type(self._torch) is torch.optim.SGD and len(self._torch.param_groups) == 1
        self._plain &= not any(self._torch.param_groups[0].get(key) for key in ("momentum", "weight_decay", "maximize"))

    def begin(self, factor: float) -> None:
        """Forgets what it knows of earlier clients; `factor`: of the learning rate."""
        self._torch.state.clear()
        for group, rate in zip(self._torch.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Updates the tensors with these gradients; those of None are left alone, as torch's optimizers leave them."""
        if self._plain:  # the same numbers, without the half of a small step that torch's optimizer takes to begin
            values = [value for value, each in zip(self._values, gradients, strict=True) if each is not None]
            torch._foreach_add_(values, present(gradients), alpha=-self._torch.param_groups[0]["lr"])
            return
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._torch.step()


def is_elementwise(recipe: Recipe) -> str:
    """Says why the optimizer of a recipe cannot train several clients in one tensor; "" if it can."""
    from shoal.optim.fused.trial import NOT_ELEMENTWISE

    trial = nn.Parameter(torch.zeros(2, 2))
    optimizer = recipe.optimizer([{"params": [trial]}])
    for kind, why in NOT_ELEMENTWISE.items():
        if isinstance(optimizer, kind):
            return f"{type(optimizer).__name__} {why}"
    return "" if type(optimizer).__module__.startswith("torch.optim") else "its optimizer is not one of torch's"


def mean_of(total: Tensor, count: Tensor) -> Tensor:
    """Returns the mean loss; 0 where nothing counts. Samples with weights may count less than 1 together."""
    return total / count.clamp(min=1e-12)


def limited(norm: Tensor, clip: float | None) -> Tensor:
    """Returns the factor that brings gradients of `norm` to `clip` at most, as the engine does."""
    return (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)


def norm_of(gradients: Sequence[Tensor | None]) -> Tensor:
    """Returns the norm of all gradients together."""
    return torch.stack([gradient.square().sum() for gradient in present(gradients)]).sum().sqrt()


def present(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns those that there are."""
    return [gradient for gradient in gradients if gradient is not None]


def rate_of(name: str, rounds: int, warmup: int, floor: float) -> Callable[[int], float]:
    """Returns the factor of the learning rate by the number of the round, for a schedule of `shoal.optim.lr`."""
    from shoal.optim.lr import by_name

    scheduler: Any = by_name(name, rounds, warmup, floor)(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    factor = scheduler.lr_lambdas[0]
    return lambda number: float(factor(min(number, rounds)) if math.isfinite(rounds) else 1.0)
