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


def install(module: nn.Module) -> bool:
    """Installs the hooks by which models of `transformers` collect outputs; returns whether logits of routers are.

    The models would do so at their first call, when stand-ins are in the place of layers. Raises UserError for a
    version of the library that collects logits of routers in another way.
    """
    routers = bool(getattr(getattr(module, "config", None), "output_router_logits", False))
    models = [each for each in module.modules() if hasattr(each, "_can_record_outputs")]
    if not routers and not models:
        return False
    try:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError as error:
        if not routers:
            return False
        raise UserError(
            f"plan.pp > 1: how this version of transformers collects router logits is not known ({error}): take 5.0 or "
            "later, or build the model with output_router_logits = False"
        ) from error
    for each in models or [getattr(module, "base_model", module)]:  # the outermost first, which do it for those inside
        maybe_install_capturing_hooks(each)  # type: ignore[arg-type]
    return routers


def hand_over(part: nn.Module, stand_in: nn.Module, routers: bool) -> None:
    """Moves to a stand-in the hooks that collect what `part` as a whole gives (hidden states of layers), so that they
    run in every stage that calls it, and removes those inside of it, but of routers where these are collected."""
    for each in part.modules():
        for number, hook in list(each._forward_hooks.items()):
            key = _collected(hook)
            if key is None or (routers and key == "router_logits"):
                continue
            del each._forward_hooks[number]
            if each is part:
                stand_in.register_forward_hook(hook)


class Taps:
    """Records the collected outputs of each unit, by hooks of its own on the modules concerned.

    `units`: the parts of the model, by index; `wanted`: whether anything is collected (see `install`).
    """

    def __init__(self, units: Sequence[Unit], wanted: bool) -> None:
        self._of = [[part for part in unit.module.modules() if wanted and _hooks(part)] for unit in units]
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
