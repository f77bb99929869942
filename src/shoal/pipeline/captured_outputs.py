"""Outputs that parts of a model give besides their results: those of inner modules, collected by hooks, as models of
`transformers` collect the logits of all routers for their balance loss."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from shoal.errors import UserError
from shoal.pipeline.units import Unit

COLLECTS = "output_capturing_hook"
"""Name of the hook in `transformers.utils.output_capturing`."""


def install(module: nn.Module) -> None:
    """Installs the hooks on the routers of a model of `transformers` that collects their logits.

    The model would do so at its first call, when it no longer has all routers. Raises UserError for a version of the
    library that collects in another way.
    """
    if not getattr(getattr(module, "config", None), "output_router_logits", False):
        return
    try:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError as error:
        raise UserError(
            f"plan.pp > 1: how this version of transformers collects router logits is not known ({error}): take 5.0 or "
            "later, or build the model with output_router_logits = False"
        ) from error
    base: Any = getattr(module, "base_model", module)
    maybe_install_capturing_hooks(base)


class Taps:
    """Records the collected outputs of each unit, by hooks of its own on the modules concerned.

    `units`: the parts of the model, by index.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._of = [[part for part in unit.module.modules() if _hooks(part)] for unit in units]
        self._outputs: list[Any] | None = None  # of the running call
        for taps in self._of:
            for place, tap in enumerate(taps):
                tap.register_forward_hook(partial(self._note, place))

    def run(self, unit: int, part: nn.Module, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """Runs `part`; returns its result and the outputs collected meanwhile."""
        outputs = self._outputs = [None] * len(self._of[unit])
        try:
            return part(*args, **kwargs), outputs
        finally:
            self._outputs = None

    def replay(self, unit: int, outputs: Sequence[Any]) -> None:
        """Passes `outputs`, collected from a call on another rank, to the hooks that collect."""
        for tap, output in zip(self._of[unit], outputs, strict=True):
            for hook in _hooks(tap):
                hook(tap, (), output)

    def _note(self, place: int, module: nn.Module, args: Any, output: Any) -> None:
        if self._outputs is not None:  # None while backward runs a forward again
            self._outputs[place] = output


def _hooks(module: nn.Module) -> list[Any]:
    return [hook for hook in module._forward_hooks.values() if _collected(hook) == "router_logits"]


def _collected(hook: Any) -> Any:
    """Returns the key under which a hook of transformers collects; None for other hooks."""
    if getattr(hook, "__name__", "") != COLLECTS:
        return None
    return inspect.getclosurevars(hook).nonlocals.get("key")
