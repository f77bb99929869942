"""torch._dynamo, imported when something asks for more of it than whether it is there.

Fake tensors, optimizers and every function that is marked as one never to be compiled import it, and where nothing is
compiled that is all they do with it. It takes almost as long as the rest of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

NAME = "torch._dynamo"
ALONE = (f"{NAME}.config", f"{NAME}._trace_wrapped_higher_order_op")
"""Its modules that can be had without the others: the settings, and what transformers makes masks with."""
SIZE = 27 * 2**20
"""Bytes that a process has more with it, beside those of the modules that it brings: torch 2.13, CPython 3.11."""
BROUGHT = {"torch.fx.experimental.symbolic_shapes": 33 * 2**20, "torch.distributed.fsdp": 10 * 2**20}


def later() -> None:
    """From now on `import torch._dynamo` gives a stand-in, which becomes the real one once that is needed. Nothing
    changes where it is imported already."""
    if NAME not in sys.modules:
        sys.modules[NAME] = _Later(NAME)
        sys.meta_path.insert(0, _Finder())


def is_later() -> bool:
    """Whether torch._dynamo is still to come."""
    return isinstance(sys.modules.get(NAME), _Later)


def bytes_to_come() -> int:
    """Bytes that this process lacks beside one that trains, where torch._dynamo is always there."""
    if not is_later():
        return 0
    return SIZE + sum(nbytes for name, nbytes in BROUGHT.items() if name not in sys.modules)


class _Later(ModuleType):
    """Does what needs no compiler: marks functions, and is asked to break a graph where there is none."""

    def __init__(self, name: str) -> None:
        super().__init__(name, __doc__)
        self.__path__: list[str] = []  # submodules are found by _Finder
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.disable = _disable
        self.graph_break = lambda msg="": None
        self.assume_constant_result = _assume_constant_result
        self.allow_in_graph = self._allow
        self._allowed: list[Any] = []

    def _allow(self, fn: Any) -> Any:
        self._allowed.append(fn)
        return fn

    def become(self) -> ModuleType:
        """Imports the real one in its place."""
        alone = {name.rpartition(".")[2]: sys.modules[name] for name in ALONE[1:] if name in sys.modules}
        for name in (NAME, ALONE[0]):  # the settings are read once more, by names that are still to come
            sys.modules.pop(name, None)
        real = import_module(NAME)
        vars(real).update(alone)
        real.allow_in_graph(self._allowed)
        return real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(), name)


def _real() -> Any:
    known = sys.modules.get(NAME)
    return known.become() if isinstance(known, _Later) else import_module(NAME)


def _disable(fn: Any = None, recursive: bool = True, *, reason: str | None = None, wrapping: bool = True) -> Any:
    """Stands in for torch._dynamo.disable, which is asked once there is something to be disabled."""
    if fn is None:
        return partial(_disable, recursive=recursive, reason=reason, wrapping=wrapping)
    if not isinstance(fn, FunctionType) or not is_later():
        return _real().disable(fn, recursive, reason=reason, wrapping=wrapping)
    real: Callable[..., Any] | None = None

    @wraps(fn)
    def disabled(*args: Any, **kwargs: Any) -> Any:
        nonlocal real
        if real is None:
            if is_later():
                return fn(*args, **kwargs)
            real = _real().disable(fn, recursive, reason=reason, wrapping=wrapping)
        return real(*args, **kwargs)

    marks = {"_torchdynamo_disable": True, "_torchdynamo_disable_msg": reason, "_torchdynamo_orig_callable": fn}
    vars(disabled).update(marks)  # by these its compiler knows what it must not look into
    return disabled


def _assume_constant_result(fn: Any) -> Any:
    fn._dynamo_marked_constant = True
    return fn


class _Finder(MetaPathFinder):
    """Finds the modules of torch._dynamo while it is still to come: those that need the others are had from the real
    one."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if not fullname.startswith(f"{NAME}.") or not is_later():
            return None
        if fullname in ALONE:
            return PathFinder.find_spec(fullname, [f"{each}/_dynamo" for each in sys.modules["torch"].__path__])
        _real()
        module = import_module(fullname)
        return ModuleSpec(fullname, _There(module, module.__spec__))


class _There(Loader):
    """Gives a module that has been imported meanwhile."""

    def __init__(self, module: ModuleType, spec: ModuleSpec | None) -> None:
        self._module, self._spec = module, spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
