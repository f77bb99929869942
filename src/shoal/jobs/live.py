"""A rank that keeps its process, and the state in its memory, from generation to generation (see docs/elastic.md).

warm up --> wait for a place --> a world --> the state, from memory or a checkpoint --> an attempt --> its end
                  ^                                                                        |
                  +------------ other ranks are gone, leave or join -----------------------+
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from shoal.assembly.replan import without_collections
from shoal.comm import World
from shoal.comm.address import host_port
from shoal.elastic.control import CALLED, WAITS, Control, Left, Place, Warm, call_this
from shoal.elastic.events import FOR_GOOD, HALT, NOW
from shoal.elastic.worker import STDOUT
from shoal.engine import Engine
from shoal.errors import CheckpointError, CorruptionError, LaunchError, ShoalError, UserError
from shoal.jobs import resume
from shoal.jobs.assemble import make_engine
from shoal.jobs.attempt import Attempt, Speed
from shoal.jobs.automatic import planned
from shoal.jobs.choose import Settled, at_size, opened
from shoal.jobs.costs import peak_flops
from shoal.jobs.generation import missing, on_disk, placed, record_of
from shoal.jobs.lock import locked
from shoal.jobs.outcome import Outcome
from shoal.jobs.read import load_job
from shoal.jobs.stop import Halted
from shoal.jobs.timeline import Kept
from shoal.jobs.train import about, begin, cost_of, plan_line
from shoal.jobs.trying import passing_over
from shoal.jobs.underway import tell_what_is_under_way
from shoal.jobs.write import keep_resolved
from shoal.launch import enter
from shoal.launch.failure import has_lost_peer
from shoal.launch.identity import Identity
from shoal.module.ahead import Ahead

log = logging.getLogger(__name__)

_SOON = 1.0
"""Seconds in which a rank whose save failed hears that another one is gone, if that was why."""

PATIENCE = 300.0
"""Seconds in which others are to come, or to leave, where so many ranks cannot go on."""

_MOST = 2000
"""Characters of an error that a supervisor is told."""


class LiveRank:
    """A process of the job file `path` with `assignments` on top, which has its places from `control`."""

    def __init__(self, path: str, assignments: list[str], control: Control) -> None:
        self._path, self._assignments, self._control = path, assignments, control
        settled = opened(*load_job(path, assignments))
        self._ahead = Ahead(settled.model.factory)
        self._opened = replace(settled, model=replace(settled.model, factory=self._ahead))
        self._cost = cost_of(self._opened)
        self._engine: Engine | None = None
        self._attempt: Attempt | None = None  # the last one
        self._recorded: Kept = [], [], []  # of timelines that were cut short
        self._waited = list[str]()  # what has happened since the last generation that could go on
        self._trained, self._unable, self._why_unable = 0, set[int](), ""  # sizes of the world that went on last, not
        self._output = [os.dup(1), os.dup(2)]
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def to_its_end(self) -> Outcome:
        """Trains in one generation after the other, until the run ends."""
        self._prepare()
        self._control.send(Warm())
        while True:
            place = self._control.wait()
            call_this(f"{CALLED}{place.rank}")
            self._speak(place.rank == 0)
            with tell_what_is_under_way(place.rank == 0):
                outcome = self._train(place)
            if isinstance(outcome, Outcome):
                return outcome
            call_this(WAITS)
            step = -1 if self._engine is None else self._engine.step_index
            asked = outcome != NOW
            failure = self._attempt.saver.failure if asked and self._attempt is not None else None
            unsaved = "" if failure is None else str(failure)[:_MOST]
            unable, self._why_unable = self._why_unable[:_MOST], ""
            self._control.send(Left(place.generation, step, self._engine is not None, asked, unsaved, unable))
            self._prepare()

    @without_collections()
    def _prepare(self) -> None:
        """Builds the model for the next generation, whose place comes meanwhile."""
        self._ahead.prepare(self._opened.job.train.seed)

    def _train(self, place: Place) -> Outcome | str:
        """Trains in a generation; returns how this rank has left it, where the run goes on (see events.NOW)."""
        how = NOW
        world: World | None = None
        try:
            world = self._enter(place)
            with locked(Path(self._opened.job.run.dir), world.everyone, keeps=Halted), self._losses():
                self._attempt = self._begin(place, world)
                self._attempt.timeline.take_over(self._recorded)
                self._recorded = self._attempt.timeline.kept
                self._control.leave_by(self._attempt.leave)
                return self._attempt.to_its_end()
        except Halted as halted:
            how = halted.how
            if isinstance(halted.__cause__, CorruptionError):
                self._let_go()  # the bits that are wrong elsewhere have been in the gradients of all
        except Exception as error:
            if not self._has_lost(error):
                raise
        if world is not None:
            world.close()
        return how

    def _enter(self, place: Place) -> World:
        """Makes the world of a generation, which is closed when this rank is to leave at once."""
        identity = Identity(
            place.rank,
            place.size,
            place.slot,
            place.here,
            f"tcp://{host_port(place.host, place.port)}",
            place.generation,
            "shoal train --nodes",
        )
        world = enter(identity, place.secret.encode(), self._check)

        def leave(how: str) -> None:
            if how == NOW:
                world.close()

        self._control.leave_by(leave)
        return world

    def _check(self) -> None:
        if self._control.leaves_now():
            raise LaunchError("this rank is to leave its generation at once")

    @contextmanager
    def _losses(self) -> Iterator[None]:
        """Raises Halted where other ranks are gone."""
        try:
            yield
        except Exception as error:
            if isinstance(error, Halted) or not self._has_lost(error):
                raise
            raise Halted(NOW) from error

    def _has_lost(self, error: BaseException) -> bool:
        """Returns whether other ranks are gone. A save that fails may be the first to notice."""
        if not isinstance(error, Exception) or isinstance(error, Halted):
            return False
        if isinstance(error, CorruptionError):
            return not error.here
        seconds = _SOON if isinstance(error, CheckpointError) else 0.0
        return has_lost_peer(error) or self._control.leaves_now(seconds)

    def _begin(self, place: Place, world: World) -> Attempt:
        """Returns the attempt of this generation. Raises Halted where so many ranks cannot go on: some of them are left
        out, or the membership has changed; where neither is so, or none has begun, the UserError that says why."""
        try:
            attempt = self._begun(place, world)
        except UserError as error:
            if place.step <= 0 and not place.live:
                raise
            if self._trained and place.size not in self._unable:
                self._leave_to_fewer(place, error)
            self._wait_for_others(place, error)
        self._waited, self._trained, self._unable = [], place.size, set()
        return attempt

    def _leave_to_fewer(self, place: Place, error: UserError) -> NoReturn:
        """Leaves the generation: those that have nothing in memory are left out of the next one, if there are any."""
        self._why_unable = f"{place.size} rank(s) cannot go on, as {self._trained} did before: {error}"
        self._unable.add(place.size)
        self._waited += place.events
        log.warning("%s", self._why_unable)
        raise Halted(HALT) from error

    def _wait_for_others(self, place: Place, error: UserError) -> NoReturn:
        """Waits for a generation of more ranks, or of fewer, with what this rank has in memory."""
        self._waited += [*place.events, f"{place.size} rank(s) could not go on, and waited for others: {error}"]
        log.warning("%d rank(s) cannot go on, and wait for others, %d s at most: %s", place.size, PATIENCE, error)
        told = SimpleQueue[str]()
        self._control.leave_by(told.put)
        with suppress(Empty):
            if (how := told.get(timeout=PATIENCE)) not in FOR_GOOD:
                raise Halted(how) from error
        raise error

    def _begun(self, place: Place, world: World) -> Attempt:
        """Returns the attempt: from what ranks have in memory, else from the newest checkpoint."""
        settled = placed(self._opened, self._path, self._assignments, place)
        failed = place.failed if place.generation > 1 else None
        settled = planned(at_size(settled, world), world, runs=False, failed=failed)  # others stand still
        why = ""
        if place.live:
            try:
                if (attempt := self._go_on(place, world, settled)) is not None:
                    return attempt
            except CheckpointError as error:
                why = str(error.__cause__ or error)  # without what a program of the user's would do now
        self._let_go()
        begun = begin(settled, world)
        self._engine = begun.engine
        if why:
            how = "went on from the newest checkpoint" if begun.engine.step_index else "began anew, as no step is saved"
            why = f"the ranks {how}: {why}"
            log.warning(why)
        step, run_dir = begun.engine.step_index, Path(self._opened.job.run.dir)
        evaluated = world.everyone.broadcast_object(on_disk(run_dir)[2] if world.rank == 0 else None)
        record = record_of(place, step, *self._waited, *filter(None, [why]))
        late = self._opened.data.validation is not None and evaluated < step  # one had saved, and was to evaluate
        return begun.attempt(self._cost, record, evaluated=evaluated if late else None, has_lost=self._has_lost)

    def _go_on(self, place: Place, world: World, settled: Settled) -> Attempt | None:
        """Returns the attempt that goes on from memory; None where the newest checkpoint is newer. A collective call;
        raises CheckpointError, on all ranks alike, where memory is not enough."""
        run_dir = Path(settled.job.run.dir)
        told = world.everyone.all_gather_object([self._brought(), on_disk(run_dir) if world.rank == 0 else None])
        saved, recorded, evaluated = told[0][1]
        brought = [each for each, _ in told if each is not None]
        newest = max((each["step"] for each in brought), default=-1)
        if newest < saved or newest < 0:
            return None
        log.info("going on from memory")
        settled, (engine, late), refused = passing_over(settled, partial(self._regrouped, world))
        self._engine = engine
        recent = [*(each["recent"] for each in brought), *world.everyone.all_gather_object(late)]
        user = {"seconds": max(each["seconds"] for each in brought)}
        speed = Speed(self._cost, peak_flops(engine, measure=False))
        restored = resume.Restored(saved, user, "", [])
        attempt = Attempt(
            settled, engine, restored, about(settled), speed, evaluated=evaluated, has_lost=self._has_lost
        )
        recorder = attempt.recorder
        recorder.missing(missing(recent, recorded, engine.step_index))
        recorder.membership(record_of(place, engine.step_index, *self._waited))
        if settled.why:
            recorder.note(plan_line(settled))
        attempt.trying.say_refused(refused)
        if world.rank == 0:
            keep_resolved(settled.job, settled.origins, run_dir, settled.trials, recorder.warning)
        return attempt

    def _regrouped(self, world: World, settled: Settled) -> tuple[Engine, list[dict[str, Any]]]:
        """Returns the engine of this rank with the ranks of `world`, which go on in memory, and the record of a step
        that was cut short after it was committed, if there is one."""
        if (engine := self._engine) is None:
            return make_engine(settled.job, settled.model, settled.total, world, joins=True), []
        made = engine.regroup(settled.job.plan, world, microbatch=settled.job.train.microbatch)
        if made is None or self._attempt is None:
            return engine, []
        return engine, [asdict(self._attempt.recorder.late(made, engine.global_batch))]

    def _brought(self) -> dict[str, Any] | None:
        """Returns what the ranks of a new generation have to know of the one before, None on one that was not there."""
        if self._engine is None or self._attempt is None:
            return None
        attempt = self._attempt
        recent = [asdict(each) for each in attempt.recorder.recent()]
        return {"step": self._engine.step_index, "seconds": attempt.seconds, "recent": recent}

    def _let_go(self) -> None:
        """Frees the engine of earlier generations."""
        engine, self._engine, self._attempt = self._engine, None, None
        if engine is not None:
            with suppress(ShoalError):  # ranks that are gone cannot be told
                engine.close()
        del engine
        gc.collect()

    def _speak(self, first: bool) -> None:
        """Gives rank 0 the terminal of its node; what other ranks print goes to their log."""
        sys.stdout.flush()
        sys.stderr.flush()
        names = (STDOUT, "SHOAL_TERMINAL")
        for number, own in zip((1, 2), self._output, strict=True):
            os.dup2(int(os.environ[names[number - 1]]) if first else own, number)
