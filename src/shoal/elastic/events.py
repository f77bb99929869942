"""What happens to the members of a job, and what is decided about them. Every event has the `time` at which the
coordinator learned of it, in Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from signal import SIGINT, SIGTERM

from shoal.elastic.records import NAME, kinds
from shoal.plan import MOST_RANKS_OF_A_HOST

MOST_NODES = 1 << 16


@dataclass(frozen=True)
class Joined:
    """A member has come, or has come back over a new connection.

    incarnation: of its supervisor's process; another one under the same name is a member that came back.
    ranks: how many processes wait there for a place as ranks.
    host, port: where its supervisor listens, in case that it becomes the coordinator.
    running: the generation whose ranks run there, 0 for none.
    holds: whether one of them has the state of the run in memory.
    """

    time: float
    name: str
    incarnation: str
    ranks: int
    host: str
    port: int
    running: int = 0
    holds: bool = False

    def __post_init__(self) -> None:
        _check_ranks(self.ranks)
        if not NAME.fullmatch(self.name) or not 0 < self.port < 1 << 16:
            raise ValueError(f"no member: {self.name!r:.80}, port {self.port}")


@dataclass(frozen=True)
class Ready:
    """A member has so many processes that wait for a place: new ones have become ready, or waiting ones have ended."""

    time: float
    name: str
    ranks: int

    def __post_init__(self) -> None:
        _check_ranks(self.ranks)


@dataclass(frozen=True)
class Left:
    """A member is gone.

    proven: its supervisor, and with it its ranks, are known to have ended. Silence proves nothing: the member may live
        behind a cut link, where its ranks leave by themselves.
    """

    time: float
    name: str
    proven: bool
    why: str


UNABLE = "unable"


@dataclass(frozen=True)
class Ended:
    """The ranks of a member have left their generation: their processes have ended, or wait for another place.

    outcome: "finished" (the training is complete), "stopped" (as they were asked to), "failed" (one of them is at
        fault), "killed" (one was, by a signal), "lost" (they failed because ranks elsewhere were gone) or "unable" (so
        many ranks cannot go on).
    code: the exit code of a failure.
    step: the last step that they committed, -1 where that is not known.
    ranks: how many processes wait there for a place now. holds: whether one of them has the state in memory.
    """

    time: float
    name: str
    generation: int
    outcome: str
    code: int
    step: int
    message: str
    ranks: int = 0
    holds: bool = False

    def __post_init__(self) -> None:
        _check_ranks(self.ranks)
        if self.outcome not in ("finished", "stopped", "failed", "killed", "lost", UNABLE):
            raise ValueError(f"outcome {self.outcome!r:.80}")


@dataclass(frozen=True)
class Draining:
    """A member will leave after a step, by the signal `number`: SIGTERM, the notice of a spot instance, or Ctrl-C."""

    time: float
    name: str
    number: int = SIGTERM


@dataclass(frozen=True)
class Slow:
    """A member of the generation is much slower than the others, which wait for it; `why`: see pace.Straggler."""

    time: float
    name: str
    generation: int
    why: str


@dataclass(frozen=True)
class Asked:
    """The whole job is asked to end with a checkpoint, by the signal `number`."""

    time: float
    number: int


@dataclass(frozen=True)
class TookOver:
    """The member `name` coordinates from now on, in place of `former`.

    proven: as in Left.
    number: the newest generation that any member knows of.
    """

    time: float
    name: str
    former: str
    proven: bool
    number: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""

    time: float


Event = Joined | Ready | Left | Ended | Draining | Slow | Asked | TookOver | Tick
EVENTS = kinds((Joined, Ready, Left, Ended, Draining, Slow, Asked, TookOver, Tick))


def _check_ranks(ranks: int) -> None:
    if not 0 <= ranks <= MOST_RANKS_OF_A_HOST:
        raise ValueError(f"{ranks} ranks of a member")


@dataclass(frozen=True)
class Place:
    """A member's place in a generation: it has the ranks from `first` to `first + ranks - 1`."""

    name: str
    ranks: int
    first: int


