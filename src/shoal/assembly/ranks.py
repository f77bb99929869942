"""Where this rank stands on the mesh of a plan, and the groups in which it meets the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.comm import Group, World
from shoal.mesh import Mesh
from shoal.plan import Plan


@dataclass(frozen=True)
class Ranks:
    """The ranks of `world` as `plan` sees them.

    `serial`: how many engines this world had before, for names of groups that no two engines share.
    `replicas`: the ranks among whom samples are shared (dp), and tokens of rows (cp): gradients are reduced among them.
    `tp`: the ranks that have the other parts of this one's matrices.
    `stage`: all ranks that have the same stage of the pipeline; `everyone`: all ranks, who decide together.
    """

    plan: Plan
    world: World
    mesh: Mesh
    serial: int
    replicas: Group
    tp: Group
    stage: Group
    everyone: Group

    def group(self, name: str, *axes: str) -> Group:
        """The group `name` of the ranks that differ from this one along `axes` only."""
        return self.world.group(name, self.mesh.ranks(*axes))

    def among(self, group: Group, name: str, places: Sequence[int]) -> Group:
        """A further group of some of the ranks of `group`, by their places in it."""
        return self.world.group(f"{group.name}-{name}", [group.ranks[place] for place in places])


def ranks(plan: Plan, world: World) -> Ranks:
    """Meets the other ranks. Raises UserError where `plan` is for another number of them; all ranks call it alike."""
    mesh, serial = Mesh(plan, world.rank, world.size), world.serial("engine")
    replicas = world.group("dp-cp" if plan.cp > 1 else "dp", mesh.ranks("dp", "cp"))
    tp = world.group("tp", mesh.ranks("tp"))
    stage = replicas if tp.size == 1 else world.group("dp-cp-tp", mesh.ranks("dp", "cp", "tp"))
    return Ranks(plan, world, mesh, serial, replicas, tp, stage, stage if plan.pp == 1 else world.everyone)
