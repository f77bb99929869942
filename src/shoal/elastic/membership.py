"""The membership of a job as a state machine: events in, decisions out.

    gathering --form--> running --a reason--> stopping --all ranks have left--> gathering ... over

It has no clock, socket, file or thread: every event carries its time, and the same events give the same state and the
same decisions. So a journal replays it, a standby follows it, and a test tries it with thousands of members.

Two rules keep two generations from running at once. The next one is formed only when every member of the last has said
that its ranks have left it, or is gone (a silent member's ranks leave by themselves, see liveness). And where members
are silent, which may be a cut link, only the side with more of the last generation's members goes on; where both have
as many, the side whose coordinator was there before.
"""

from __future__ import annotations

from signal import SIGTERM

from shoal.elastic.backoff import Backoff
from shoal.elastic.events import (
    CUT_OFF,
    FOR_GOOD,
    HALT,
    NOW,
    SAVE,
    UNABLE,
    Asked,
    Decision,
    Draining,
    Drop,
    Ended,
    Event,
    Finish,
    Form,
    Generation,
    Joined,
    Left,
    Limits,
    Ready,
    Release,
    Say,
    Slow,
    StepDown,
    Stop,
    TookOver,
    for_good,
    seated,
)
from shoal.elastic.headway import Headway, nearer, said
from shoal.elastic.notes import Notes
from shoal.elastic.quorum import outnumbered
from shoal.elastic.roster import Roster

GATHERING, RUNNING, STOPPING, DEPOSED, OVER = "gathering", "running", "stopping", "deposed", "over"


