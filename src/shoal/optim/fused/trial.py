"""Decides whether an optimizer can run over flat storage: by name, and by trying it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from shoal.device import keep_generators
from shoal.errors import UserError
from shoal.optim.fused.optimizer import FlatOptimizer, OptimizerFactory
from shoal.optim.fused.pieces import equal
from shoal.optim.fused.storage import flatten

NOT_ELEMENTWISE: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "steps along one direction of all parameters",
    torch.optim.Adafactor: "keeps second moments by rows and columns of a matrix",
    torch.optim.Muon: "makes the update of a matrix orthogonal",
    torch.optim.SparseAdam: "takes sparse gradients, and storage is dense",
}
TRIAL_SHAPES = ((4, 6), (), (5,), (2, 3, 4))
TRIAL_BLOCK = 16


@contextmanager
def for_real() -> Iterator[None]:
    """Inside, tensors are made and computed, also where all else of a run is on fake ones: a trial goes by values."""
    with _disable_current_modes():
        yield


@for_real()
def refusal(factory: OptimizerFactory, groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Says why the optimizer of `factory` for `groups` cannot run over flat storage; None if it can.

    An optimizer not known by name is tried out: on small parameters of several shapes, four updates with gradients of
    1e-4 to 1e4, one of them without one parameter, must give the same bits of weights and state as over flat storage in
    short pieces.
    """
    first = {**groups[0], "params": [nn.Parameter(torch.zeros(2, 2, dtype=groups[0]["params"][0].dtype))]}
    optimizer = factory([first])
    name = type(optimizer).__name__
    for kind, why in NOT_ELEMENTWISE.items():
        if isinstance(optimizer, kind):
            return f"{name} {why}. Use it as it is"
    if any(group.get("fused") for group in optimizer.param_groups):
        return f"{name}(fused=True) has torch's fused kernel and gains nothing from flat storage. Use it as it is"
    devices = {parameter.device for group in groups for parameter in group["params"]}
    try:
        with keep_generators(devices):
            same = _same_in_trial(factory, groups)
    except Exception as error:  # somebody else's code, on a use that it may not foresee
        return f"{name} failed when tried out on small tensors: {error}. Use it as it is"
    if same:
        return None
    return (
        f"{name} gives other bits over concatenated tensors than over each of them, so it is not elementwise, or draws "
        "random numbers. Use it as it is"
    )


@for_real()
def coupled(factory: OptimizerFactory, groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Says why the optimizer of `factory` cannot update each parameter by itself; None if it can.

    Three updates of two matrices must give the same bits as of each alone.
    """
    generator = torch.Generator().manual_seed(0)
    dtype, options = groups[0]["params"][0].dtype, {key: value for key, value in groups[0].items() if key != "params"}
    values = [torch.randn(4, 6, generator=generator).to(dtype) for _ in range(2)]
    gradients = [[torch.randn(4, 6, generator=generator).to(dtype) for _ in values] for _ in range(3)]
    together, alone = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimizers = [
        factory([{**options, "params": together}]),
        *(factory([{**options, "params": [each]}]) for each in alone),
    ]
    name = type(optimizers[0]).__name__
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        if isinstance(optimizers[0], kind):
            return f"{name} {NOT_ELEMENTWISE[kind]}"
    for row in gradients:
        for parameters in (together, alone):
            for parameter, gradient in zip(parameters, row, strict=True):
                parameter.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    same = all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
    return None if same else f"{name} updates parameters by what it sees of the others, or draws random numbers"


def _real(like: Tensor) -> Tensor:
    """A tensor of the type and device of `like`, which may be fake."""
    return torch.empty(0, dtype=like.dtype, device=like.device)


def _same_in_trial(factory: OptimizerFactory, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Compares four updates over parameters with the same over flat storage."""
    generator = torch.Generator().manual_seed(0)
    likes = [(index, _real(group["params"][0]), shape) for index, group in enumerate(groups) for shape in TRIAL_SHAPES]

    def draw(scale: float) -> list[Tensor]:
        return [scale * torch.randn(shape, generator=generator).to(like) for _, like, shape in likes]

    def build(values: list[Tensor]) -> tuple[dict[str, nn.Parameter], list[dict[str, Any]]]:
        named = {str(number): nn.Parameter(value.clone()) for number, value in enumerate(values)}
        member = [(likes[int(name)][0], parameter) for name, parameter in named.items()]
        return named, [{**group, "params": [p for i, p in member if i == index]} for index, group in enumerate(groups)]

    start = draw(1.0)
    named, plain_groups = build(start)
    plain = factory(plain_groups)
    flat_named, flat_groups = build(start)
    chunks = flatten(flat_named, {name: likes[int(name)][0] for name in flat_named})
    flat = FlatOptimizer(factory, flat_groups, chunks, flat_named, block=TRIAL_BLOCK)
    for scale, left_out in ((1.0, None), (1e4, "2"), (1e-4, None), (1.0, None)):
        for name, gradient in zip(named, draw(scale), strict=True):
            for parameters in (named, flat_named):
                parameters[name].grad = None if name == left_out else gradient.clone()
        plain.step()
        flat.step()
    states = ((plain.state.get(named[name], {}), flat.state.get(flat_named[name], {})) for name in named)
    return equal(named, flat_named) and all(equal(dict(one), dict(other)) for one, other in states)


def tried_out(kind: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any], what: str) -> OptimizerFactory:
    """Returns a factory of optimizers of `kind`, once one has made a step on a small parameter.

    options: of TOML or JSON, whose lists stand for tuples.

    Raises UserError, beginning with `what`, where torch refuses the options, or they are of wrong types.
    """
    factory = partial(kind, **{key: tuple(each) if isinstance(each, list) else each for key, each in options.items()})
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    try:
        optimizer = factory([parameter])
        if not optimizer.defaults.get("capturable"):  # which takes parameters on a GPU only
            optimizer.step()
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RuntimeError, AssertionError) as error:
        name = "" if type(error) is ValueError else f"{type(error).__name__}: "  # torch's own words need none
        raise UserError(f"{what} is refused by torch: {name}{error}") from error
    if not parameter.isfinite().all():
        raise UserError(
            f"{what} makes a weight of 1 with a gradient of 1 {parameter.flatten()[0]:g} in one step: give other values"
        )
    return factory
