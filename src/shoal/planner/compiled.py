"""Whether the blocks of a model can be compiled, each into one graph, found without computing or compiling anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from shoal.errors import UserError
from shoal.module.build import without_values
from shoal.module.compiling import blocks
from shoal.module.printed import printed
from shoal.module.recompute import without_caches
from shoal.module.selective import selects
from shoal.module.selective_graphs import checkpointed
from shoal.plan import Plan
from shoal.planner.dry_run import run
from shoal.planner.prepare import Subject, blank, in_one_line, prepared
from shoal.planner.shapes import Shape, shapes_of, tensors_of


def why_not_compiled(subject: Subject) -> str:
    """Why the blocks of the model of `subject` are not compiled without being asked for: torch's compiler does not
    trace each of them into one graph; "" where it does. Each kind of block is traced on the meta device with what a dry
    run calls it with, which takes seconds. Raises UserError for a model that cannot be run dry."""
    return _first_of_each(subject, lambda block, *given: _traced(block.forward, *given))


def keeps_inside(subject: Subject, pins: Mapping[str, Any]) -> bool:
    """Whether compiled blocks of the model of `subject`, each of which is one graph, can keep what some operations give
    (see module/selective_graphs). Raises UserError where they cannot and `pins` ask for both, and for a model that
    cannot be run dry."""
    why = _first_of_each(subject, _selected)
    if why and pins.get("compile") and selects(pins.get("recompute", "none")):
        raise UserError(f'plan.recompute = "selective" beside plan.compile: {why}: take "full", or compile = false')
    return not why


def _first_of_each(subject: Subject, look: Callable[[nn.Module, Any, Any], str]) -> str:
    """What `look` says against the first block of a kind, called as in a dry run; "" where it says nothing."""
    module = without_values(subject.factory)
    if module is None:
        return "the model cannot be made without its values"
    without_caches(module)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(subject.precision.model)
    known: set[str] = set()
    for block, calls in zip(blocks(module.train()), _calls(subject), strict=True):
        shapes = [(name, tuple(each.shape)) for name, each in block.named_parameters()]
        key = repr((printed(block), shapes, calls))
        if calls and key not in known:
            known.add(key)
            if why := look(block, *tensors_of(calls[0], _blank)):
                return f"{type(block).__name__} is not one graph for torch.compile: {why}"
    return ""


def _calls(subject: Subject) -> list[list[tuple[Any, Any]]]:
    """What each block of the model is called with in a microbatch."""
    found: list[list[tuple[Any, Any]]] = []
    with in_one_line(), prepared(blank(subject.factory), replace(subject, plan=Plan(), rank=0)) as ready:
        for block in blocks(ready.local.module):
            found.append([])
            block.register_forward_pre_hook(partial(_note, found[-1]), with_kwargs=True)
        run(ready, subject)
    return found


def _note(calls: list[tuple[Any, Any]], module: nn.Module, args: Any, kwargs: Any) -> None:
    calls.append(shapes_of((args, kwargs)))


def _blank(shape: Shape) -> Tensor:
    return torch.empty(shape.size, dtype=shape.dtype, device="meta", requires_grad=shape.wants_grad)


def _traced(forward: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """Why a forward is not one graph; "" if it is."""
    try:
        torch.compile(forward, backend="eager", fullgraph=True)(*args, **kwargs)
    except Exception as error:  # the compiler's, or of somebody else's code; it has many lines
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return ""


def _selected(block: nn.Module, args: Any, kwargs: Any) -> str:
    """Why a block is not one graph that keeps what some operations give: it changes something but its tensors, or it
    draws, at which the graph breaks where dropout is keyed."""
    drawn: list[str] = []

    def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if torch.Tag.nondeterministic_seeded in operation.tags:
            drawn.append(f"it draws numbers ({operation})")
        return CheckpointPolicy.PREFER_RECOMPUTE

    why = _traced(checkpointed(block.forward, policy), args, kwargs)
    return why or (drawn[0] if drawn else "")
