"""What a supervisor tells the ranks of a generation, by a variable. Nothing here imports torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

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

    def written(self) -> str:
        """Returns the text of the variable, which `told` reads."""
        return json.dumps(asdict(self))


def told(environ: Mapping[str, str] = os.environ) -> Told | None:
    """Returns what the supervisor has told this rank; None where nodes do not come and go."""
    return Told(**json.loads(environ[VARIABLE])) if VARIABLE in environ else None
