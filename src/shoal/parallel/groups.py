"""The process groups of a mesh, made on first use, and the measured costs of their links."""

from __future__ import annotations

import torch

from shoal.comm import Group, World, link_of
from shoal.mesh import AXES, EXPERT_AXES, Mesh
from shoal.parallel.route import AxisCosts


class MeshGroups:
    """Gives the groups along the axes of one pipeline stage, as `redistribute.Axes` wants them.

    The axes are dp, cp and tp, or edp, ep and tp with `experts`.
    """

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
        """The group of the ranks that differ from this one only along `axes`, in the mesh's order."""
        return self.world.group("-".join(axis for axis in self._names if axis in axes), self.mesh.ranks(*axes))


def measured_costs(groups: MeshGroups, device: torch.device) -> AxisCosts:
    """Returns latency and bandwidth of each axis, taking the slowest rank's values.

    The first call measures. It is collective: all ranks of the world make it together.
    """
    latency, rate = {}, {}
    for axis in groups.names():
        if groups.size(axis) == 1:
            latency[axis], rate[axis] = 0.0, float("inf")
            continue
        group = groups.group(axis)
        link = link_of(group, device)
        sent = 2 * (group.size - 1) / group.size * link.bandwidth  # link.bandwidth is of the tensor that is reduced
        worst = groups.world.everyone.all_reduce(
            torch.tensor([link.latency, 1.0 / sent], dtype=torch.float64), "max", "costs"
        )
        latency[axis], rate[axis] = float(worst[0]), 1.0 / float(worst[1])
    return AxisCosts(latency, rate)
