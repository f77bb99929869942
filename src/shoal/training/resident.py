"""What stands where others gather weights: all weights are whole at all times."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext


class Resident:
    """Answers like chunks.Gather, for weights that never come and go."""

    def step(self, kind: Hashable) -> AbstractContextManager[None]:
        return nullcontext()

    def watching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def between(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, kind: Hashable) -> None: ...

    def left(self) -> None: ...

    def backward_begins(self) -> None: ...

    def backward_is_over(self) -> None: ...

    def end(self) -> None: ...

    def abandon(self) -> None: ...
