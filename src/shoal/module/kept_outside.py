"""Tensors without values that a model's code keeps outside of the model: results of `functools.lru_cache`, entries of a
dict of a Python module, of a class or of a closure. A run on fake tensors, or on the meta device, leaves there what the
next forward, on real ones, would be given. What a Python module makes when it is imported in such a run (a forward of
`transformers` may import peft) has values, and none of that is seen as of the model."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper, partial
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from shoal.module.record import has_values

Table: TypeAlias = "dict[Any, Any] | _lru_cache_wrapper[Any]"

OTHERS = {*sys.stdlib_module_names, "torch", "shoal"}
"""Packages whose code keeps no such tensors."""


@contextmanager
def nothing_kept_outside(*owners: Any) -> Iterator[list[Any]]:
    """Drops, behind the context, what the code of `owners` has kept inside it: of modules, of factories, and of what is
    added to the list that is given."""
    found, imports = list(owners), _Imports()
    sys.meta_path.insert(0, imports)
    try:
        yield found
    finally:
        sys.meta_path.remove(imports)
        for table in _tables_of(*found):
            _drop(table, _has_no_values)


class _Imports:
    """Has the code of Python modules that are imported for the first time run outside of all modes. That of `OTHERS`
    runs as it is: torch imports some of its own to leave a mode."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in OTHERS:
            return None
        others = (each for each in list(sys.meta_path) if not isinstance(each, _Imports))
        spec = next((spec for each in others if (spec := each.find_spec(name, path, target)) is not None), None)
        loader: Any = None if spec is None else spec.loader
        if isinstance(getattr(loader, "__dict__", None), dict):
            loader.exec_module = partial(_outside_of_modes, loader.exec_module)
        return spec


def _outside_of_modes(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    with torch.inference_mode(False), _disable_current_modes(), torch._C.DisableTorchFunction():
        run(module)


def forgetting(owner: Any) -> Callable[[], None]:
    """Returns a function that empties the caches of the code of `owner`, so that what is called next computes all of
    its tensors, whoever was called before: results of `functools.lru_cache`, and what dicts have got since that has no
    values."""
    tables = [(each, len(each) if isinstance(each, dict) else 0) for each in _tables_of(owner)]

    def forget() -> None:
        for table, before in tables:
            if isinstance(table, dict):
                if len(table) > before:
                    _drop(table, _has_no_values)
            elif table.cache_info().currsize:
                _drop(table, _has_tensors)

    return forget


def _tables_of(*owners: Any) -> Iterator[Table]:
    """Yields what keeps results by their arguments in the code of `owners`."""
    for code in {each.__name__: each for owner in owners for each in _code_of(owner)}.values():
        for value in list(vars(code).values()):
            yield from _tables(value)
            if isinstance(value, type) and value.__module__ == code.__name__:
                for inner in list(vars(value).values()):
                    yield from _tables(inner)


def _code_of(owner: Any) -> Iterator[ModuleType]:
    """Yields the Python modules in which the classes of a module are defined, or a factory and the classes that it
    finds there, or is given."""
    if isinstance(owner, nn.Module):
        for kind in {type(each) for each in owner.modules()}:
            yield from _defining(kind)
    elif isinstance(owner, partial):
        for each in (owner.func, *owner.args, *owner.keywords.values()):
            yield from _code_of(each)
    elif isinstance(owner, type):
        yield from _defining(owner)
    elif isinstance(owner, FunctionType):
        for kind in (each for each in owner.__globals__.copy().values() if isinstance(each, type)):
            if issubclass(kind, nn.Module):
                yield from _defining(kind)
        yield from _own(owner.__module__)


def _defining(kind: type) -> Iterator[ModuleType]:
    for each in kind.__mro__:
        yield from _own(each.__module__)


def _own(name: str) -> Iterator[ModuleType]:
    if name in sys.modules and name.partition(".")[0] not in OTHERS:
        yield sys.modules[name]


def _tables(value: Any) -> Iterator[Table]:
    """Yields the tables of what a name in a Python module or a class stands for."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if type(value) is dict or isinstance(value, _lru_cache_wrapper):
        yield value
    elif isinstance(value, FunctionType):
        for kept in gc.get_referents(*(value.__closure__ or ())):  # a cell may be empty
            if not isinstance(kept, FunctionType):
                yield from _tables(kept)
        yield from _tables(vars(value).get("__wrapped__"))


def _drop(table: Table, which: Callable[[Any], bool]) -> None:
    """Drops from a dict the values of which `which` is true, and all results of a function if it is of one."""
    if isinstance(table, dict):
        for key in [key for key, each in list(table.items()) if which(each)]:
            table.pop(key, None)
    elif any(which(each) for each in gc.get_referents(table)):
        table.cache_clear()


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor | tuple | list | dict) and any(
        isinstance(each, Tensor) for each in tree_leaves(value)
    )


def _has_no_values(value: Any) -> bool:
    return isinstance(value, Tensor | tuple | list | dict) and any(
        isinstance(each, Tensor) and not has_values(each) for each in tree_leaves(value)
    )
