"""Where this rank stands on the mesh of a plan, and the groups in which it meets the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.comm import Group, World
from shoal.mesh import Mesh
from shoal.pipeline import check_schedule
from shoal.plan import Plan

ENGINE = "engine"


@dataclass(frozen=True)
class Ranks:
    """The ranks of `world` as `plan` sees them.

    `serial`: how many engines this world had before, for names of groups that no two engines share.
    `number`: the engine's among those that live now: two may have gradients on their way at the same time, so each has
    groups of its own.
    `replicas`: the ranks among whom samples are shared, and tokens of rows: gradients are reduced among them.
    `parts`: the ranks that have the other parts of this one's matrices.
    `stages`: the ranks that have the other stages of the pipeline; `stage`: all that have the same one.
    `everyone`: all ranks, who decide together.
    """

    plan: Plan
    world: World
    mesh: Mesh
    serial: int
    number: int
    replicas: Group
    parts: Group
    stages: Group
    stage: Group
    everyone: Group

    def leave(self) -> None:
        """Ends the use of the groups, which the next engine may have."""
        self.world.give_back(ENGINE, self.number)

    def own(self, group: Group, name: str = "") -> Group:
        """Returns a group of the same ranks, with a further `name`, that no other engine has that lives now."""
        return self.world.group(_numbered(f"{group.name}-{name}".rstrip("-"), self.number), group.ranks)

    def group(self, kind: str, name: str) -> Group:
        """Makes a further group of this rank's peers of a kind (see mesh.PEERS)."""
        axes, peers = self.mesh.peers(kind)
        return self.world.group(_numbered(f"{axes}-{name}", self.number), peers)

    def among(self, group: Group, name: str, places: Sequence[int]) -> Group:
        """A further group of some of the ranks of `group`, by their places in it."""
        return self.world.group(f"{group.name}-{name}", [group.ranks[place] for place in places])


def ranks(plan: Plan, world: World) -> Ranks:
    """Meets the other ranks. Raises UserError where `plan` is for another number of them, or has a schedule that there
    is not; all ranks call it alike."""
    check_schedule(plan)
    mesh, serial, number = Mesh(plan, world.rank, world.size), world.serial(ENGINE), world.take(ENGINE)
    found = map(mesh.peers, ("replicas", "parts", "stages", "stage"))
    replicas, parts, stages, stage = (world.group(_numbered(name, number), peers) for name, peers in found)
    everyone = stage if stages.size == 1 else world.everyone
    return Ranks(plan, world, mesh, serial, number, replicas, parts, stages, stage, everyone)


def _numbered(name: str, number: int) -> str:
    return f"{name}-{number}" if number else name
