"""What a simulated run did: its defects, the waits of the host, bytes that were copied, memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Report(NamedTuple):
    """A defect. Each side names the operation, what it does, the stream, and the place in the Python program.

    - `kind`: "race" (nothing orders two accesses), "freed" (memory goes back while another stream may still use it),
      "host" (the host touches memory of an unfinished copy), "mismatch" (ranks make different calls: NCCL would hang)
    - `memory`: its size, and where it was allocated
    """

    kind: str
    first: str
    second: str
    memory: str = ""


class Wait(NamedTuple):
    """A wait of the host for the device: `what` for (an operation, "stream", "event", "device"), and `where`."""

    what: str
    where: str


@dataclass(frozen=True)
class Trace:
    """`waits`: how often each; `copied`: bytes by way, such as "host to device"; `peak`: bytes by device."""

    defects: list[Report] = field(default_factory=list)
    waits: Counter[Wait] = field(default_factory=Counter)
    copied: dict[str, int] = field(default_factory=dict)
    peak: list[int] = field(default_factory=list)

    def kinds(self) -> set[str]:
        """The kinds of defects."""
        return {defect.kind for defect in self.defects}


def read(lines: list[str]) -> Trace:
    """The trace that the simulator gives as lines: a kind, its parts and a number, with tabs between."""
    trace = Trace()
    for line in lines:
        kind, *parts, number = line.split("\t")
        if kind == "wait":
            trace.waits[Wait(*parts)] += int(number)
        elif kind == "copied":
            trace.copied[parts[0]] = int(number)
        elif kind == "peak":
            trace.peak.append(int(number))
        else:
            trace.defects.append(Report(kind, *parts))
    return trace
