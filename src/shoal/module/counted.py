"""Numbers that modules, or their classes, keep as plain attributes and that each forward changes: a count of forwards,
a temperature that falls. Each replica has its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shoal.module.kept_outside import OTHERS


class Counted:
    """Watches the numbers of `root`, which has as many replicas as `replicas` says."""

    def __init__(self, root: nn.Module, replicas: int) -> None:
        # here, and once: in a forward a walk through the modules of a stage asks for its weights
        self._tables = {prefix: vars(each) for prefix, each in root.named_modules() if _is_the_users(type(each))}
        kinds = {base for each in root.modules() for base in type(each).__mro__}
        self._tables |= {kind.__qualname__: vars(kind) for kind in kinds if _is_the_users(kind)}
        self._replicas = replicas
        self._changed: set[str] | None = None
        self._is_told = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wraps a forward. Warns of a number that this one has changed, and the one that was watched before it; what
        is set once, in a first forward, is none. A logged count is harmless, so it is no error."""
        before = self._numbers()
        yield
        changed = {name for name, now in self._numbers().items() if before.get(name, now) != now}
        again, self._changed = changed & (self._changed or set()), changed
        if again and not self._is_told:
            self._is_told = True
            warnings.warn(
                f"forwards change {min(again)}, a number that no buffer keeps, and each of {self._replicas} replicas "
                "goes on with its own: losses are not those of one process where a forward computes with it. Change "
                "it between steps then, alike on all ranks, or take plan.dp = 1",
                stacklevel=2,
            )

    def _numbers(self) -> dict[str, float]:
        return {
            f"{prefix}.{name}".lstrip("."): value
            for prefix, table in self._tables.items()
            for name, value in table.items()
            if type(value) in (int, float, bool)
        }


def _is_the_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in OTHERS
