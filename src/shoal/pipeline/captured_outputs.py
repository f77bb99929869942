"""Outputs that parts of a model give besides their results: those of inner modules, collected by hooks, as models of
`transformers` collect the logits of all routers for their balance loss, and the weights of attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from shoal.errors import UserError
from shoal.pipeline.units import Unit

COLLECTS = "output_capturing_hook"
"""Name of the hook in `transformers.utils.output_capturing`."""


def install(module: nn.Module) -> None:
    """Installs the hooks by which models of `transformers` collect outputs.

    The models would do so at their first call, when stand-ins are in the place of layers. Raises UserError for a
    version of the library that collects logits of routers in another way.
    """
    routers = bool(getattr(getattr(module, "config", None), "output_router_logits", False))
    models = [each for each in module.modules() if _collects(each)]
    if not routers and not models:
        return
    try:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError as error:
        if not routers:
            return
        raise UserError(
            f"plan.pp > 1: how this version of transformers collects router logits is not known ({error}): take 5.0 or "
            "later, or build the model with output_router_logits = False"
        ) from error
    for each in models or [getattr(module, "base_model", module)]:  # the outermost first, which do it for those inside
        maybe_install_capturing_hooks(each)  # type: ignore[arg-type]


def hand_over(part: nn.Module, stand_in: nn.Module) -> None:
    """Moves to a stand-in the hooks that collect what `part` as a whole gives (hidden states of layers), so that they
    run in every stage that calls it."""
    for number, hook in list(part._forward_hooks.items()):
        if _collected(hook) is not None:
            del part._forward_hooks[number]
            stand_in.register_forward_hook(hook)


class Taps:
    """Records the collected outputs of each unit, by hooks of its own on the modules concerned.

    `units`: the parts of the model, by index.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._of = [[inner for inner in _inside(unit.module) if _hooks(inner)] for unit in units]
        self._outputs: list[Any] | None = None  # of the running call
        for taps in self._of:
            for place, tap in enumerate(taps):
                indices = frozenset(_nonlocals(hook)["index"] for hook in _hooks(tap))
                tap.register_forward_hook(partial(self._note, place, indices))

    def run(self, unit: int, part: nn.Module, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """Runs `part`; returns its result and, of each tap, the first input and the outputs collected meanwhile."""
        outputs = self._outputs = [None] * len(self._of[unit])
        try:
            return part(*args, **kwargs), outputs
        finally:
            self._outputs = None

    def replay(self, unit: int, outputs: Sequence[Any]) -> None:
        """Passes `outputs`, collected from a call on another rank, to the hooks that collect."""
        for tap, noted in zip(self._of[unit], outputs, strict=True):
            for hook in _hooks(tap) if noted is not None else ():
                hook(tap, *noted)

    def _note(self, place: int, indices: frozenset[int], module: nn.Module, args: Any, output: Any) -> None:
        if self._outputs is None:  # while backward runs a forward again
            return
        if isinstance(output, tuple):
            output = tuple(each if at in indices else None for at, each in enumerate(output))
        self._outputs[place] = args[:1], output


def _inside(part: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules in `part` whose outputs a model around it collects, not one inside it."""
    if not _collects(part):
        for child in part.children():
            if not _collects(child):
                yield child
                yield from _inside(child)


def _collects(module: nn.Module) -> bool:
    return bool(getattr(module, "_can_record_outputs", None))


def _hooks(module: nn.Module) -> list[Any]:
    return [hook for hook in module._forward_hooks.values() if _collected(hook) is not None]


def _collected(hook: Any) -> Any:
    """Returns the key under which a hook of transformers collects; None for other hooks."""
    return _nonlocals(hook).get("key") if getattr(hook, "__name__", "") == COLLECTS else None


def _nonlocals(hook: Any) -> Mapping[str, Any]:
    return inspect.getclosurevars(hook).nonlocals
