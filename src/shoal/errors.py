"""Errors a person sees. The message is the whole story: the value, the rank and step where known, the cause, the remedy."""

from __future__ import annotations


class ShoalError(Exception):
    """Base of every error that Shoal raises on purpose; the CLI prints its message without a traceback.

    `exit_code` is what the process exits with.
    """

    exit_code = 1


class UserError(ShoalError, ValueError):
    """Wrong input: a file, a job key, a plan field, a model that does not fit its batch."""

    exit_code = 2


class TrainingError(ShoalError):
    """Training cannot go on: a loss or gradient that is not finite."""

    exit_code = 3


class LaunchError(ShoalError):
    """Ranks could not start, died or stalled."""

    exit_code = 4


class CheckpointError(ShoalError):
    """A checkpoint cannot be written or none can be read."""

    exit_code = 5


class StorageError(ShoalError):
    """The disk that plan.memory names cannot be used: full, taken, cut short, broken."""

    exit_code = 6


class BudgetExceeded(UserError):
    """A budget of memory is too small. `needed`: the smallest that would do, in bytes; `capacity`: what there is."""

    def __init__(self, needed: int, capacity: int, what: str) -> None:
        super().__init__(f"{what}: {needed:,} bytes are needed, the budget is {capacity:,}")
        self.needed, self.capacity = needed, capacity


def did_you_mean(word: str, known: list[str]) -> str:
    """Returns ' Did you mean "x"?' for the closest of `known`, or '' when nothing is close."""
    import difflib

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f' Did you mean "{close[0]}"?' if close else ""
