"""When a parameter server updates, and who must wait for whom.

    Sync(n)               one update once n clients have pushed gradients of the same version: all-reduce SGD
    Batch(k)              one update for every k pushes, whoever they come from
    BoundedStaleness(s)   an update a push; a client may be s pushes ahead of the slowest (Ho et al. 2013, SSP)
    Async()               an update a push, nobody waits (Dean et al. 2012, Downpour SGD)

The lag of a push is the number of updates between the pull of its weights and the push. By it a policy may scale the
learning rate of the update, or drop the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from shoal.errors import UserError, check_choice


@dataclass
class Member:
    """A client's account with a part.

    sequence: of its last push.
    clock: how many pushes it has made, beginning where the slowest was when it came.
    pushed: the version of which its last gradient was; -1 for none.
    """

    incarnation: str = ""
    sequence: int = 0
    clock: int = 0
    pushed: int = -1


Members = Mapping[int, Member]


@runtime_checkable
class Policy(Protocol):
    """Decides; keeps no state."""

    @property
    def ordered(self) -> bool:
        """Whether gradients are summed in the order of ranks, instead of that of their arrival."""

    def due(self, pending: int) -> bool:
        """Returns whether `pending` gradients make an update."""

    def awaited(self, rank: int, members: Members, active: Set[int], version: int) -> tuple[bool, Sequence[int]]:
        """Returns whether the pull of client `rank` must wait, and for which of the `active` clients."""

    def staleness(self, rank: int, members: Members, active: Set[int]) -> int | None:
        """Returns by how many pushes the values that client `rank` pulls now may miss what others have done; None where
        that is the lag, known at the push."""

    def weight(self, lag: int) -> float:
        """Returns the factor for the learning rate; 0 drops the gradient."""


def check_policy(given: object) -> None:
    """Raises UserError for what is no policy, such as the name or the class of one."""
    if isinstance(given, type) or not isinstance(given, Policy):
        raise UserError(
            f"policy = {given!r}: give one as it is made, such as shoal.Sync(4), shoal.Batch(4), "
            "shoal.BoundedStaleness(2) or shoal.Async()"
        )


@dataclass(frozen=True)
class Sync:
    """One update of the mean of `n` clients' gradients, the same bits as an all-reduce in the order of their ranks. A
    client waits, in its pull, for the update to which it has contributed; gradients of older versions are dropped."""

    n: int
    ordered: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        _check_count("Sync", self.n)

    def due(self, pending: int) -> bool:
        return pending >= self.n

    def awaited(self, rank: int, members: Members, active: Set[int], version: int) -> tuple[bool, Sequence[int]]:
        if members[rank].pushed != version:
            return False, ()
        return True, [other for other in sorted(active) if members[other].pushed != version]

    def staleness(self, rank: int, members: Members, active: Set[int]) -> int | None:
        return None

    def weight(self, lag: int) -> float:
        return float(lag == 0)


@dataclass(frozen=True, kw_only=True)
class _Stale:
    """What lag does: `scale` = "inverse" divides the learning rate by 1 + lag (Zhang et al. 2016), "none" leaves it;
    gradients of a lag above `drop_above` are dropped."""

    scale: str = "none"
    drop_above: int | None = None
    ordered: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_choice(f'scale = "{self.scale}" is not one of', self.scale, ["none", "inverse"])
        if self.drop_above is not None and (type(self.drop_above) is not int or self.drop_above < 0):
            raise UserError(f"drop_above = {self.drop_above!r:.100}: give a number of updates from 0 on, or None")

    def due(self, pending: int) -> bool:
        return pending >= 1

    def awaited(self, rank: int, members: Members, active: Set[int], version: int) -> tuple[bool, Sequence[int]]:
        return False, ()

    def staleness(self, rank: int, members: Members, active: Set[int]) -> int | None:
        return None

    def weight(self, lag: int) -> float:
        if self.drop_above is not None and lag > self.drop_above:
            return 0.0
        return 1 / (1 + lag) if self.scale == "inverse" else 1.0


@dataclass(frozen=True)
class Async(_Stale):
    """An update for every push, at once."""


@dataclass(frozen=True)
class Batch(_Stale):
    """An update with the mean of every `k` gradients, in the order in which they come."""

    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("Batch", self.k)

    def due(self, pending: int) -> bool:
        return pending >= self.k


@dataclass(frozen=True)
class BoundedStaleness(_Stale):
    """An update for every push. A client that is more than `s` pushes ahead of the slowest waits in its pull, so the
    values that it gets miss at most the last `s` pushes that another should have made."""

    s: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.s) is not int or self.s < 0:
            raise UserError(f"BoundedStaleness({self.s!r}): give a number of pushes from 0 on")

    def awaited(self, rank: int, members: Members, active: Set[int], version: int) -> tuple[bool, Sequence[int]]:
        slow = [other for other in sorted(active) if members[other].clock < members[rank].clock - self.s]
        return bool(slow), slow

    def staleness(self, rank: int, members: Members, active: Set[int]) -> int | None:
        return max(members[rank].clock - members[other].clock for other in active | {rank})


def _check_count(name: str, count: object) -> None:
    if type(count) is not int or count < 1:
        raise UserError(f"{name}({count!r}): give a number of pushes from 1 on")
