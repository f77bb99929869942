"""A dry run of the stages that a rank has, as it would run them: its own parts, on fakes of what other stages give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.chunks import Gather
from shoal.errors import UserError
from shoal.module.build import Built
from shoal.pipeline import Pass, Routes, Split, given_stages, look, schedule_of, stages_of, units_of
from shoal.plan import Plan
from shoal.planner.prepare import Prepared

CPU = torch.device("cpu")


class OwnStages:
    """The stages of the rank at `place` of a pipeline. `kept`: by stage, the bytes that backward keeps of one
    microbatch."""

    def __init__(self, ready: Prepared, built: Built, plan: Plan, place: int) -> None:
        one, units = schedule_of(plan, 1), units_of(built.module)
        self._ready, self._number, self._own = ready, one.stages, one.stages_of(place)
        self._split = Split(built, units, stages_of(units, one.stages, given_stages(plan)), range(one.stages))
        self._split.follow(ready.local.parallelized.axes)
        self._routes = Routes()
        self.kept: dict[int, int] = {}

    @property
    def names(self) -> set[str]:
        """The parameters of these stages."""
        return {name for stage in self._own for name in self._split.names(stage)}

    @property
    def buffers(self) -> int:
        """Bytes of the buffers of these stages."""
        away = {
            id(buffer)
            for unit, stage in zip(self._split.units, self._split.stages, strict=True)
            if stage not in self._own
            for buffer in unit.module.buffers()
        }
        return sum(buffer.nbytes for buffer in self._ready.local.module.buffers() if id(buffer) not in away)

    def learn(self, forward: Callable[[], Tensor]) -> None:
        """What travels between all stages. UserError for a model that cannot be cut there."""
        for stage in range(self._number):
            found = look(self._split, stage, self._routes, forward, CPU)
            if isinstance(found, str):
                raise UserError(found)
            self._routes.stages.append(found)
        self._ready.world.ledger.traffic.clear()

    def through(self, log: list[Any], forward: Callable[[], Tensor], gather: Gather) -> None:
        """Forward and backward of each stage alone, whose events come to `log`."""
        for stage in self._own:
            began, routes = len(log), self._routes
            values = {
                value: routes.shape(value).empty(CPU)
                for source in range(stage)
                for value in routes.between(source, stage)
            }
            current = Pass(self._split, stage, routes, values, CPU)
            if stage:
                self._split.hear(routes.stages[stage - 1].said)
            objective = self._split.run(stage, current, forward)
            gather.left()
            self.kept[stage] = sum(size for what, size in log[began:] if what == "saved")
            roots = [each for each in (objective, *current.given.values()) if each is not None and each.requires_grad]
            self._ready.local.randomness.replay()
            if roots:
                torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
            gather.backward_is_over()
