"""Pipeline parallelism as an axis: ranks have other layers, and the last stage alone sees the loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm import Group, World
from shoal.mesh import Mesh
from shoal.parallel.axis import Axis, together
from shoal.parallel.layout import Layout
from shoal.pipeline.model import PipelinedModule
from shoal.pipeline.runner import Runner


def why_no_hook(stages: int) -> str | None:
    """Why hooks on parameters cannot see their gradients where ranks have so many stages; None where there is one."""
    if stages == 1:
        return None
    return (
        f"plan.pp = {stages}: of the loss of a microbatch, whose mean's gradient a hook sees, only the last "
        "stage knows the count"
    )


class PipelineParallel(Axis):
    """Runs the stages of this rank by `runner`.

    serial: tells the groups of this engine from those of earlier ones of the world
    """

    name = "pp"
    cuts_layers = True

    def __init__(self, mesh: Mesh, world: World, runner: Runner, serial: int) -> None:
        super().__init__(mesh, world)
        self.runner, self._mesh, self._serial = runner, mesh, serial
        self.sees_loss, self.flushes = runner.is_last, runner.flushes

    def close(self) -> None:
        super().close()
        self.runner.close()

    @cached_property
    def tied(self) -> list[int]:
        """The indices along the axis of the ranks with which this one shares weights, its own among them; empty if it
        shares none."""
        return next((places for places in self.runner.tied.values() if self.group.rank in places), [])

    @property
    def variants(self) -> Mapping[str, Group]:
        if not self.tied:
            return {}
        ranks = self._mesh.on(self.tied, self._mesh.peers("replicas")[1])
        return {"tied": self._world.group(f"tied{self._serial}", ranks)}

    def relaid(self, layouts: Mapping[str, Layout]) -> Mapping[str, Layout]:
        tied = [name for name, places in self.runner.tied.items() if places == self.tied]
        return {**layouts, **{name: replace(layouts[name], apart=layouts[name].apart or "tied") for name in tied}}

    @property
    def silent_buffers(self) -> Sequence[str]:
        return [] if self.runner.is_last else self.runner.split.common_buffers

    def whole(self, model: nn.Module, lockstep: Group | None, flush: Callable[[], None]) -> nn.Module:
        return PipelinedModule(self.runner, lockstep, flush)

    def why_no_hook(self, layout: Layout | None) -> str | None:
        return why_no_hook(self.size)

    def add_squares(self, squares: Tensor) -> Tensor:
        return self.group.all_reduce(squares, purpose="norm")

    def add_sums(self, sums: Sequence[Tensor], purpose: str) -> Sequence[Tensor]:
        told = self.group.all_reduce(torch.cat(list(sums)), purpose=purpose)
        return told.split([len(each) for each in sums])

    def gather_seen(self, seen: Any) -> list[Any]:
        return self.group.all_gather_object(seen)

    def untouched(self, names: list[str], here: Collection[str]) -> list[str]:
        """Leaves out what a stage that shares it has touched: all that have a parameter update it alike."""
        if not self.runner.tied:
            return names
        tied = sorted(self.runner.tied)
        touched = [name in here and name not in names for name in tied]
        # On the host, which knows them: it does not wait for the device.
        flags = self.group.all_reduce(torch.tensor(touched, dtype=torch.int32), "max", purpose="ballot")
        elsewhere = {name for name, flag in zip(tied, flags.tolist(), strict=True) if flag}
        return [name for name in names if name not in elsewhere]

    def gather_names(self, names: list[str], order: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(name for theirs in self.group.all_gather_object(names) for name in theirs))

    def gather_squares(self, squares: Mapping[str, float], layouts: Mapping[str, Layout]) -> Mapping[str, float]:
        return together(self.group.all_gather_object(dict(squares)))
