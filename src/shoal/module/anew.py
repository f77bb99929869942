"""What a forward that is computed again runs in, each time anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any


class Anew(AbstractContextManager[None]):
    """A context that makes and enters new contexts, one inside the other, each time it is entered."""

    def __init__(self, makers: Sequence[Callable[[], AbstractContextManager[Any]]]) -> None:
        self._makers = makers
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:  # one that fails ends those before it
            for make in self._makers:
                stack.enter_context(make())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
