"""The groups of a mesh, made when they are first asked for, and what their links cost."""

from __future__ import annotations

import torch

from shoal.comm import Group, World, link_of
from shoal.mesh import AXES, EXPERT_AXES, Mesh
from shoal.parallel.route import AxisCosts


class MeshGroups:
    """`mesh` as `redistribute.Axes`, over the axes of one stage: dp, cp and tp, or with `experts` edp, ep and tp."""

    def __init__(self, mesh: Mesh, world: World, experts: bool = False) -> None:
        self.mesh, self.world = mesh, world
        self._names = (EXPERT_AXES if experts else AXES)[1:]

    def names(self) -> tuple[str, ...]:
        return self._names

    def size(self, axis: str) -> int:
        return self.mesh.size(axis)

    def rank(self, axis: str) -> int:
        return self.mesh.rank(axis)

    def group(self, *axes: str) -> Group:
        """Of the ranks that differ from this one along `axes` only, in the mesh's order."""
        return self.world.group("-".join(axis for axis in self._names if axis in axes), self.mesh.ranks(*axes))


def measured_costs(groups: MeshGroups, device: torch.device) -> AxisCosts:
    """What the links along each axis cost, the slowest of all ranks: measured at the first call, which all ranks of the world make alike."""
    latency, rate = {}, {}
    for axis in groups.names():
        if groups.size(axis) == 1:
            latency[axis], rate[axis] = 0.0, float("inf")
            continue
        group = groups.group(axis)
        link = link_of(group, device)
        sent = 2 * (group.size - 1) / group.size * link.bandwidth  # link.bandwidth is of the tensor that is reduced
        worst = groups.world.everyone.all_reduce(torch.tensor([link.latency, 1.0 / sent], dtype=torch.float64), "max", "costs")
        latency[axis], rate[axis] = float(worst[0]), 1.0 / float(worst[1])
    return AxisCosts(latency, rate)
