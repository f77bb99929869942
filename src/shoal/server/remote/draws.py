"""What a module draws at its owner: with a seed, from a generator of its own, whatever else the process draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import UserError
from shoal.module.random import name_key

_MOST = 1 << 63
_NO_SEED = -1
_DRAWING = (
    "bernoulli bernoulli_ binomial cauchy_ exponential_ geometric_ log_normal_ multinomial normal normal_ poisson rand "
    "rand_like randint randint_like randn randn_like randperm random_ uniform_ dropout dropout_ dropout1d dropout2d "
    "dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout "
    "feature_alpha_dropout_ native_dropout gumbel_softmax rrelu rrelu_ fractional_max_pool2d fractional_max_pool3d "
    "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices lstm gru rnn_tanh rnn_relu"
)
"""Functions of torch that may draw, by name."""
_NAMES = frozenset(_DRAWING.split())
_ATTENTION = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Those of which only a dropout draws, and where in their arguments it stands."""


def forward_seed(seed: int, forward: int) -> int:
    """Returns the seed of a forward's draws: they are those after `torch.manual_seed` of it, on the CPU."""
    return name_key(f"{seed}/{forward}") % _MOST


def creation(seed: int) -> AbstractContextManager[Any]:
    """Has a module built in this thread as after `torch.manual_seed(seed)`; -1: by torch's generator."""
    return nullcontext() if seed == _NO_SEED else _Drawing(_from(seed))


class ForwardDraws:
    """The draws of a forward and its backward; a seed of -1 means torch's generator."""

    def __init__(self, seed: int, forward: int) -> None:
        self._seed, self._forward = seed, forward

    def forward(self) -> AbstractContextManager[Any]:
        if self._seed == _NO_SEED:
            return nullcontext()
        return _Functions(_Drawing(_from(forward_seed(self._seed, self._forward))))

    def backward(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._seed == _NO_SEED else _Functions(_Drawing(_again))


class _Drawing(TorchDispatchMode):
    """Gives operations of this thread that draw on the CPU, and have no generator, that of `generator()`."""

    def __init__(self, generator: Callable[[], torch.Generator]) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        drawing = _with_generator(func)
        if drawing is None or given.get("generator") is not None or not _on_cpu(args, given):
            return func(*args, **given)
        return drawing(*args, **given | {"generator": self._generator()})


class _Functions(TorchFunctionMode):
    """Runs the functions that may draw, and no others, under `drawing`: torch chooses other kernels for some operations
    where operations are looked at, which round otherwise."""

    def __init__(self, drawing: _Drawing) -> None:
        super().__init__()
        self._drawing = drawing

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        at = _ATTENTION.get(name)
        drops = at is not None and given.get("training", True) and given.get("dropout_p", [*args, *[0.0] * 99][at]) > 0
        if not drops and name not in _NAMES:
            return func(*args, **given)
        with self._drawing:
            return func(*args, **given)


def _with_generator(func: Any) -> Any:
    """Returns the overload of an operation that takes a generator, or None where nothing is drawn."""
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    name = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
    return getattr(func.overloadpacket, name, None)


def _on_cpu(args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device.type == "cpu"
    return torch.device(given.get("device") or "cpu").type == "cpu"


def _from(seed: int) -> Callable[[], torch.Generator]:
    made = torch.Generator().manual_seed(seed)
    return lambda: made


def _again() -> NoReturn:
    raise UserError(
        "a module draws in its backward, where torch.utils.checkpoint runs its forward again: a seed does not repeat "
        "draws. Give shoal.remote no seed, or recompute nothing that draws"
    )
