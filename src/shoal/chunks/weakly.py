"""Hooks that do not keep alive the object they call.

The garbage collector does not see a tensor's hooks: what they hold would live as long as the tensor, and the tensor as
long as what holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Wraps the bound `method`: it is called as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    call.__dict__["is_weak"] = True
    return call


def is_weak(hook: Callable[..., Any]) -> bool:
    """Whether `hook` was made by `weakly`, wrapped in a `partial` or not: then it is Shoal's own, not a user's."""
    while isinstance(hook, partial):
        hook = hook.func
    return "is_weak" in getattr(hook, "__dict__", ())
