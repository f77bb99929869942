"""What a supervisor and a process that trains as a rank tell each other: records as lines of JSON over a socket pair.

    supervisor -> process   Place: take this place in a generation. Leave: leave the generation
    process -> supervisor   Warm: ready for a place. Left: has left its generation, and waits for another place

Nothing here imports torch.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.elastic import pulse
from shoal.elastic.events import NOW
from shoal.elastic.messages import Start
from shoal.elastic.records import decode, encode, kinds
from shoal.errors import CheckpointError

VARIABLE = "SHOAL_CONTROL"
"""The descriptor of a process's end of the pair."""
JOB = "SHOAL_JOB"
"""The id of a job whose nodes come and go, for its processes."""
CALLED, WAITS = "shoal-rank", "shoal-waits"
"""What the kernel calls a process (`ps -o comm`) that is a rank, before its number, and one that waits for a place."""
_MOST_BYTES = 1 << 20  # of a line


@dataclass(frozen=True)
class Place:
    """A place as a rank in a generation.

    rank: its number among all ranks. slot: the process's own number on this host, by which it has its device.
    secret: of the generation. The others: see messages.Start.
    """

    generation: int
    rank: int
    size: int
    slot: int
    here: int
    host: str
    port: int
    secret: str
    nodes: int
    why: str
    step: int
    events: list[str]
    live: bool
    args: list[str]
    failed: bool = False

    @classmethod
    def of(cls, start: Start, local: int, slot: int, secret: str) -> Place:
        """Makes the place of the `local`-th rank of a host."""
        own: dict[str, Any] = {"rank": start.first + local, "slot": slot, "here": start.ranks, "secret": secret}
        return cls(**own, **{name: value for name, value in vars(start).items() if name not in ("first", "ranks")})


@dataclass(frozen=True)
class Leave:
    """The rank is to leave its generation. `how`: see events.NOW."""

    generation: int
    how: str


@dataclass(frozen=True)
class Warm:
    """All that needs no other rank is ready."""


@dataclass(frozen=True)
class Left:
    """The rank has left its generation. `step`: the last one that it committed; `holds`: whether the state of that step
    is in its memory; `asked`: whether it left after a step because it was told to; `unsaved`: why the newest checkpoint
    is not written, "" if it is or none was asked for; `unable`: why so many ranks cannot go on, "" if they can."""

    generation: int
    step: int
    holds: bool
    asked: bool
    unsaved: str = ""
    unable: str = ""


def as_told(left: Iterable[Left]) -> tuple[int, str]:
    """Returns the exit code and the message of ranks that have `left` as they were told to: 0, unless what they were to
    save before is not saved."""
    why = next((each.unsaved for each in left if each.unsaved), "")
    return (CheckpointError.exit_code, why) if why else (0, "")


TO_PROCESS, FROM_PROCESS = kinds((Place, Leave)), kinds((Warm, Left))


class Line:
    """One end of the pair. `known`: the records that come from the other end."""

    def __init__(self, end: socket.socket, known: Mapping[str, type]) -> None:
        self._end, self._known = end, known
        self._data = b""

    def send(self, record: Any) -> None:
        """Sends a record. An end whose other one is gone takes it and drops it."""
        with suppress(OSError):
            self._end.sendall(encode(record) + b"\n")

    def receive(self) -> list[Any] | None:
        """Returns the records that have come, at least one on a blocking socket; None at the end of the line."""
        try:
            data = self._end.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._data = (self._data + data).split(b"\n")
        assert len(self._data) < _MOST_BYTES
        return [decode(line, self._known) for line in lines]

    def close(self) -> None:
        self._end.close()


class Control:
    """A process's end: places come in the order in which they were given. The process ends itself once its supervisor
    is silent (pulse.py).

    `hurry` is called by the thread that listens, when the rank is to leave its generation; `how`: see events.NOW.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._line = Line(socket.socket(fileno=int(environ[VARIABLE])), TO_PROCESS)
        self._places: queue.SimpleQueue[Place] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._generation = 0
        self._leave: Leave | None = None
        self._hurry: Callable[[str], None] | None = None
        self._now = threading.Event()
        threading.Thread(target=self._listen, name="shoal-control", daemon=True).start()
        if pulse.VARIABLE in environ:
            pulse.end_without(Path(environ[pulse.VARIABLE]))

    def send(self, record: Warm | Left) -> None:
        self._line.send(record)

    def wait(self) -> Place:
        """Waits for a place."""
        place = self._places.get()
        with self._lock:
            self._generation, self._hurry = place.generation, None
            if self._leave is not None and self._leave.generation != place.generation:
                self._leave = None
                self._now.clear()
        return place

    def leave_by(self, hurry: Callable[[str], None]) -> None:
        """Has `hurry(how)` called when this rank is to leave its generation; at once if it was told already."""
        with self._lock:
            self._hurry = hurry
            known = self._leave
        if known is not None and known.generation == self._generation:
            hurry(known.how)

    def leaves_now(self, seconds: float = 0.0) -> bool:
        """Returns whether this rank is told to leave its generation at once, within so many seconds."""
        return self._now.wait(seconds) if seconds else self._now.is_set()

    def _listen(self) -> None:
        while (records := self._line.receive()) is not None:
            for record in records:
                if isinstance(record, Place):
                    self._places.put(record)
                elif isinstance(record, Leave):
                    self._told(record)

    def _told(self, leave: Leave) -> None:
        with self._lock:
            self._leave = leave
            if leave.how == NOW:
                self._now.set()
            hurry = self._hurry if leave.generation == self._generation else None
        if hurry is not None:
            hurry(leave.how)


def call_this(name: str) -> None:
    """Has the kernel call this process so, where it takes a name: 15 characters at most."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def control(environ: Mapping[str, str] = os.environ) -> Control | None:
    """Returns this process's end; None where nodes do not come and go."""
    return Control(environ) if VARIABLE in environ else None
