"""What the supervisor of a node tells a rank of its generation, where the nodes of its job come and go (see
docs/elastic.md). Nothing here imports torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.report.metrics import MembershipRecord

VARIABLE = "SHOAL_MEMBERSHIP"


@dataclass(frozen=True)
class Told:
    """What the supervisor has told: the job's id, the number of the generation and of its nodes, why it was formed, the
    last step that the one before committed (-1 if not known), and what has happened since that was formed."""

    job: str
    generation: int
    nodes: int
    why: str
    step: int
    events: list[str]

    def record(self, world: int, step: int) -> MembershipRecord:
        """Returns the record of this generation, which goes on after `step` with `world` ranks."""
        lost = max(0, self.step - step)
        return MembershipRecord(
            step=step, generation=self.generation, nodes=self.nodes, world=world, why=self.why, lost=lost,
            events=self.events,
        )  # fmt: skip


def told(environ: Mapping[str, str] = os.environ) -> Told | None:
    """Returns what the supervisor has told this rank; None where nodes do not come and go."""
    return Told(**json.loads(environ[VARIABLE])) if VARIABLE in environ else None
