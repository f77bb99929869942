"""Errors for users. A message says all that is known: the value, rank and step, the cause and the remedy."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType, UnionType
from typing import Any, Literal, Union, get_args, get_origin


class ShoalError(Exception):
    """Base of every error that Shoal raises on purpose; the CLI prints its message without a traceback.

    `exit_code`: the exit status of the process.
    """

    exit_code = 1


class UserError(ShoalError, ValueError):
    """Wrong input: a file, a job key, a plan field, a model that does not fit its batch."""

    exit_code = 2


class ArgumentError(UserError):
    """An invalid argument. The message is the name `argument` followed by `problem`; `in_section` prefixes it with the
    job file's section."""

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(argument, problem)
        self.argument, self.problem = argument, problem

    def __str__(self) -> str:
        return self.argument + self.problem


def told(error: ShoalError) -> str:
    """Returns the text shown to the user: the message, and the notes added to the exception."""
    return "\n".join([f"error: {error}", *getattr(error, "__notes__", [])])


def tell_plainly() -> None:
    """Installs an `excepthook` that prints only the message of an uncaught ShoalError and exits with its code.

    Other exceptions keep their traceback. A hook that somebody else has set stays in place and gets all exceptions.
    An interactive prompt (`python -i`) stays open.
    """
    if sys.excepthook is not sys.__excepthook__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ShoalError):
            sys.__excepthook__(kind, error, trace)
            return
        print(told(error), file=sys.stderr, flush=True)
        if not (sys.flags.interactive or hasattr(sys, "ps1")):
            raise SystemExit(error.exit_code)  # Python exits with it, raised in a hook as in a script

    sys.excepthook = hook


@contextmanager
def in_section(section: str) -> Iterator[None]:
    """Turns an ArgumentError into a UserError with the job file's key: `microbatch` becomes `train.microbatch`."""
    try:
        yield
    except ArgumentError as error:
        raise UserError(f"{section}.{error}") from error


class TrainingError(ShoalError):
    """Training cannot go on: a loss or gradient that is not finite.

    step: the engine's number of the step, which the message begins with; None where it is of no step.
    """

    exit_code = 3

    def __init__(self, problem: str, step: int | None = None) -> None:
        super().__init__(problem, step)
        self.problem, self.step = problem, step

    def __str__(self) -> str:
        return self.problem if self.step is None else f"step {self.step}: {self.problem}"


@contextmanager
def counted_from_1() -> Iterator[None]:
    """Has a TrainingError name the step as the log of a job does, from 1; an engine counts steps from 0."""
    try:
        yield
    except TrainingError as error:
        if error.step is not None:
            error.step += 1
        raise


class RemoteError(TrainingError):
    """A remote module has raised at its owner."""


class LaunchError(ShoalError):
    """Ranks could not start, died or stalled."""

    exit_code = 4


class CheckpointError(ShoalError):
    """A checkpoint cannot be written or none can be read."""

    exit_code = 5


class StorageError(ShoalError):
    """The disk that plan.memory names cannot be used: full, taken, cut short, broken."""

    exit_code = 6


class CorruptionError(ShoalError):
    """Replicas hold different bits. `here`: whether this rank may be the one that is wrong."""

    exit_code = 7

    def __init__(self, message: str, here: bool) -> None:
        super().__init__(message)
        self.here = here


class BudgetExceeded(UserError):
    """A memory budget is too small. `needed`, `capacity`: bytes of the smallest sufficient budget, of the given one."""

    def __init__(self, needed: int, capacity: int, what: str) -> None:
        super().__init__(f"{what}: {needed:,} bytes are needed, the budget is {capacity:,}")
        self.needed, self.capacity = needed, capacity


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Returns ' Did you mean "x"?' for the closest of `known`, or '' when nothing is close.

    One that is nearly the same, else one that has all words of it, or only some of them (`save`: save_every;
    `zero_stage`: zero), else one that is somewhat like it; of several as close one with the same letter in front.
    """
    from difflib import SequenceMatcher

    plain = word.lower()
    like = {name: SequenceMatcher(None, name.lower(), plain).ratio() for name in known}
    words = set(plain.split("_"))
    some = {name: set(name.lower().split("_")) for name in known}
    close = (
        [name for name in like if like[name] >= 0.8]
        or [name for name in like if words <= some[name] or some[name] <= words]
        or [name for name in like if like[name] >= 0.6]
    )
    best = max(close, key=lambda name: (like[name], name[:1].lower() == plain[:1]), default=None)
    return "" if best is None else f' Did you mean "{best}"?'


def check_choice(said: str, choice: object, known: Iterable[str]) -> None:
    """Raises UserError, with the closest one, if `choice` is none of `known`. said: the message up to their list."""
    names = list(known)
    if choice not in names:
        raise UserError(f"{said} {', '.join(names)}.{did_you_mean(str(choice), names)}")


def check_names(said: str, given: Iterable[str], known: Iterable[str], lists: str = "It has") -> None:
    """Raises UserError, with the closest one, for the first name `given` that is none of `known`.

    said: the message up to that name. lists: what stands before the list of known ones.
    """
    names = list(known)
    for name in given:
        if name not in names:
            raise UserError(f'{said} "{name}".{did_you_mean(name, names)} {lists}: {", ".join(names) or "none"}')


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a value of TOML or JSON has the type `hint`. An int also fits float; a bool fits only bool.

    Any text fits a Literal: whoever knows the choices names them.
    """
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(fits(value, member) for member in get_args(hint))
    if origin is list:
        return isinstance(value, list) and all(fits(item, get_args(hint)[0]) for item in value)
    if origin is Literal:
        return isinstance(value, str)
    if isinstance(value, bool):
        return hint in (bool, Any)
    return hint is Any or isinstance(value, (int, float) if hint is float else (origin or hint))


def check_numbers(where: str, value: Any) -> None:
    """Raises ArgumentError for a float that is not finite or an integer of more than 64 bits, anywhere in `value`.

    where: the name of the argument or key that has the value.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ArgumentError(where, f" = {value}: give a finite number")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ArgumentError(where, f" is a number of {value.bit_length()} bits: give one below 2**63")
    if isinstance(value, Mapping):
        for key, each in value.items():
            check_numbers(f"{where}.{key}", each)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            check_numbers(f"{where}[{index}]", each)
