"""The state that a rank keeps of one forward of a stage, until its backward is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.errors import UserError
from shoal.pipeline.arrived import Box
from shoal.pipeline.handed import Handed
from shoal.pipeline.left import put, read
from shoal.pipeline.routes import WITHIN, Calls, Given, Routes, Shape, Value
from shoal.pipeline.split import Split
from shoal.pipeline.split_backward import Start

CALLED = (
    ", which says what goes from stage to stage. Values, or draws, may decide which parts are called (an if between "
    f"them, LayerDrop) within one stage alone: {WITHIN}. Layers that are dropped by chance all stay with layerdrop = 0"
)
"""What becomes of a microbatch that takes another way through the parts of a model than the first one did."""


class Pass(Calls):
    """A forward of a stage on a microbatch (split.Forward), with the state that its backward needs.

    split: the model with this rank's stages
    stage: the one that runs
    routes: of the kind of microbatch
    values: received from earlier stages
    device: of the stand-ins for results of others that are not used
    """

    def __init__(
        self, split: Split, stage: int, routes: Routes, values: Mapping[Value, Tensor], device: torch.device
    ) -> None:
        super().__init__()
        self._stage = stage
        self._split, self._routes, self._own = split, routes, routes.stages[stage]
        later = range(stage + 1, len(routes.stages))
        self._wanted = {value for target in later for value in routes.between(stage, target)}
        self._values, self._device = values, device
        self.boxes: dict[Value, Box] = {}
        if torch.is_grad_enabled():
            self.boxes = {value: Box(tensor) for value, tensor in values.items() if tensor.dtype.is_floating_point}
        self.given: dict[Value, Tensor] = {}
        self.objective: Tensor | None = None
        self._in_a_part = False
        self.recall: Callable[[], None] = lambda: None
        self.starts: list[Start] = []  # where the second half of backward starts
        # roots and gradients of a backward that runs as a whole in the second half
        self.later: tuple[list[Tensor], list[Tensor | None]] = ([], [])

    def own(self, unit: int, part: nn.Module, args: Any, kwargs: Any) -> Any:
        self._in_a_part = True
        result, beside = self._split.taps.run(unit, part, args, kwargs)
        self._in_a_part = False
        call = self.count(unit)
        given = self._routes.given(unit, call)
        behind = {} if given is None else read(part, given.left) | Handed(args, kwargs).read(given.left)
        for place, leaf in enumerate(tree_leaves((result, beside, behind))):
            value = Value(unit, call, place)
            if value in self._wanted:
                known = self._routes.shape(value).size
                if tuple(leaf.shape) != known:
                    raise UserError(
                        f"{self._split.units[unit].name} gives {tuple(leaf.shape)} to another stage, where of the "
                        f"first microbatch of these shapes it gave {known}: {WITHIN}"
                    )
                self.given[value] = leaf.clone() if value in self._own.changed or _is_kept(leaf, part) else leaf
            elif given is not None and isinstance(leaf, bool | int | float | str):
                first = given.leaves[place]
                if first != leaf == leaf:  # NaN is unlike itself
                    raise UserError(
                        f"{self._split.units[unit].name} gives {leaf!r}, where of the first microbatch of these shapes "
                        f"it gave {first!r}, which other stages have: let it give a tensor, which travels each time"
                    )
        return result

    def elsewhere(self, unit: int, args: Any, kwargs: Any) -> Any:
        return self._of_others(unit, self.count(unit), Handed(args, kwargs))

    def why(self, error: Exception) -> str:
        """What `error`, with which the forward has ended, comes of where that is the cut; "" where a part has failed,
        and where shapes do not come from values."""
        if self._in_a_part or not any(stage.by_values for stage in self._routes.stages):
            return ""
        return (
            f"stage {self._stage} fails between its parts, where the first microbatch of these shapes did not "
            f"({type(error).__name__}: {error}): {WITHIN}"
        )

    def again(self, unit: int, args: Any, kwargs: Any) -> Any:
        """Returns the result of another stage's part for a forward that backward runs again."""
        if self.called(unit) > 1:
            raise UserError(
                f"{self._split.units[unit].name} is called {self.called(unit)} times in a forward, and once more "
                "inside torch.utils.checkpoint.checkpoint, which does not say which call that "
                'is: take plan.recompute = "full" in its place'
            )
        return self._of_others(unit, 0, Handed(args, kwargs))

    def _of_others(self, unit: int, call: int, handed: Handed) -> Any:
        given: Given | None = self._routes.given(unit, call)
        if given is None:
            raise UserError(
                f"this microbatch calls {self._split.units[unit].name}, of stage {self._split.stages[unit]}, once more "
                f"than the first one of its shapes did{CALLED}"
            )

        def tensor(leaf: int, shape: Shape) -> Tensor:
            value = Value(unit, call, leaf)
            if value in self.boxes:
                found = self.boxes[value].tensor
            elif value in self._values:
                found = self._values[value]
            else:
                found = shape.unused(self._device)
            return found.clone() if value in self._own.filled else found  # a forward that runs again finds it as it was

        result, beside, behind = given.made(tensor)
        self._split.taps.replay(unit, beside)
        put(self._split.units[unit].module, handed.put(behind))
        return result

    def sent(self, value: Value) -> Tensor:
        if value not in self.given:
            unit = self._split.units[value.unit].name
            raise UserError(f"this microbatch does not call {unit} as the first one of its shapes did{CALLED}")
        return self.given[value]


def _is_kept(leaf: Tensor, part: nn.Module) -> bool:
    """Returns whether `leaf` is memory of a weight or a buffer of `part`, which may change, or be gone, before it has
    left."""
    storage = leaf.untyped_storage()._cdata
    tables: list[dict[str, Any]] = [table for each in part.modules() for table in (each._parameters, each._buffers)]
    kept = (value for table in tables for value in _values(table))
    return any(value is not None and storage == value.untyped_storage()._cdata for value in kept)


class Again:
    """The parts of a forward that backward runs again, as torch.utils.checkpoint does (split.Forward)."""

    def __init__(self, before: Pass) -> None:
        self._before = before

    def own(self, unit: int, part: nn.Module, args: Any, kwargs: Any) -> Any:
        return part(*args, **kwargs)

    def elsewhere(self, unit: int, args: Any, kwargs: Any) -> Any:
        return self._before.again(unit, args, kwargs)


def _values(table: Any) -> Iterable[Tensor | None]:
    """Returns what a module keeps in `table`. Weights that are gathered would come if they were asked for there."""
    return dict.values(table) if isinstance(table, dict) else table.values()
