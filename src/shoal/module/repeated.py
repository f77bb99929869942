"""Forwards inside `torch.utils.checkpoint` find what was around them when backward runs them again.

Where a module checkpoints what its own forward calls, as layers of `transformers` do after
`gradient_checkpointing_enable()`, its hooks do not run again; modules that are called several times run again in
reverse; and contexts that were open may be closed. So what is around each checkpointed call, as the draws that come
next, is noted when it begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from torch.utils import checkpoint

_module: Any = checkpoint
_torch_generator: Any = _module._checkpoint_without_reentrant_generator
_Reentrant: Any = _module.CheckpointFunction
_torch_forward: Any = _Reentrant.forward

Again = Callable[[], AbstractContextManager[None]]
"""Makes contexts in which is found what was there when it was made."""
Noted = Callable[[], Again | None]
"""Gives the context maker of the checkpointed call that begins now; None where there is nothing to find again."""

_lock = threading.Lock()
_asked: list[Noted] = []


def note(noted: Noted) -> None:
    """Has `noted` asked at each checkpointed call, until it is forgotten."""
    with _lock:
        _asked.append(noted)
        _module._checkpoint_without_reentrant_generator = _generator
        _Reentrant.forward = staticmethod(_forward)


def forget(noted: Noted) -> None:
    """Asks `noted` no more."""
    with _lock:
        _asked.remove(noted)
        if not _asked:
            _module._checkpoint_without_reentrant_generator = _torch_generator
            _Reentrant.forward = staticmethod(_torch_forward)


def _again() -> list[Again]:
    with _lock:
        asked = list(_asked)
    return [again for noted in asked if (again := noted()) is not None]


def _in(all_again: Sequence[Again], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as stack:
        for again in all_again:
            stack.enter_context(again())
        return function(*args, **kwargs)


def _generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function` is what backward runs: the first time it is called elsewhere."""
    return _torch_generator(partial(_in, again, function) if (again := _again()) else function, *args, **kwargs)


def _forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
    """`ctx` keeps what backward runs."""
    again = _again()
    result = _torch_forward(ctx, function, *args)
    if again:
        ctx.run_function = partial(_in, again, function)
    return result
