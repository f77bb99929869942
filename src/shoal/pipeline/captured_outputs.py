"""What parts of a model give beside their results: outputs of modules inside them that hooks collect, as models of `transformers` collect the logits of all routers for their balance loss."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from shoal.errors import UserError
from shoal.pipeline.units import Unit

COLLECTS = "output_capturing_hook"
"""The hook's name in `transformers.utils.output_capturing`."""


def install(module: nn.Module) -> None:
    """Puts the hooks on the routers of a model of `transformers` that collects their logits, which it would do itself at its first call: by then it has no longer all of them. UserError where
    this version of the library collects in another way."""
    if not getattr(getattr(module, "config", None), "output_router_logits", False):
        return
    try:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError as error:
        raise UserError(
            f"plan.pp > 1: how this version of transformers collects router logits is not known ({error}): take 5.0 or later, or build the model with output_router_logits = False"
        ) from error
    base: Any = getattr(module, "base_model", module)
    maybe_install_capturing_hooks(base)


class Taps:
    """Of `units`, by their places; puts hooks of its own on the modules whose outputs are collected."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._of = [[part for part in unit.module.modules() if _hooks(part)] for unit in units]
        self._outputs: list[Any] | None = None  # of the call that runs
        for taps in self._of:
            for place, tap in enumerate(taps):
                tap.register_forward_hook(partial(self._note, place))

    def run(self, unit: int, part: nn.Module, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """What `part` gives, and what is collected of it."""
        outputs = self._outputs = [None] * len(self._of[unit])
        try:
            return part(*args, **kwargs), outputs
        finally:
            self._outputs = None

    def replay(self, unit: int, outputs: Sequence[Any]) -> None:
        """Whoever collects gets `outputs` of a call that ran elsewhere."""
        for tap, output in zip(self._of[unit], outputs, strict=True):
            for hook in _hooks(tap):
                hook(tap, (), output)

    def _note(self, place: int, module: nn.Module, args: Any, output: Any) -> None:
        if self._outputs is not None:  # else it is computed again, in backward
            self._outputs[place] = output


def _hooks(module: nn.Module) -> list[Any]:
    return [hook for hook in module._forward_hooks.values() if _collected(hook) == "router_logits"]


def _collected(hook: Any) -> Any:
    """The key under which a hook of transformers collects; None of other hooks."""
    if getattr(hook, "__name__", "") != COLLECTS:
        return None
    return inspect.getclosurevars(hook).nonlocals.get("key")
