"""Builds a model without holding it: the factory runs on fake tensors while its initialisation is recorded. Each tensor
is then computed alone, at full shape, from the operations that it depends on. A draw is seeded by the name of the first
tensor that it reaches, so it is one value wherever it flows.

So every plan starts from the same weights, and no rank ever holds the whole model. Fake tensors are used, not the meta
device: they claim to be on the CPU, while libraries (transformers, `nn.init.orthogonal_`) skip their initialisation on
meta. A constructor that cannot be recorded (it reads values, sets a seed, brings a generator, or changes tensors that
existed before) runs on the CPU instead, which is reported. numpy's and Python's global generators are seeded while a
factory runs.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shoal.errors import ArgumentError, UserError
from shoal.module.blank import Unfilled, on_meta
from shoal.module.checked import check_shapes, check_trainable
from shoal.module.kept_outside import nothing_kept_outside
from shoal.module.known_calls import KnownCalls
from shoal.module.record import ONE_AT_A_TIME, Record, Unrecordable, seed_of, storage_of
from shoal.module.recordable import conversion_by_data, rejection_sampling_whole

HIDDEN = "it keeps modules that are not registered"
"""Why a model cannot be made on fake tensors."""


@dataclass
class Built:
    """A module and its initial values.

    module: on fake tensors if recorded
    value: value(name, tensor) gives a parameter's or buffer's initial value on the CPU, as the factory made it
    how: "recorded", "without values", "given" (a ready module), or why the factory had to run on the CPU
    given: tensors that this process made itself: all of a module that is not recorded, the constants of one that is
    """

    module: nn.Module
    value: Callable[[str, Tensor], Tensor]
    how: str
    given: Sequence[Tensor] = ()

    def forget(self) -> None:
        """Lets go of the initial values, which nobody asks for any more."""
        self.value, self.given = _forgotten, ()


def _forgotten(name: str, tensor: Tensor) -> Tensor:
    raise LookupError(f"the initial value of {name} is asked for after the model was laid out")


def build(model: nn.Module | Callable[[], nn.Module], seed: int) -> Built:
    """Builds `model`, a factory without arguments or a ready module. Raises UserError for parameters that cannot be
    trained."""
    return _checked(_build(model, seed))


def build_blank(factory: Callable[[], nn.Module]) -> Built:
    """Builds as `build` does a model whose initial values nobody asks for. Raises UserError as `build`."""
    try:
        module = _blank(factory)
    except UserError:
        raise
    except Exception:  # a constructor may fail on fake tensors in its own way
        return build(factory, 0)
    return _checked(Built(module, lambda name, tensor: tensor.detach(), "without values"))


def _checked(built: Built) -> Built:
    check_trainable(built.module)
    return built


def without_values(factory: Callable[[], nn.Module]) -> nn.Module | None:
    """Makes a model on the meta device; None where it cannot be made without values. Raises UserError for lazy
    layers."""
    try:
        made = on_meta(factory)
    except UserError:
        raise
    except Exception:  # a constructor may fail there in its own way; what is wrong with it is said where it is built
        return None
    check_shapes(made)
    return made


def _build(model: nn.Module | Callable[[], nn.Module], seed: int) -> Built:
    if isinstance(model, nn.Module):
        return Built(model, lambda name, tensor: tensor.detach().cpu(), "given", _only(_kept_tensors(model)))
    try:
        return _recorded(model, seed)
    except UserError:
        raise
    except Exception as error:  # a constructor may fail on fake tensors in its own way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    with _seeded(seed):
        module = _made(model())  # raises here if the model itself is wrong
    return Built(module, lambda name, tensor: tensor.detach(), f"built on CPU ({reason})", _only(_kept_tensors(module)))


class _Mode(FakeTensorMode):
    """The mode of a record, which a copy of a fake tensor shares with it.

    torch copies the mode too where a constructor copies a layer (as nn.TransformerEncoder does), and the weak
    references to storages that the mode keeps: each is then given back twice, which damages the heap.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mode:
        return self


