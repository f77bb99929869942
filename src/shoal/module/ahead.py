"""A factory whose next model is built before anybody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

from torch import nn

from shoal.module.build import Built, build


class Ahead:
    """Makes what `factory` makes; `build_ahead` takes what `prepare` has built, once."""

    def __init__(self, factory: Callable[[], nn.Module]) -> None:
        self._factory = factory
        self._ready: tuple[int, Built] | None = None  # and its seed

    def __call__(self) -> nn.Module:
        return self._factory()

    def prepare(self, seed: int) -> None:
        """Builds the next model, unless that was done. It has no weights, if it can be recorded (see module.build). One
        that cannot be built now raises when it is needed."""
        if self._ready is None:
            with suppress(Exception):
                self._ready = seed, build(self._factory, seed)

    def taken(self, seed: int) -> Built | None:
        """Returns what was prepared for this seed, once; else None."""
        ready, self._ready = self._ready, None
        return ready[1] if ready is not None and ready[0] == seed else None

    def handed_on(self, factory: Callable[[], nn.Module], known: Collection[int]) -> Ahead:
        """Returns one that makes what `factory` makes, with what was prepared here, unless that has modules whose ids
        are `known`."""
        other = Ahead(factory)
        ready, self._ready = self._ready, None
        if ready is not None and not any(id(each) in known for each in ready[1].module.modules()):
            other._ready = ready
        return other


def build_ahead(model: nn.Module | Callable[[], nn.Module], seed: int) -> Built:
    """Builds `model` as `module.build` does, or takes what was prepared."""
    ready = model.taken(seed) if isinstance(model, Ahead) else None
    return build(model, seed) if ready is None else ready
