"""Hooks that do not keep alive who listens. A tensor's hooks are out of the garbage collector's sight: what they hold would live as long as the tensor,
and the tensor as long as what holds it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls `method`, a bound one, as long as its object lives; then nothing."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    call.__dict__["is_weak"] = True
    return call


def is_weak(hook: Callable[..., Any]) -> bool:
    """Whether it was made by `weakly`, as a `partial` or not: it is Shoal's own, not a user's."""
    while isinstance(hook, partial):
        hook = hook.func
    return "is_weak" in getattr(hook, "__dict__", ())
