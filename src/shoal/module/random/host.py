"""Draws of forwards from numpy's and Python's global generators, as SpecAugment and LayerDrop make them.

Their functions (`random.random`, `np.random.rand`) belong to the process: data loaders draw from them in threads beside
a forward. So a forward gets generators of its own, and the functions give way to others while one is under way: in a
thread that is inside `host_draws` these draw from its generators, in any other from the global ones, in both modules'
own order. Functions that a module imported by name (`from random import random`) are not seen.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from shoal.module.random.by_thread import OpenByThread


@dataclass(frozen=True)
class HostState:
    """What next draws are made from: `seed`, or the states that the generators came to, which are large (2.5 KB)."""

    seed: int = 0
    python: Any = None
    numpy: Any = None


class _Generators:
    """Python's and numpy's, made when they are first drawn from: most forwards draw from neither."""

    def __init__(self, start: HostState) -> None:
        self._start = start
        self._state: HostState | None = start  # None: something was drawn since it was last asked for

    @cached_property
    def python(self) -> random.Random:
        made = random.Random(self._start.seed)
        if self._start.python is not None:
            made.setstate(self._start.python)
        return made

    @cached_property
    def numpy(self) -> np.random.RandomState:
        state = self._start.numpy
        if state is None:
            return np.random.RandomState(self._start.seed & 0xFFFFFFFF)
        made = np.random.RandomState(getattr(np.random, state["bit_generator"])(0))
        made.set_state(state)
        return made

    def method(self, kind: str, name: str) -> Callable[..., Any]:
        """Returns what a call of the method `name` of "python" or "numpy" is to call."""
        self._state = None
        return getattr(getattr(self, kind), name)

    def state(self) -> HostState:
        if self._state is None:
            start, made = self._start, vars(self)
            self._state = HostState(
                start.seed,
                self.python.getstate() if "python" in made else start.python,
                self.numpy.get_state(legacy=False) if "numpy" in made else start.numpy,
            )
        return self._state


class _Open(OpenByThread[_Generators]):
    """The generators of threads inside `host_draws`."""

    def _give_way(self) -> None:
        for namespace, name, original, stand_in in _STAND_INS:
            if namespace.get(name) is original:  # else somebody has put another there
                namespace[name] = stand_in

    def _put_back(self) -> None:
        for namespace, name, original, stand_in in _STAND_INS:
            if namespace.get(name) is stand_in:
                namespace[name] = original

    def here(self) -> _Generators | None:
        """Returns those that this thread draws from; None for the global ones.

        A thread of autograd, which runs the backward of a device, has the only ones that are open.
        """
        mine = self._by_thread.get(threading.get_ident())
        if mine:
            return mine[-1]
        return super().here() if self._by_thread and torch._C._current_graph_task_id() != -1 else None


_open = _Open()


@torch.compiler.disable(reason="numpy and Python draw by the microbatch, outside of graphs")
def _draw(original: Callable[..., Any], kind: str, method: str, /, *args: Any, **kwargs: Any) -> Any:
    generators = _open.here()
    return (original if generators is None else generators.method(kind, method))(*args, **kwargs)


def _stand_ins() -> list[tuple[dict[str, Any], str, Any, Any]]:
    """Returns (namespace, name, function, what stands in for it) of all functions that draw from, or set, a global
    generator: methods of one object, in numpy with a few more."""
    shared: Any = random._inst, np.random.mtrand._rand
    more = {"seed": "seed", "sample": "random_sample", "ranf": "random_sample"}
    found: list[tuple[dict[str, Any], str, Any, Any]] = []
    for kind, module, owner in zip(("python", "numpy"), (random, np.random), shared, strict=True):
        names = {name: name for name, value in vars(module).items() if getattr(value, "__self__", None) is owner}
        for name, method in (names | (more if module is np.random else {})).items():
            original = getattr(module, name)
            # no function, which a class that takes it for an attribute would bind
            found.append((vars(module), name, original, partial(_draw, original, kind, method)))
    return found


_STAND_INS = _stand_ins()


def host_state() -> HostState:
    """Returns what this thread's next draws are made from; inside `host_draws` the same object until something is
    drawn."""
    generators = _open.here()
    if generators is None:
        return HostState(0, random.getstate(), np.random.get_state(legacy=False))
    return generators.state()


@contextmanager
def host_draws(start: int | HostState) -> Iterator[None]:
    """Has this thread draw from generators of its own inside the context, which begin from a seed or from a state."""
    _open.enter(_Generators(HostState(start) if isinstance(start, int) else start))
    try:
        yield
    finally:
        _open.leave()
