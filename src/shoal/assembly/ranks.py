"""Where this rank stands on the mesh of a plan, and the groups in which it meets the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.comm import Group, World
from shoal.mesh import Mesh
from shoal.plan import Plan

ENGINE = "engine"


@dataclass(frozen=True)
class Ranks:
    """The ranks of `world` as `plan` sees them.

    `serial`: how many engines this world had before, for names of groups that no two engines share.
    `number`: the engine's among those that live now: two may have gradients on their way at the same time, so each has
    groups of its own.
    `replicas`: the ranks among whom samples are shared (dp), and tokens of rows (cp): gradients are reduced among them.
    `tp`: the ranks that have the other parts of this one's matrices.
    `stage`: all ranks that have the same stage of the pipeline; `everyone`: all ranks, who decide together.
    """

    plan: Plan
    world: World
    mesh: Mesh
    serial: int
    number: int
    replicas: Group
    tp: Group
    stage: Group
    everyone: Group

    def group(self, name: str, *axes: str) -> Group:
        """The group `name` of the ranks that differ from this one along `axes` only."""
        return self.world.group(f"{name}-{self.number}" if self.number else name, self.mesh.ranks(*axes))

    def leave(self) -> None:
        """Ends the use of the groups, which the next engine may have."""
        self.world.give_back(ENGINE, self.number)

    def among(self, group: Group, name: str, places: Sequence[int]) -> Group:
        """A further group of some of the ranks of `group`, by their places in it."""
        return self.world.group(f"{group.name}-{name}", [group.ranks[place] for place in places])


def ranks(plan: Plan, world: World) -> Ranks:
    """Meets the other ranks. Raises UserError where `plan` is for another number of them; all ranks call it alike."""
    mesh, serial, number = Mesh(plan, world.rank, world.size), world.serial("engine"), world.take(ENGINE)
    own = f"-{number}" if number else ""
    replicas = world.group(("dp-cp" if plan.cp > 1 else "dp") + own, mesh.ranks("dp", "cp"))
    tp = world.group("tp" + own, mesh.ranks("tp"))
    stage = replicas if tp.size == 1 else world.group("dp-cp-tp" + own, mesh.ranks("dp", "cp", "tp"))
    everyone = stage if plan.pp == 1 else world.everyone
    return Ranks(plan, world, mesh, serial, number, replicas, tp, stage, everyone)
