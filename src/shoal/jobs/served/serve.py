"""The parameter server of a job: keeps weights and run directory, deals samples, writes checkpoints and the report."""

from __future__ import annotations

import math
import platform
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.comm import World
from shoal.data import Cursor
from shoal.device import hardware_name
from shoal.errors import CheckpointError, ShoalError
from shoal.jobs import resume
from shoal.jobs.assemble import make_engine
from shoal.jobs.choose import Settled, Sizes, settle
from shoal.jobs.config import Job, Origins, describe, put
from shoal.jobs.lock import locked
from shoal.jobs.names import DIRECTORY
from shoal.jobs.outcome import Outcome, report_on
from shoal.jobs.record import Recorder
from shoal.jobs.served.devices import device_of_server
from shoal.jobs.served.policy import policy_of
from shoal.jobs.served.settings import check_served, shares
from shoal.jobs.served.several import JOURNALS, Line, part_path, share_of, spread_weights
from shoal.jobs.served.tables import tables_of
from shoal.jobs.served.watch import Recording
from shoal.jobs.stop import STOPPED
from shoal.jobs.train import about, make_directory
from shoal.launch.identity import Identity
from shoal.launch.local import signals
from shoal.report.events import FAILED
from shoal.report.metrics import RunRecord, last_recorded
from shoal.report.versions import versions
from shoal.server import ParameterServer
from shoal.server.keeping import Dealt, Keeping
from shoal.server.part import Part
from shoal.server.served_table import ServedTable
from shoal.server.shares import Share
from shoal.server.spread import Spread
from shoal.server.tickets import Tickets
from shoal.server.weights import Weights

GRACE = 5.0
_LOOK_SECONDS = 0.05
_TELL_SECONDS = 5.0  # between two records of clients and staleness
_LEAVE_SECONDS = 5.0  # for the workers to hear that there is nothing more
_FINISH_SECONDS = 45.0  # after a signal, for the steps that are begun; the launcher waits a minute
_LEAST_JOURNAL, _JOURNAL_PUSHES = 1 << 30, 20  # a checkpoint comes early once the journal has as much as either


def serve(job: Job, origins: Origins, place: Identity) -> Outcome:
    """Serves the workers of a job until they have trained it; writes the run directory as `train` does.

    SIGINT and SIGTERM end the run once the steps that are begun are complete, with a checkpoint and the report.
    """
    check_served(job, place.size)
    if job.server.policy is None:
        job, origins = put(job, origins, "server", policy="async")
    settled = settle(job, origins, Sizes(1, 1))
    world = World.single(device_of_server(job, place))
    with signals() as received, locked(Path(job.run.dir), world.everyone, replans=False):
        return _Serving(settled, world, place, received).to_its_end()


