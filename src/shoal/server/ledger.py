"""The accounts of a part: who has pushed what, what waits for an update, and which version there is. It computes
nothing and waits for nobody, so a journal can be replayed through it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from shoal.server.policies import Member, Policy


@dataclass(frozen=True)
class Gradient:
    """A push of client `rank`: decoded `tensors`, of the values of `version`; see messages.Push."""

    rank: int
    incarnation: str
    sequence: int
    version: int
    untouched: frozenset[str]
    tensors: list[Tensor]
    count: float = 1.0
    ticket: int = -1
    note: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """Gradients whose mean makes one update, in the order in which they are summed, and the factor for its learning
    rate."""

    gradients: list[Gradient]
    weight: float


@dataclass(frozen=True)
class Outcome:
    """What became of a push: its `lag` and `weight` (see messages.Taken), and the update that it completes."""

    lag: int
    weight: float
    update: Update | None


class Ledger:
    """Accounts by client rank under `policy`.

    version: the number of updates so far.
    staleness, lags: how often each was seen.
    dropped, scaled: pushes that the policy has dropped, and those whose learning rate it has made smaller.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.version = self.pushes = self.dropped = self.scaled = 0
        self.members: dict[int, Member] = {}
        self.staleness: Counter[int] = Counter()
        self.lags: Counter[int] = Counter()
        self._pending: list[tuple[Gradient, float]] = []

    def clock_for(self, rank: int, active: Set[int]) -> int:
        """Returns the clock with which client `rank` begins: it owes nothing for the time before it came."""
        slowest = min((self.members[other].clock for other in active - {rank} if other in self.members), default=0)
        return max(slowest, self.members[rank].clock if rank in self.members else 0)

    def join(self, rank: int, incarnation: str, clock: int) -> None:
        """Opens an account, or goes on with that of an earlier process of the same rank."""
        member = self.members.setdefault(rank, Member())
        if member.incarnation != incarnation:
            member.incarnation, member.sequence, member.clock = incarnation, 0, clock

    def is_known(self, rank: int, incarnation: str, sequence: int) -> bool:
        """Returns whether this push has been taken already."""
        member = self.members[rank]
        return member.incarnation == incarnation and sequence <= member.sequence

    def problem(self, push: Gradient) -> str:
        """Returns why a push cannot be taken, or ""."""
        if not 0 <= push.version <= self.version:
            return f"a gradient of version {push.version}: there are 0 to {self.version}"
        if push.sequence != self.members[push.rank].sequence + 1:
            return f"push {push.sequence} after push {self.members[push.rank].sequence}"
        source = push.rank, push.ticket
        if self._policy.ordered and any((waiting.rank, waiting.ticket) == source for waiting, _ in self._pending):
            return f"client {push.rank} has pushed a gradient of version {self.version} already: pull before the next"
        return ""

    def skip(self, rank: int, sequence: int) -> None:
        """Enters a push that changes nothing, since another client has brought the gradient of its ticket."""
        member = self.members[rank]
        member.sequence, member.clock = sequence, member.clock + 1
        self.pushes, self.dropped = self.pushes + 1, self.dropped + 1

    def take(self, push: Gradient) -> Outcome:
        """Enters a push that has no problem."""
        member, lag = self.members[push.rank], self.version - push.version
        member.sequence, member.pushed, member.clock = push.sequence, push.version, member.clock + 1
        weight = self._policy.weight(lag)
        self.pushes += 1
        self.lags[lag] += 1
        if not weight:
            self.dropped += 1
            return Outcome(lag, weight, None)
        self.scaled += weight != 1.0
        self._pending.append((push, weight))
        if not self._policy.due(len(self._pending)):
            return Outcome(lag, weight, None)
        waiting, self._pending = self._pending, []
        if self._policy.ordered:
            waiting.sort(key=lambda each: (each[0].ticket, each[0].rank))
        self.version += 1
        return Outcome(lag, weight, Update([each for each, _ in waiting], sum(w for _, w in waiting) / len(waiting)))

    @property
    def pending(self) -> int:
        """The number of pushes that wait for others to make an update."""
        return len(self._pending)

    def pulled(self, rank: int, active: Set[int]) -> None:
        """Notes how stale the values are that a client gets now."""
        stale = self._policy.staleness(rank, self.members, active & self.members.keys())
        if stale is not None:
            self.staleness[stale] += 1

    def state(self) -> dict[str, Any]:
        """Returns the accounts as JSON; no gradient may be pending."""
        assert not self._pending
        members = {str(rank): asdict(member) for rank, member in self.members.items()}
        seen = {"staleness": _told(self.staleness), "lags": _told(self.lags), "scaled": self.scaled}
        return {"version": self.version, "pushes": self.pushes, "dropped": self.dropped, "members": members, **seen}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self.version, self.pushes, self.dropped = state["version"], state["pushes"], state["dropped"]
        self.members = {int(rank): Member(**member) for rank, member in state["members"].items()}
        self.staleness, self.lags = _counted(state.get("staleness", {})), _counted(state.get("lags", {}))
        self.scaled = state.get("scaled", 0)


def _told(counts: Counter[int]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(counts.items())}


def _counted(told: Mapping[str, int]) -> Counter[int]:
    return Counter({int(value): count for value, count in told.items()})
