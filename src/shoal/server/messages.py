"""Records between a client and a parameter server. Pull and Push name a part of the server: its weights, or a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.elastic.records import kinds

WEIGHTS = ""
"""The name of the part that holds the weights, which is none of a table."""


@dataclass(frozen=True)
class Join:
    """Opens a client's account. `rank`: its number, -1 for any. `incarnation`: of this process."""

    rank: int
    incarnation: str


@dataclass(frozen=True)
class Pull:
    """Asks for values, waiting `seconds` at most until the policy gives them. Raw: of a table, the rows' numbers
    (int64)."""

    part: str
    seconds: float


@dataclass(frozen=True)
class Push:
    """Brings a gradient of the values of `version`. Raw: the encoded chunks; or the rows' numbers and their gradients.

    sequence: counts the pushes of this client to this part, so that one which is sent again is taken once.
    untouched: parameters that the client's backward has not reached.
    count: the gradient's weight in the mean of an update.
    ticket: the work (see Work) that it is of, -1 for none.
    note: what else the client tells of it.
    """

    part: str
    version: int
    sequence: int
    untouched: list[str]
    count: float
    ticket: int
    note: dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """Asks for work, waiting `seconds` at most. `found`: what an evaluation that the client was given has found."""

    seconds: float
    found: dict[str, Any]


@dataclass(frozen=True)
class Leave:
    """The client is done."""


@dataclass(frozen=True)
class Admitted:
    """The client's number. Raw: the JSON of what the server holds."""

    rank: int


@dataclass(frozen=True)
class Values:
    """The values of `version`. Raw: chunks, or rows in the order in which they were asked for."""

    version: int


@dataclass(frozen=True)
class Taken:
    """A push is in the journal. `version`: the newest one now; `lag`: updates between pull and push; `weight`: what the
    policy gives the gradient, 0 if it was dropped."""

    version: int
    lag: int
    weight: float


@dataclass(frozen=True)
class Work:
    """What a client is to do.

    what: TRAIN on the share `ticket` of the run's samples, EVALUATE, ask again because there is nothing now (WAIT), or
        leave (END).
    """

    what: str
    ticket: int


@dataclass(frozen=True)
class Refused:
    """The server cannot do what was asked. `late`: others have not come in time, and asking again may help."""

    why: str
    late: bool


@dataclass(frozen=True)
class Begin:
    """The first of several servers tells a follower to go on with a line: the training of one job on so many servers,
    since a checkpoint that others may have made.

    version: of that checkpoint, whose path is `source`; "" where training begins.
    fresh: whether the line may begin here too; else the follower must have what it was told before.
    """

    line: str
    version: int
    source: str
    fresh: bool


@dataclass(frozen=True)
class Sum:
    """Asks a follower for the squared norm of the mean of `pushes`: of each the client's rank, its incarnation, and the
    number of the push. `version`: of the update that is made of them."""

    version: int
    pushes: list[list[Any]]


@dataclass(frozen=True)
class Apply:
    """Has a follower make the update `version`. dropped: pushes that no update is made of. weight: the factor for the
    learning rate; factor: that by which the mean gradient is clipped."""

    version: int
    pushes: list[list[Any]]
    dropped: list[list[Any]]
    weight: float
    factor: float


@dataclass(frozen=True)
class Keep:
    """Has a follower write a checkpoint of the update `version`. decided: of each client its rank, its incarnation, and
    the number of its last push that was decided upon. since: the version of the newest checkpoint of all servers."""

    version: int
    decided: list[list[Any]]
    since: int


@dataclass(frozen=True)
class Finish:
    """Tells a follower that nothing more will come."""


@dataclass(frozen=True)
class Done:
    """A follower has done what it was told. version: of its newest update, -1 where it knows of no line yet. row: the
    digits that are not 0 of the sum that was asked for (see chunks.exact), each with its value."""

    version: int
    row: list[list[float]]


Order = Begin | Sum | Apply | Keep | Finish
"""What the first of several servers tells the others."""
TRAIN, EVALUATE, WAIT, END = "train", "evaluate", "wait", "end"
FROM_CLIENT = kinds((Join, Pull, Push, Ask, Leave, Begin, Sum, Apply, Keep, Finish))
TO_CLIENT = kinds((Admitted, Values, Taken, Work, Refused, Done))
