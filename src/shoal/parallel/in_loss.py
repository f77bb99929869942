"""Looks at what a loss computes outside of its model, for what ranks with a part of the rows, or of the weights, cannot
compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode


class InLoss(TorchFunctionMode):
    """A mode of the functions that a loss calls; off in its model, where it would cost time. `watch` says which that
    is, `looking` wraps the loss, and `check` of a subclass sees each call."""

    def __init__(self) -> None:
        super().__init__()
        self._is_open = self._is_on = self._in_model = False
        self._above = 0

    def watch(self, module: nn.Module) -> None:
        """Registers hooks that switch the mode off in `module`."""
        module.register_forward_pre_hook(lambda *_: self.into_model())
        module.register_forward_hook(self.out_of_model, always_call=True)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Wraps a loss."""
        self._is_open, self._in_model, self._above = True, False, 0
        self._switch(True)
        try:
            yield
        finally:
            self._switch(False)
            self._is_open = False

    def into_model(self) -> None:
        """Goes from the loss into the model, where operations are not looked at; off, they cost nothing there."""
        self._in_model = True
        self._switch(False)

    def out_of_model(self, module: nn.Module, args: Any, output: Any) -> None:
        """Comes back to the loss with the model's `output`, as its forward hook."""
        self._in_model = False
        if self._is_open and not self._is_on:
            self._switch(True)

    def check(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Raises UserError for a call that cannot be so."""
        raise NotImplementedError

    def _switch(self, on: bool) -> None:
        """Puts the mode on, below as many others as it was when it was taken off, or takes it off. One that is in a
        call that it sees is off already."""
        stack = _get_current_function_mode_stack()
        if on == self._is_on or not (on or self in stack):
            return
        if not on:
            self._above = len(stack) - 1 - stack.index(self)
        above = min(self._above, len(stack))  # another of this kind may be off still
        others = [_pop_mode() for _ in range(above)]
        _push_mode(self) if on else _pop_mode()
        for mode in reversed(others):
            _push_mode(mode)
        self._is_on = on

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._in_model:
            self.check(func, args, kwargs or {}, result)
        return result
