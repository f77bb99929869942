"""Methods that are asked once: of searches that differ in little, what is the same is found by the first."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from shoal.planner.degrees import Spread

P = ParamSpec("P")
T = TypeVar("T")


class once(Generic[P, T]):
    """A method of degrees and more, whose answers are kept. Where its owner has another one as `known` which gives the
    same of some degrees (`is_known`), that is asked."""

    def __init__(self, method: Callable[Concatenate[Any, Spread, P], T]) -> None:
        self._method = method

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def known(self, owner: Any) -> Any:
        """The other one that is asked, None where there is none."""
        return owner.known

    def __get__(self, owner: Any, _: type | None = None) -> Callable[Concatenate[Spread, P], T]:
        kept: Any = cache(partial(self._method, owner))
        known = self.known(owner)
        found = kept
        if known is not None:
            there, is_known = getattr(known, self._name), owner.is_known

            def found(spread: Spread, *rest: Any) -> Any:
                return (there if is_known(spread) else kept)(spread, *rest)

        vars(owner)[self._name] = found  # from now on it is an attribute
        return found


class once_in_as_much_memory(once[P, T]):
    """Keeps what depends on how much memory there is too: another one is asked where that is the same."""

    def known(self, owner: Any) -> Any:
        known = owner.known
        return known if known is not None and known.task.most == owner.task.most else None
