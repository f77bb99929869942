"""Which members there are, and what each can give to the next generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.elastic.backoff import Backoff
from shoal.elastic.events import UNABLE, Ended, Generation, Joined
from shoal.elastic.unfit import Unfit


@dataclass
class Roster:
    """The members of a job.

    backoff: who is put aside. unfit: with which numbers of ranks the job could not go on.
    members: those that are connected, by name.
    known: the incarnation of every member that there ever was, by name, in the order in which they first came.
    ready: how many processes of a member wait for a place.
    holding: the members of whose waiting processes one has the state of the run in memory. That may be an older state
        than others have: ranks go on from the newest.
    draining: the members that want to leave, in the order in which they said so, and by which signal.
    came: when a member or a rank came last.
    went_on: how many ranks the members had in the last generation that came further.
    """

    backoff: Backoff
    members: dict[str, Joined] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    ready: dict[str, int] = field(default_factory=dict)
    holding: set[str] = field(default_factory=set)
    draining: dict[str, int] = field(default_factory=dict)
    came: float = 0.0
    unfit: Unfit = field(default_factory=Unfit)
    went_on: Mapping[str, int] = field(default_factory=dict)

    def join(self, event: Joined) -> None:
        """Takes in a member that has come or come back."""
        self.members[event.name], self.known[event.name] = event, event.incarnation
        self.ready[event.name] = event.ranks
        self.hold(event.name, event.holds)

    def hold(self, name: str, holds: bool) -> None:
        if holds:
            self.holding.add(name)
        else:
            self.holding.discard(name)

    def wait(self, name: str, ranks: int, now: float) -> None:
        """Takes in how many processes of a member wait; more of them are newcomers."""
        if name in self.members:
            self.came = now if ranks > self.ready[name] else self.came
            self.ready[name] = ranks

    def remove(self, name: str) -> bool:
        """Forgets a member that is gone, but not its place; returns whether it was there."""
        self.draining.pop(name, None)
        self.holding.discard(name)
        self.ready.pop(name, None)
        return self.members.pop(name, None) is not None

    @property
    def all_leave(self) -> bool:
        """Whether nobody is left to go on: the run ends for now, as after a signal on one host."""
        return bool(self.members) and self.members.keys() <= self.draining.keys()

    @property
    def left_by(self) -> int:
        """The signal by which the last of those that want to leave does, 0 where none does."""
        return next(reversed(self.draining.values()), 0)

    def release(self, names: list[str]) -> None:
        """Lets members go; nobody wants to leave any more."""
        for name in names:
            self.members.pop(name, None)
        self.draining.clear()

    @property
    def times(self) -> list[float]:
        """When members come back that are aside, or may be tried again."""
        return [*self.backoff.ends, *self.unfit.until.values()]

    def ended(self, generation: Generation | None, event: Ended, now: float) -> None:
        """Takes in that so many ranks as those of `generation` could not go on, or did."""
        if generation is None:
            return
        if event.outcome == UNABLE:
            self.unfit.note(generation.ranks.values(), now)
        elif event.step > generation.step:
            self.went_on = generation.ranks

    def unfit_with(self, generation: Generation | None, name: str, now: float) -> int:
        """Returns how many ranks there would be with those of the member `name` in `generation`, where these could not
        go on; else 0."""
        there = {} if generation is None else generation.ranks
        ranks = {**there, name: there.get(name, 0) + self.ready.get(name, 0)}
        return sum(ranks.values()) if self.unfit.holds(ranks.values(), now) else 0

    def newcomers(self, generation: Generation | None, most: int, now: float) -> str:
        """Says who would give ranks beside those of `generation`, "" if nobody would. `most`: the largest number of
        members."""
        there = {} if generation is None else generation.ranks
        new = [name for name in self.able(now) if len(there) < most or name in there]
        ranks = {**there, **{name: there.get(name, 0) + self.ready[name] for name in new}}
        fit = self.unfit.without(ranks, there, now) if new else []
        new = [name for name in new if name in fit and not self.unfit.holds([ranks[each] for each in fit], now)]
        said = [f"{name} has another rank" if name in there else f"{name} joins" for name in new[:4]]
        return ", ".join(said) + " ..." * (len(new) > 4)

    def able(self, now: float, least: int = 0) -> list[str]:
        """Returns the members that can give ranks, in the order of their places; where they are fewer than `least`,
        also those that are aside because they are slow."""
        here = [
            name
            for name in self.known
            if name in self.members and name not in self.draining and self.ready.get(name, 0)
        ]
        able = [name for name in here if self.backoff.left(name, now) <= 0]
        return able if len(able) >= least else [name for name in here if self.backoff.left(name, now, True) <= 0]

    def chosen(self, able: list[str], named: frozenset[str], most: int, least: int, now: float) -> dict[str, int]:
        """Returns the members for the next generation, `least` to `most` of those that are `able`, and how many ranks
        each gives: who was in the last one, which had the members `named`, goes on; without those that hold nothing and
        with whom the others cannot, and, where that is not enough, without ranks that members did not have before."""
        taken = set(sorted(able, key=lambda name: name not in named)[:most])
        ranks = {name: self.ready[name] for name in able if name in taken}
        before = {name: min(number, self.went_on.get(name, number)) for name, number in ranks.items()}
        for each in (ranks, before):
            fit = {name: each[name] for name in self.unfit.without(each, self.holding, now)}
            if len(fit) >= least and not self.unfit.holds(fit.values(), now):
                return fit
        return ranks

    def place(self, ranks: Mapping[str, int]) -> Mapping[str, int]:
        """Takes so many waiting processes of members for a generation; returns how many."""
        self.ready |= {name: self.ready[name] - number for name, number in ranks.items()}
        self.holding -= set(ranks)
        return ranks