class _Copies(TorchFunctionMode):
    """Makes copies that a record sees, where a constructor copies a constant or a tensor that existed before: torch
    copies the storage of a real tensor, and of a fake one the real value that it may keep to be read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if isinstance(tensor, FakeTensor):
            constant, tensor.constant = tensor.constant, None
            try:
                return func(tensor, memo)
            finally:
                tensor.constant = constant
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


def _blank(factory: Callable[[], nn.Module]) -> nn.Module:
    """Runs `factory` on fake tensors, which stay unfilled. Raises whatever it raises there."""
    mode = _Mode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # KnownCalls keeps more, and sooner
    fakes = mode, KnownCalls(mode), Unfilled()
    with ExitStack() as stack:
        stack.enter_context(_seeded(seed_of(0, "the record")))
        code = stack.enter_context(nothing_kept_outside(factory))
        for each in (*fakes, rejection_sampling_whole(None), conversion_by_data()):
            stack.enter_context(each)
        with _Copies():
            module = _made(factory())
        code.append(module)
    if _hides_fakes(module, _attributes(module)):
        raise Unrecordable(HIDDEN)
    if all(isinstance(each, FakeTensor) for each in module.parameters()):
        return module
    return _copied(module)  # made before: what is done to it is not for the caller, who goes on with it


def _copied(module: nn.Module) -> nn.Module:
    """Copies `module` but for its parameters and buffers, which the copy shares."""
    shared: dict[int, Any] = {id(each): each for _, each in _named_tensors(module)}
    try:
        return copy.deepcopy(module, shared)
    except (TypeError, RuntimeError) as error:
        raise UserError(
            f"the factory returns a model that was there before and cannot be copied ({error}): give a function that "
            "makes a new one"
        ) from error


def _recorded(factory: Callable[[], nn.Module], seed: int) -> Built:
    """Runs `factory` on fake tensors. Raises whatever it raises if it cannot be recorded."""
    with _seeded(seed_of(seed, "the record")):  # a seed that no constructor sets by chance
        record = Record()
        mode = _Mode(allow_non_fake_inputs=True)
        with (
            nothing_kept_outside(factory) as code,
            mode,
            KnownCalls(mode),
            record,
            rejection_sampling_whole(record),
            conversion_by_data(),
            _Copies(),
        ):
            module = _made(factory())
            code.append(module)
    tensors, attributes = _named_tensors(module), _attributes(module)
    if _hides_fakes(module, attributes):
        raise Unrecordable(HIDDEN)
    kept = _with_tensors(tensors, attributes)
    if not all(record.makes(t) for _, t in kept if isinstance(t, FakeTensor)):
        raise Unrecordable("it makes a tensor of the storage of another one, as copy.copy does")
    names = {storage_of(t): name for name, t in reversed(tensors) if isinstance(t, FakeTensor)}
    sites = record.sites([(name, t) for name, t in kept if isinstance(t, FakeTensor)], names)
    given = [*record.constants(sites), *(t for t in _only(kept) if not isinstance(t, FakeTensor))]
    return Built(module, lambda name, tensor: record.replay(tensor, name, sites, seed), "recorded", given)


def _made(module: Any) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ArgumentError("model", f" returned a {type(module).__name__}: a factory returns the module that it made")
    return module


def _only(named: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
    """Returns the tensors of `named`, each once."""
    return list({id(tensor): tensor for _, tensor in named}.values())


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _kept_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns parameters, buffers and the tensors in plain attributes, by name."""
    return _with_tensors(_named_tensors(module), _attributes(module))


def _with_tensors(named: list[tuple[str, Tensor]], attributes: list[tuple[str, Any]]) -> list[tuple[str, Tensor]]:
    return [*named, *((name, leaf) for name, leaf in attributes if isinstance(leaf, Tensor))]


def _hides_fakes(module: nn.Module, attributes: list[tuple[str, Any]]) -> bool:
    """Returns whether there are fake tensors in modules in plain `attributes` (in a list, say) that are not registered
    anywhere."""
    found = [leaf for _, leaf in attributes if isinstance(leaf, nn.Module)]
    hidden = set(found).difference(module.modules()) if found else ()
    return any(isinstance(t, FakeTensor) for each in hidden for _, t in _named_tensors(each))


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Returns what the plain attributes of all modules hold, by name. Most are empty dicts of hooks."""
    return [
        (f"{prefix}.{name}".lstrip("."), leaf)
        for prefix, owner in module.named_modules()
        for name, value in vars(owner).items()
        if name not in ("_parameters", "_buffers", "_modules") and not (isinstance(value, dict) and not value)
        for leaf in tree_leaves(value)
    ]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds, inside the context, the generators that a constructor may draw from: torch's, numpy's and Python's."""
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        states = random.getstate(), np.random.get_state()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