@dataclass(frozen=True)
class Generation:
    """An agreed membership. `number` counts them; `why` it was formed; `step` the last one committed before, or -1;
    `live`: whether some of its ranks have the state of the run in memory; `failed`: whether ranks of the one before
    ended by themselves, not only because their members were gone."""

    number: int
    places: tuple[Place, ...]
    why: str
    step: int = -1
    live: bool = False
    failed: bool = False

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """How many ranks each member has, by its name. Found once: each of many members asks as it ends."""
        return {place.name: place.ranks for place in self.places}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(place.ranks for place in self.places)

    @property
    def names(self) -> list[str]:
        """The members, in the order of their ranks."""
        return [place.name for place in self.places]


def seated(ranks: Mapping[str, int]) -> tuple[Place, ...]:
    """Returns the places of members in this order, with so many ranks each."""
    firsts = accumulate(ranks.values(), initial=0)
    return tuple(Place(name, count, first) for (name, count), first in zip(ranks.items(), firsts, strict=False))


@dataclass(frozen=True)
class Form:
    """All members of the generation give their waiting processes places in it."""

    generation: Generation
    events: tuple[str, ...]


CUT_OFF = "it was cut off, and its ranks have left"
NOW, HALT, SAVE, END, INTERRUPT = "now", "halt", "save", "end", "interrupt"
"""How ranks leave a generation: at once; after a step; after a step and a checkpoint, since some will not come back, to
wait for another place with the state in memory; or after a step and a checkpoint for good, by a SIGTERM or SIGINT."""
FOR_GOOD = (END, INTERRUPT)


def for_good(asked: int) -> str:
    """Returns how ranks leave that are not to come back, where the signal `asked` for it, or a SIGTERM (0)."""
    return INTERRUPT if asked == SIGINT else END


@dataclass(frozen=True)
class Stop:
    """The ranks of all members of the generation leave it. `how`: see NOW."""

    generation: int
    how: str
    why: str


@dataclass(frozen=True)
class Drop:
    """The member is not counted any more: its connection is closed, and what it says is not heard."""

    name: str
    why: str


@dataclass(frozen=True)
class Release:
    """A member that drained may go."""

    name: str


@dataclass(frozen=True)
class StepDown:
    """This coordinator may be on the smaller side of a cut network: it decides nothing any more."""

    why: str


@dataclass(frozen=True)
class Finish:
    """The job is over, with this exit code."""

    code: int
    why: str


@dataclass(frozen=True)
class Say:
    """A line for the log."""

    text: str


Decision = Form | Stop | Drop | Release | StepDown | Finish | Say


@dataclass(frozen=True)
class Limits:
    """Sizes and times by which a membership is decided.

    minimum, maximum: numbers of nodes. Further ones wait until there is room.
    settle: seconds without a new member or rank after which a generation is formed or grows.
    rejoin: seconds for the members to find a coordinator that took over.
    kill, drain: seconds for ranks to leave a generation, at once and at a step boundary. A supervisor kills ranks that
        do not leave at once, so `kill` is for one that does not obey; `drain` is for a long step or evaluation, and for
        the checkpoint before a member leaves. Who hangs meanwhile is found by its supervisor.
    window: seconds in which the failures of a member are counted; at the k-th, from the second on, it is put aside for
        min(2^k, longest) seconds. A slow one is put aside for min(4 x 2^k, longest), where k counts how often it was
        slow again within `window` after it came back.
    fruitless: the job ends after so many failed generations in a row that have come no further than those before.
    quorum: only the side of a cut network with more members goes on. False where an election elsewhere (etcd) has said
        who coordinates.
    """

    minimum: int = 1
    maximum: int = MOST_NODES
    settle: float = 1.0
    rejoin: float = 2.0
    kill: float = 60.0
    drain: float = 600.0
    window: float = 600.0
    longest: float = 300.0
    fruitless: int = 5
    quorum: bool = True