class Membership:
    """The members of a job and their generation.

    phase: GATHERING, RUNNING, STOPPING, DEPOSED (this side must not go on, until somebody takes over) or OVER.
    generation: the newest one; its ranks run unless the phase is GATHERING.
    roster: the members.
    named, pending, awaited: the members of the generation; those of them whose ranks have not left it; those that have
        not found the coordinator that took over.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.phase = GATHERING
        self.generation: Generation | None = None
        self.roster = Roster(Backoff(limits.window, limits.longest))
        self.pending: set[str] = set()
        self._newest = self._number = 0  # numbers of the newest generation that anybody knows of, and of this one
        self.named: frozenset[str] = frozenset()
        self._ended: dict[str, Ended] = {}
        self._hurt: Ended | None = None  # the first of them for which the others cannot go on
        self._gone: dict[str, bool] = {}  # members of the generation, and whether that is proven
        self._blamed: set[str] = set()  # those whose loss was counted
        self.awaited: set[str] = set()
        self._strict = False  # another coordinator took over since the last generation was formed
        self._asked = 0
        self._stop: Stop | None = None
        self.now, self._idle = 0.0, -1.0  # when the last ranks had left
        self._deadline = self._rejoined = float("inf")
        self._headway = Headway()
        self._notes = Notes()

    def apply(self, event: Event) -> list[Decision]:
        """Takes in an event and returns what is decided because of it, in order."""
        if self.phase == OVER or (self.phase == DEPOSED and not isinstance(event, TookOver)):
            return []
        self.now = max(self.now, event.time)
        decided: list[Decision] = []
        if isinstance(event, Left):
            self._leave(event)
        elif isinstance(event, Ended):
            self._end(event)
        elif isinstance(event, Ready):
            self.roster.wait(event.name, event.ranks, self.now)
        elif isinstance(event, Draining):
            decided = self._drain(event.name, event.number)
        elif isinstance(event, Joined):
            decided = self._join(event)
        elif isinstance(event, Slow):
            decided = self._put_aside(event)
        elif isinstance(event, Asked):
            self._asked = event.number
        elif isinstance(event, TookOver):
            decided = self._take_over(event)
        decided += self._go_on()
        return [*map(Say, self._notes.said()), *decided]

    def due(self, now: float) -> bool:
        """Whether time alone changes something between the last event and `now`: then a Tick is to be applied."""
        times = (self.roster.came + self.limits.settle, self._deadline, self._rejoined, *self.roster.times)
        return self.phase != OVER and any(self.now < time <= now for time in times)

    def _join(self, event: Joined) -> list[Decision]:
        name, current = event.name, self.phase in (RUNNING, STOPPING) and event.name in self.named
        if name not in self.roster.members and name not in self.awaited:
            self._notes.add(f"{name} {'came back' if name in self.roster.known else 'joined'}")
        self.roster.join(event)
        self.awaited.discard(name)
        self._gone.pop(name, None)
        if current and event.running == self._number and name not in self._ended:  # only the connection was lost
            self.pending.add(name)
            return [self._stop] if self.phase == STOPPING and self._stop is not None else []
        if name in self.pending:
            self._end(Ended(self.now, name, self._number, "lost", 0, -1, CUT_OFF, event.ranks, event.holds))
        self.roster.came = self.now
        return []

    def _leave(self, event: Left) -> None:
        name = event.name
        was = self.roster.remove(name) or name in self.pending
        if name in self.named and (was or name in self._gone):
            self._lose(name, event.proven)
        if was:
            self._notes.add(f"{name} is gone: {event.why}")

    def _end(self, event: Ended) -> None:
        if event.generation == self._number:  # also of a member that counts as gone from it, and has just come back
            self.roster.wait(event.name, event.ranks, self.roster.came)
        if event.generation == self._number and event.name in self.pending:
            self.pending.discard(event.name)
            self._ended[event.name] = event
            self.roster.hold(event.name, event.holds and event.name in self.roster.members)
            if event.outcome not in ("finished", "stopped") or (event.outcome == "stopped" and self.phase == RUNNING):
                self._hurt = nearer(self._hurt, event)
            if event.outcome in ("failed", "killed", UNABLE):
                self._notes.add(f"{event.name}: {event.message}")
            self.roster.ended(self.generation, event, self.now)

    def _drain(self, name: str, number: int) -> list[Decision]:
        if name not in self.roster.members:
            return []
        self._notes.add(f"{name} drains")
        if self.phase in (RUNNING, STOPPING) and name in self.named:
            self.roster.draining.setdefault(name, number)
            return []
        self.roster.remove(name)
        return [Release(name), *self._last_one_left()]

    def can_spare(self, name: str) -> bool:
        """Whether enough members train without this one of the generation."""
        others = self.named - self.roster.draining.keys() - self._ended.keys() - {name}
        return self.phase == RUNNING and not self._asked and len(others) >= self.limits.minimum

    def _put_aside(self, event: Slow) -> list[Decision]:
        if event.generation != self._number or event.name not in self.pending or not self.can_spare(event.name):
            return []
        self._notes.add(self.roster.backoff.slow(event.name, event.why, self.now))
        return self._begin_to_stop(f"{event.name} is slow", SAVE)

    def _take_over(self, event: TookOver) -> list[Decision]:
        self._newest = max(self._newest, event.number)
        self._notes.add(f"{event.name} coordinates in place of {event.former}")
        self.roster.release(list(self.roster.members))
        self.roster.came = self.now
        if self.generation is None:
            return []
        self._gone = {name: True for name, proven in self._gone.items() if proven}  # who was silent may be heard here
        if (former := event.former) in self.named:
            self._lose(former, event.proven)
        self.awaited = {name for name in self.named if name not in self._gone}
        self._strict = True  # another standby may think that it is the next one, too
        self._rejoined = self.now + self.limits.rejoin
        return self._begin_to_stop(f"{former}, which coordinated, is gone", NOW)

    def _go_on(self) -> list[Decision]:
        decided = self._look_for_a_reason() if self.phase == RUNNING else []
        if self.phase == STOPPING:
            decided += self._hurry()
            decided += self._all_have_ended() if not self.pending and not self.awaited else []
        if self.phase == GATHERING:
            decided += self._form()
            decided += self._look_for_a_reason() if self.phase == RUNNING and self._asked else []
        return decided

    def _look_for_a_reason(self) -> list[Decision]:
        """Ends the running generation where a member is gone, has failed, leaves or waits to join."""
        if self._gone:
            return self._begin_to_stop(f"{', '.join(self._gone)} is gone", NOW)
        if self._hurt is not None:
            return self._begin_to_stop(said(self._hurt), NOW)
        if not self.pending:
            return [self._over(Finish(0, "the training is complete"))]
        if self._asked:
            return self._begin_to_stop("the job was told to end", for_good(self._asked))
        if leaving := self.roster.draining.keys() & self.named:
            how = for_good(self.roster.left_by) if self.roster.all_leave else SAVE
            return self._begin_to_stop(f"{', '.join(sorted(leaving))} leaves", how)
        if not self._ended and self.now >= self.roster.came + self.limits.settle:
            new = self.roster.newcomers(self.generation, self.limits.maximum, self.now)
            return self._begin_to_stop(new, HALT) if new else []
        return []

    def _begin_to_stop(self, why: str, how: str) -> list[Decision]:
        self.phase = STOPPING
        self._stop = Stop(self._number, how, why)
        self._deadline = self.now + (self.limits.kill if how == NOW else self.limits.drain)
        return [self._stop] if self.pending else []

    def _hurry(self) -> list[Decision]:
        """Ends at once what does not come to a step boundary any more; gives up members that do not answer."""
        assert self._stop is not None
        if self.awaited and self.now >= self._rejoined:
            for name in sorted(self.awaited):
                self._notes.add(f"{name} is gone: it did not find the coordinator that took over")
                self._lose(name, False)
        asked = for_good(self._asked or self.roster.left_by)
        how = NOW if self._gone or self._hurt or self.now >= self._deadline else asked
        if self.pending and self._stop.how not in (NOW, how) and (how == NOW or self.roster.all_leave):
            return self._begin_to_stop(self._stop.why, how)
        late = sorted(self.pending - self.awaited) if self.now >= self._deadline else []
        for name in late:
            self._notes.add(f"{name} is gone: its ranks do not end")
            self.roster.remove(name)
            self._lose(name, False)
        return [Drop(name, "its ranks do not end") for name in late]

    def _lose(self, name: str, proven: bool) -> None:
        if name not in self._ended and name not in self._blamed:
            self._fail(name)
        self._blamed.add(name)
        self._gone[name] = proven
        self.pending.discard(name)
        self.awaited.discard(name)

    def _all_have_ended(self) -> list[Decision]:
        """Decides, once no rank is left in the generation, whether and with whom the job goes on."""
        assert self._stop is not None
        for each in [each for each in self._ended.values() if each.outcome == "failed"]:
            self._fail(each.name)
        asked = self._asked if self._stop.how in FOR_GOOD else 0
        end = self._headway.conclude(self._ended.values(), asked, self.limits.fruitless)
        if end is not None and (end.code != 0 or not self.roster.all_leave):  # ranks may have had the signal, too
            return [self._over(end)]
        return self._let_go()

    def _let_go(self) -> list[Decision]:
        """Releases the members that drained, and waits for the next generation."""
        leaving = sorted(self.roster.draining.keys() & self.named)
        self._gone |= dict.fromkeys(leaving, True)
        self.roster.release(leaving)
        self.phase, self._idle = GATHERING, self.now
        self._deadline = self._rejoined = float("inf")
        return [*map(Release, leaving), *(self._last_one_left() if leaving else [])]

    def _last_one_left(self) -> list[Decision]:
        return [] if self.roster.members else [self._over(Finish(128 + SIGTERM, "no node is left"))]

    def _form(self) -> list[Decision]:
        if self.limits.quorum and (why := outnumbered(self.named, self._gone, self._strict)):
            return [self._over(StepDown(why))]
        roster, there, least = self.roster, len(self.roster.members), 1 if self._asked else self.limits.minimum
        if self._asked and not roster.holding:
            return [self._over(Finish(128 + self._asked, "the job was told to end"))]
        settling = roster.came > self._idle and self.now < roster.came + self.limits.settle
        if there < least or (settling and there < self.limits.maximum):
            return []  # before anybody looks at every member: most of them are still coming
        able = roster.able(self.now, least)
        if len(able) < least or (settling and len(able) < there):
            return []
        names = roster.chosen(able, self.named, self.limits.maximum, least, self.now)
        live = not roster.holding.isdisjoint(names)
        places = seated(roster.place(names))
        why = said(self._hurt) if self._hurt and not self._gone else self._stop.why if self._stop else "the first"
        failed = any(each.outcome in ("failed", "killed") for each in self._ended.values())
        self._number = self._newest = self._newest + 1
        self.generation = Generation(self._number, places, why, self._headway.step, live, failed)
        self.phase, self.named, self.pending = RUNNING, frozenset(names), set(names)
        self._ended, self._hurt, self._gone, self._blamed, self._strict = {}, None, {}, set(), False
        return [Form(self.generation, self._notes.history())]

    def _fail(self, name: str) -> None:
        self._notes.add(self.roster.backoff.failed(name, self.now))

    def _over(self, decision: Finish | StepDown) -> Finish | StepDown:
        self.phase = DEPOSED if isinstance(decision, StepDown) else OVER
        return decision
