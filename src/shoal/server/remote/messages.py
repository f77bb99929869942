"""Records between a remote module and its owner. Most of them are followed by a value (see `payload`)."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.elastic.records import kinds


@dataclass(frozen=True)
class Build:
    """Asks for a module; its first record of a session. Value: positional and keyword arguments of the factory.

    client: names the remote module that asks.
    factory: one of those that the owner exposes.
    name: under which all clients have one and the same module; "" for one of this client's own.
    seed: of the module's creation, and of what it draws; -1 for none.
    """

    client: str
    factory: str
    name: str
    seed: int


@dataclass(frozen=True)
class Join:
    """Opens a further session of a remote module: the first record there. `module`: what Built has told."""

    client: str
    module: str


@dataclass(frozen=True)
class Forward:
    """Runs the module. Value: positional and keyword arguments.

    number: of this forward, by which its backward and its release name it; counted by the client.
    context: in which parameters' gradients are kept.
    grad: whether a backward may follow.
    training: the mode of the module.
    """

    number: int
    context: str
    grad: bool
    training: bool


@dataclass(frozen=True)
class Backward:
    """Runs the backward of a forward. Value: a gradient, or None, of each output that needs one.

    thread, passing: the backward pass that this is a part of, and the thread that has begun it, which runs one at a
        time. What a pass gives for a parameter is summed before it is added, as torch does.
    keep: a further backward may follow.
    parameters: whether the gradients of parameters are wanted, which stay here.
    """

    number: int
    thread: str
    passing: int
    keep: bool
    parameters: bool


@dataclass(frozen=True)
class Release:
    """No backward of these forwards will follow."""

    numbers: list[int]


@dataclass(frozen=True)
class Drop:
    """Drops the gradients of a context, here and at owners below."""

    context: str


@dataclass(frozen=True)
class Optimize:
    """Has an optimizer made for the module's parameters, here and at owners below, unless it is there. Value: its
    options.

    key: names the optimizer at all owners.
    optimizer: one of optim/named.py.
    """

    key: str
    optimizer: str


@dataclass(frozen=True)
class Measure:
    """Asks for the sum of squares of a context's gradients, here and at owners below. Value of the answer: a number, 0
    where this was asked already in the step `step`, as owners may be reached by several ways."""

    key: str
    context: str
    step: str


@dataclass(frozen=True)
class Update:
    """Has the optimizer step with a context's gradients times `factor`, here and at owners below, once in `step`.
    Value: the options that a schedule may have changed (stepper.COURSE)."""

    key: str
    context: str
    step: str
    factor: float


@dataclass(frozen=True)
class Save:
    """Asks for the module's state. Value of the answer: a dict, as of `state_dict`."""


@dataclass(frozen=True)
class Load:
    """Brings a part of a state. Value: a dict. Value of the answer: names that were missing, those that are not known,
    and what was wrong with others."""


@dataclass(frozen=True)
class Leave:
    """The session ends."""


@dataclass(frozen=True)
class Built:
    """A module is there. `module`: its name for Join. `training`: its mode."""

    module: str
    training: bool


@dataclass(frozen=True)
class Returned:
    """What was asked for. Value: the result."""


@dataclass(frozen=True)
class Failed:
    """What was asked for has raised. `wrong`: the request is at fault, so that asking again is useless."""

    why: str
    wrong: bool


FROM_CLIENT = kinds((Build, Join, Forward, Backward, Release, Drop, Optimize, Measure, Update, Save, Load, Leave))
TO_CLIENT = kinds((Built, Returned, Failed))
