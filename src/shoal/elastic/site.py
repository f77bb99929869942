"""Where a coordinator runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.elastic.election import Tenure
from shoal.elastic.events import Generation
from shoal.elastic.messages import Admitted


@dataclass
class Site:
    """What the coordinator needs beside the membership.

    name, incarnation: of the member in whose process it runs.
    job: what every member is told when it is admitted; the name and the generation are filled in.
    open_store: opens the store of a generation; returns its host and port.
    arrange: returns further arguments of the program for so many ranks. say: writes a line to the log.
    key: from the job's secret. tenure: keeps the journal, in place of standbys.
    """

    name: str
    incarnation: str
    job: Admitted
    open_store: Callable[[Generation], tuple[str, int]]
    arrange: Callable[[int], list[str]]
    say: Callable[[str], None]
    key: bytes
    tenure: Tenure | None = None
