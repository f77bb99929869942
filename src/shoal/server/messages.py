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


TRAIN, EVALUATE, WAIT, END = "train", "evaluate", "wait", "end"
FROM_CLIENT = kinds((Join, Pull, Push, Ask, Leave))
TO_CLIENT = kinds((Admitted, Values, Taken, Work, Refused))