class _Serving:
    """An attempt of a run whose workers push to this process."""

    def __init__(self, settled: Settled, world: World, place: Identity, received: list[int]) -> None:
        self._settled, self._received, self._workers = settled, received, place.size
        job = self._job = settled.job
        self._run_dir = Path(job.run.dir)
        remembered = about(settled)
        checkpoint, said = resume.find(job, remembered, world.everyone)
        share, tables = Share(0, len(place.servers)), tables_of(settled)
        self._engine = engine = make_engine(job, share_of(tables, 0, share.count), settled.total, world)
        make_directory(settled, world, engine)
        restored = resume.restore(job, engine, checkpoint)
        self._before, self._began = float(restored.user.get("seconds", 0.0)), time.monotonic()

        def user() -> Mapping[str, Any]:
            return {"seconds": self._before + time.monotonic() - self._began, "job": remembered}

        line, served = Line.found(job, restored, checkpoint, len(place.servers)), tables.served(share, engine.device)
        if checkpoint is not None:
            for table in served:
                table.load(checkpoint)
        weights = self._make_weights(place, line, user, served)
        self._recorder = Recorder(
            self._run_dir,
            job.run.trackers,
            active=True,
            device=engine.device,
            total=settled.total,
            flops_per_sample=None,
        )
        self._recorder.start(self._about(world, sum(weights.shares)))
        if restored.where:
            self._recorder.note(restored.where)
        for warning in [*said, *restored.said]:
            self._recorder.warning(warning)
        cursor = Cursor(len(settled.model.prepare_data(settled.data.train)), job.train.global_batch, job.train.seed)
        recorded, evaluated = last_recorded(self._run_dir / "metrics.jsonl") if checkpoint else (0, -1)
        self._watch = Recording(self._recorder, self._run_dir, weights, cursor, recorded)
        self._part = self._make_part(weights, restored, evaluated)
        if isinstance(weights, Spread):
            weights.check()
        if line.is_new:
            self._part.save()
        self._server = ParameterServer.of(self._part, place.servers[0], None, say=self._recorder.note)

    def _make_weights(
        self, place: Identity, line: Line, user: Callable[[], Mapping[str, Any]], tables: Sequence[ServedTable]
    ) -> Weights:
        if len(place.servers) > 1:
            return spread_weights(self._job, self._engine, place, line, user, tables)
        job, part = self._job, part_path(self._run_dir, 0)
        clip, codec = job.train.clip or None, job.server.codec or "fp32"
        return Weights(self._engine, codec, clip, job.run.keep, user, tables, part)

    def _make_part(self, weights: Weights, restored: resume.Restored, evaluated: int) -> Part:
        job, engine = self._job, self._engine
        policy, number = policy_of(job, self._workers), shares(job, self._workers)
        every = job.run.eval_every if self._settled.data.validation is not None else None
        rests = policy.ordered and bool(weights.tables)
        tickets = Tickets(self._settled.total, number, policy.ordered, every, rests, evaluated)
        nbytes = sum(chunk.nbytes for chunk in engine.parts.chunks)
        keeping = Keeping(
            self._run_dir / DIRECTORY,
            job.run.save_every or (1 << 62),
            bool(job.server.durable),
            GRACE if job.server.grace is None else job.server.grace,
            self._run_dir / JOURNALS,
            max(_LEAST_JOURNAL, _JOURNAL_PUSHES * nbytes),
        )
        return Part(weights, policy, keeping, Dealt(tickets, self._watch, engine.step_index, restored.user))

    def to_its_end(self) -> Outcome:
        """Serves; writes the end record and the report, also where that fails."""
        try:
            reason = self._serve()
            complete = self._part.save_last()
            if not complete:
                self._recorder.note("gradients that wait for others are in the journal: the run goes on with them")
            if self._watch.failure is not None:
                raise CheckpointError(f"{reason}, but the newest weights are not saved: {self._watch.failure}")
        except BaseException as error:
            said = str(error) if isinstance(error, ShoalError) else type(error).__name__
            if unwritten := self._close(f"{FAILED} {said}")[1]:
                print(f"warning: {unwritten}", flush=True)
            raise
        stopped = self._received[0] if self._received else None
        return Outcome(self._run_dir, self._engine.step_index, reason, stopped, *self._close(reason))

    def _serve(self) -> str:
        """Returns why training ended, once it has."""
        limit, ended, told = self._job.train.seconds, "", time.monotonic()
        finish = math.inf
        first = self._engine.step_index
        while not self._part.is_over() and time.monotonic() < finish:
            time.sleep(_LOOK_SECONDS)
            if self._part.broken is not None:
                raise self._part.broken
            if self._received and finish == math.inf:
                ended = f"{STOPPED}{signal.Signals(self._received[0]).name}"
                finish = time.monotonic() + _FINISH_SECONDS
                self._part.end(evaluate=False)
            if limit is not None and not ended and self._before + time.monotonic() - self._began >= limit:
                ended = "the time limit was reached"
                self._part.end(evaluate=True)
            if time.monotonic() - told > _TELL_SECONDS:
                self._tell()
                told = time.monotonic()
        total, step = self._settled.total, self._engine.step_index
        if not ended and first == step:
            ended = f"step {step} of {total} was reached before: there is nothing left to train"
        until = time.monotonic() + _LEAVE_SECONDS
        while self._server.clients() and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        return ended or f"all {total} steps were trained"

    def _tell(self) -> None:
        self._watch.tell(self._part.ledger, str(self._job.server.policy), self._server.clients())

    def _close(self, reason: str) -> tuple[Path | None, str]:
        """Ends the server, writes the end record and the report; see `report_on`."""
        self._tell()
        self._server.close()
        self._recorder.end(reason)
        return report_on(self._run_dir)

    def _about(self, world: World, parameters: int) -> RunRecord:
        return RunRecord(
            host=world.host,
            device=hardware_name(world.device) or f"CPU ({platform.machine()})",
            world=self._workers,
            versions=versions(),
            parameters=parameters,
            peak_flops=0.0,
            config=describe(self._job, self._settled.origins),
            total=self._settled.total,
            time=time.time(),
        )
