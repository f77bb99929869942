"""How a part of a server is kept, and what a job sees of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from shoal.errors import ShoalError
from shoal.server.ledger import Gradient, Outcome
from shoal.server.sharing import Sharing
from shoal.server.tickets import Tickets


class NotDone(ShoalError):
    """What a client asked for cannot be done; `late`: others have not come in time."""

    def __init__(self, why: str, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


class Watch(Protocol):
    """Sees what happens to a part, in the order of its updates, also while its journal is read. It may not call the
    part."""

    def pushed(self, push: Gradient, outcome: Outcome) -> None: ...
    def evaluated(self, version: int, found: Mapping[str, Any]) -> None: ...
    def saved(self, version: int, seconds: float) -> None: ...
    def failed(self, error: ShoalError) -> None: ...


@dataclass(frozen=True)
class Dealt:
    """A part that belongs to a job.

    tickets: deals the job's samples to the clients.
    watch: sees what comes of it.
    step: the values have been loaded from a checkpoint of this step, 0 for none.
    restored: that checkpoint's own data; without that of a server others have written it.
    """

    tickets: Tickets
    watch: Watch
    step: int
    restored: Mapping[str, Any]


@dataclass(frozen=True)
class Keeping:
    """How a part is kept.

    directory: of its checkpoints; None keeps nothing. journals: that of its journals, by default the same.
    save_every: updates from one checkpoint to the next, which comes earlier where the journal has `most_bytes`.
    durable: an acknowledged push also survives the host (see journal).
    grace: seconds for which a lost client is still waited for, so that it can come again.
    sharing: what other servers keep beside it.
    """

    directory: Path | None
    save_every: int
    durable: bool
    grace: float
    journals: Path | None = None
    most_bytes: int = 1 << 40
    sharing: Sharing | None = None

    def of(self, part: str, index: int, count: int, merged: bool) -> Keeping:
        """Returns how server `index` of `count` keeps its share of the part of this name, in a folder of its own inside
        the directory. `merged`: see Sharing."""
        if self.directory is None:
            return self
        sharing = Sharing(self.directory, part, index, count, merged)
        return replace(self, directory=sharing.own, sharing=sharing)

    def journal(self, version: int, name: str) -> Path:
        """Returns the path of the journal that follows the checkpoint of `version`, which tells its `name`."""
        folder = self.journals or self.directory
        assert folder is not None
        return folder / f"journal-{version:08d}-{name}"
