"""Messages between a supervisor and the coordinator: the records that each may send. They travel as frames, see
connection.py."""

from __future__ import annotations

from dataclasses import dataclass
from signal import SIGTERM

from shoal.elastic.records import kinds

BELOW, DIRECT = "below", "direct"


@dataclass(frozen=True)
class Join:
    """Asks to be a member, or to be one again. `name`: the wished one; `newest`: the newest generation known there;
    `way`: BELOW where it was sent to a relay, DIRECT where it cannot reach the one that it was sent to; `connected`:
    whether it still has another way, on which it stays if it cannot be taken now. The others: see events.Joined."""

    name: str
    incarnation: str
    ranks: int
    host: str
    port: int
    running: int
    holds: bool
    newest: int
    way: str = ""
    connected: bool = False


@dataclass(frozen=True)
class Beat:
    """The member lives. Its ranks may run until a second after the last beat that the coordinator has answered."""

    number: int


@dataclass(frozen=True)
class Waiting:
    """So many of the member's processes wait for a place; see events.Ready."""

    ranks: int


@dataclass(frozen=True)
class Report:
    """The member's ranks have left their generation; see events.Ended."""

    generation: int
    outcome: str
    code: int
    step: int
    message: str
    ranks: int
    holds: bool


@dataclass(frozen=True)
class Paces:
    """How fast ranks of the member work in their generation, of each part of the model the slowest: see pace.Pace."""

    generation: int
    ranks: list[int]
    parts: list[int]
    now: list[float]
    best: list[float]


@dataclass(frozen=True)
class Stalled:
    """None of the member's ranks in this generation comes further, and all wait: see standstill.py."""

    generation: int


@dataclass(frozen=True)
class Drain:
    """The member wants to leave, by the signal `number`."""

    number: int = SIGTERM


@dataclass(frozen=True)
class Ask:
    """The whole job is to end with a checkpoint, by the signal `number`."""

    number: int


@dataclass(frozen=True)
class Held:
    """The standby holds the first `lines` lines of the journal."""

    lines: int


@dataclass(frozen=True)
class Admitted:
    """The member's name, and the job.

    generation: the one in which the member has ranks now, 0 for none. Those of another one are to end.
    program: the arguments for `python`, to be run in the folder `cwd`; logs go to `run_dir`.
    file, digest: a file that must be there as it is on the coordinator's host, and its SHA-256.
    minimum, maximum: numbers of nodes.
    """

    name: str
    generation: int
    program: list[str]
    cwd: str
    run_dir: str
    file: str
    digest: str
    minimum: int
    maximum: int


@dataclass(frozen=True)
class Refused:
    """The member cannot join."""

    why: str


@dataclass(frozen=True)
class Elsewhere:
    """Ask another supervisor. `host`, `port`: who coordinates, port 0 if this one does not know, or you are to stay
    where you are connected; or who passes on what the coordinator and you tell each other (`below`). To a member: come
    again there, by another way."""

    host: str
    port: int
    below: bool = False


@dataclass(frozen=True)
class Via:
    """This supervisor passes on what the coordinator and you tell each other (see tunnel.py)."""


@dataclass(frozen=True)
class Passed:
    """Pieces of tunnels (see tunnel.py)."""

    pieces: list[str]


@dataclass(frozen=True)
class Heard:
    """Answers the beat of this number. `age`: milliseconds since the coordinator was known to live."""

    number: int
    age: int = 0


@dataclass(frozen=True)
class Start:
    """Gives the member's waiting processes places in a generation.

    first, ranks, size: their first number, how many they are, and the number of all ranks.
    host, port: the generation's store.
    nodes: the number of members.
    why, step, events: why it was formed, the last committed step of the one before (-1 for none), what has happened.
    live: whether some ranks of the generation have the state of the run in memory.
    args: further arguments of the program.
    failed: see events.Generation.
    """

    generation: int
    first: int
    ranks: int
    size: int
    host: str
    port: int
    nodes: int
    why: str
    step: int
    events: list[str]
    live: bool
    args: list[str]
    failed: bool = False


@dataclass(frozen=True)
class End:
    """The member's ranks are to leave their generation; see events.Stop."""

    generation: int
    how: str
    why: str


@dataclass(frozen=True)
class GiveUp:
    """All members have said that they are Stalled: if the ranks still are, they are to leave at once."""

    generation: int


@dataclass(frozen=True)
class Entry:
    """The next lines of the journal, for a standby."""

    lines: list[str]


@dataclass(frozen=True)
class Roster:
    """Who coordinates, and in which order others would: "name host port" of each."""

    candidates: list[str]


@dataclass(frozen=True)
class Note:
    """A line for the log."""

    text: str


@dataclass(frozen=True)
class Released:
    """The member has drained and may go."""


@dataclass(frozen=True)
class Over:
    """The job has ended."""

    code: int
    why: str


FROM_MEMBER = kinds((Join, Beat, Waiting, Report, Paces, Stalled, Drain, Ask, Held, Passed))
TO_MEMBER = kinds(
    (Admitted, Refused, Elsewhere, Via, Heard, Start, End, GiveUp, Entry, Roster, Note, Released, Over, Passed)
)
