"""What a module draws at its owner: with a seed, from a generator of its own, whatever else the process draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.device import is_accelerator
from shoal.errors import UserError
from shoal.module.random import dropout_of, name_key

_MOST = 1 << 63
_NO_SEED = -1
_DRAWING = (
    "bernoulli bernoulli_ binomial cauchy_ exponential_ geometric_ log_normal_ multinomial normal normal_ poisson rand "
    "rand_like randint randint_like randn randn_like randperm random_ uniform_ dropout dropout_ dropout1d dropout2d "
    "dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout "
    "feature_alpha_dropout_ native_dropout gumbel_softmax rrelu rrelu_ fractional_max_pool2d fractional_max_pool3d "
    "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices lstm gru rnn_tanh rnn_relu _standard_gamma "
    "_sample_dirichlet rrelu_with_noise rrelu_with_noise_ normal_functional"
)
"""Functions of torch that may draw, by name."""
_NAMES = frozenset(_DRAWING.split())
_ATTENTION = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Functions of which only the dropout draws, with its place among their arguments."""
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def forward_seed(seed: int, forward: int) -> int:
    """Returns the seed of a forward's draws: on each device they are those of a generator with it, on the CPU those
    after `torch.manual_seed` of it."""
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
    """Gives operations of this thread that draw, and have no generator, that of `generator(device)`. Raises UserError
    for one that takes none."""

    def __init__(self, generator: Callable[[torch.device], torch.Generator]) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        drawing, device = _with_generator(func), _device(args, given)
        if device.type == "meta" or given.get("generator") is not None:
            return func(*args, **given)
        if func is torch.ops.aten.native_dropout.default and is_accelerator(device):
            return _dropout(self._generator(device), *args, **given)
        if drawing is not None:
            return drawing(*args, **given | {"generator": self._generator(device)})
        if is_accelerator(device) and torch.Tag.nondeterministic_seeded in func.tags and _may_draw(func, args, given):
            raise _unseeded(func.name(), device)
        return func(*args, **given)


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
        if name in _RECURRENT and is_accelerator(device := _device(args, given)) and _recurrent_drops(args):
            raise _unseeded(name, device)  # their kernels keep what they draw from, whatever the seed is
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


def _device(args: Sequence[Any], given: Mapping[str, Any]) -> torch.device:
    first = next((each for each in args if isinstance(each, Tensor)), None)
    return first.device if first is not None else torch.device(given.get("device") or "cpu")


def _recurrent_drops(args: Sequence[Any]) -> bool:
    """Returns whether a recurrent layer drops; dropout and mode stand one further behind for packed sequences."""
    dropout, training = args[5:7] if isinstance(args[5], float) else args[6:8]
    return bool(training) and dropout > 0.0


def _unseeded(name: str, device: torch.device) -> UserError:
    return UserError(
        f"{name} on {device} draws in a kernel that takes no seed: give shoal.remote no seed, or set the dropout of "
        "attention and of recurrent layers to 0"
    )


def _may_draw(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    """Returns whether a call may draw: kernels of attention do so for a dropout above 0 alone."""
    dropout = dropout_of(func, args, given)
    return dropout is None or dropout > 0.0


def _dropout(generator: torch.Generator, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Computes aten's native_dropout, the form that accelerators have, which takes no generator: the result, and what
    was kept."""
    if train is False or p == 0.0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    kept = torch.empty_like(input, dtype=torch.bool).bernoulli_(1.0 - p, generator=generator)
    return (input * kept * (1.0 / (1.0 - p)) if p < 1.0 else torch.zeros_like(input)), kept


def _from(seed: int) -> Callable[[torch.device], torch.Generator]:
    """Returns what gives each device's generator, all of them with this seed."""
    made: dict[torch.device, torch.Generator] = {}

    def of(device: torch.device) -> torch.Generator:
        device = torch.empty(0, device=device).device  # with its index
        if device not in made:
            made[device] = torch.Generator(device).manual_seed(seed)
        return made[device]

    return of


def _again(device: torch.device) -> NoReturn:
    raise UserError(
        "a module draws in its backward, where torch.utils.checkpoint runs its forward again: a seed does not repeat "
        "draws. Give shoal.remote no seed, or recompute nothing that draws"
    )
