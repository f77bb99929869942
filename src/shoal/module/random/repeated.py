"""Forwards inside `torch.utils.checkpoint` repeat their draws when backward runs them again.

Where a module checkpoints what its own forward calls, as layers of `transformers` do after
`gradient_checkpointing_enable()`, its hooks do not run again; and modules that are called several times run again in
reverse. So the draws of each checkpointed call are noted when it begins.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch.utils import checkpoint

_module: Any = checkpoint
_torch_generator: Any = _module._checkpoint_without_reentrant_generator
_Reentrant: Any = _module.CheckpointFunction
_torch_forward: Any = _Reentrant.forward

Again = Callable[[], AbstractContextManager[None]]
"""Makes contexts in which the draws are those that came next when it was made."""


def _in(again: Again, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with again():
        return function(*args, **kwargs)


class Stand:
    """Stands in for the two ways in which torch checkpoints a function.

    `noted`: noted() gives the context maker of the call that begins now; None where draws are torch's own, which torch
    repeats.
    """

    def __init__(self, noted: Callable[[], Again | None]) -> None:
        self._noted = noted

    def put(self) -> None:
        """Puts the stand-ins in place."""
        _module._checkpoint_without_reentrant_generator = self._generator
        _Reentrant.forward = staticmethod(self._forward)

    def remove(self) -> None:
        """Puts torch's own functions back."""
        _module._checkpoint_without_reentrant_generator = _torch_generator
        _Reentrant.forward = staticmethod(_torch_forward)

    def _generator(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function` is what backward runs: the first time it is called elsewhere."""
        again = self._noted()
        return _torch_generator(function if again is None else partial(_in, again, function), *args, **kwargs)

    def _forward(self, ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        """`ctx` keeps what backward runs."""
        again = self._noted()
        result = _torch_forward(ctx, function, *args)
        if again is not None:
            ctx.run_function = partial(_in, again, function)
        return result
