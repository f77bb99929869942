"""Changes the plan of a run while it trains: at the steps of `[[run.at]]`, and when `shoal replan` asks for it.

A request is a file in the run directory, which rank 0 finds when the ranks next ask each other whether to stop; the
answer is another one, with the request's number, so that several can ask at once. Both appear by renaming, so a reader
never sees a half of one. A request says which process it asks, so one that was left behind never reaches a later
attempt of the run.
"""

from __future__ import annotations

import json
import os
import shlex
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.assembly.compatibility import check_exchange
from shoal.checkpoint.directory import completed
from shoal.elastic.control import VARIABLE as NODES
from shoal.engine import Engine
from shoal.errors import CheckpointError, StorageError, UserError
from shoal.federated.settings import STATE
from shoal.jobs.choose import Settled, with_plan
from shoal.jobs.device_memory import check_device_memory
from shoal.jobs.lock import Holder, holder_of, holders, own_hold
from shoal.jobs.names import checkpoints_in
from shoal.jobs.plans import ROWS, changed, keep, whole
from shoal.jobs.read import load_job
from shoal.jobs.record import Recorder
from shoal.jobs.save import Saver
from shoal.plan import Plan
from shoal.replace import replace_text
from shoal.toml import toml_value

REQUEST, ANSWERED = "replan-{}.json", ".answer"
"""Name of a request's file, by its number, and what its answer ends with instead."""
LOOK_SECONDS = 0.1
OTHERS_SECONDS = 30.0
"""How long an asker waits for ranks that go on when rank 0 has ended, where nodes come and go."""


def go_on_under(plan: Plan, settled: Settled, engine: Engine, recorder: Recorder, saver: Saver) -> str | None:
    """Changes the plan of a run, whose job is `settled`, and records that; returns why not, if it is refused. All ranks
    call it alike."""
    began = time.perf_counter()
    try:
        job = with_plan(settled, plan, engine.world)
        check_device_memory(job, engine.world)
        try:
            engine.replan(job.job.plan)
        except CheckpointError as error:  # of the save under way, which is over
            saver.failed(error)
            engine.replan(job.job.plan)
    except (UserError, StorageError) as error:
        return str(error)
    recorder.plan(engine.step_index, job.job.plan.to_dict(), time.perf_counter() - began, engine.parts.lag)
    return None


class Replanner:
    """The changes of the plan of a run.

    settled: the job, whose `run.at` has the changes by step
    """

    def __init__(self, settled: Settled, engine: Engine, recorder: Recorder, saver: Saver) -> None:
        self._settled, self._engine, self._recorder, self._saver = settled, engine, recorder, saver
        self._run_dir = Path(settled.job.run.dir)
        self._by_step = {change["step"]: change["plan"] for change in settled.job.run.at}
        self._me = own_hold(self._run_dir) if engine.world.rank == 0 else None
        if self._me is not None:
            for path in self._run_dir.glob(str(Path(REQUEST.format("*")).with_suffix(ANSWERED))):
                path.unlink(missing_ok=True)  # nobody has asked this attempt yet

    def never(self, total: int | None) -> list[str]:
        """Returns a warning for each change that comes at the end of the run, of `total` steps, or later."""
        late = [step for step in self._by_step if total is not None and step >= total]
        return [f"run.at, step {step}: training ends after step {total}, so this change is never made" for step in late]

    def is_asked(self) -> bool:
        """Returns whether there is a request; for rank 0."""
        return any(self._run_dir.glob(REQUEST.format("*")))

    def is_due(self, wanted: bool) -> bool:
        """Returns whether there may be something to change after this step: the job says so, or the ranks know
        (`wanted`) of a request. The same on every rank."""
        return wanted or self._engine.step_index in self._by_step

    def change(self, wanted: bool) -> None:
        """Makes the change that is due after this step, and the one that was asked for first. A plan that is refused is
        a warning, and training goes on as before. All ranks call it alike."""
        step = self._engine.step_index
        if step in self._by_step:
            self._change(self._by_step[step])
        everyone = self._engine.world.everyone
        request = everyone.broadcast_object(self._read() if everyone.rank == 0 else None) if wanted else None
        if request is not None:
            path, change = request
            if isinstance(change, str):
                self._recorder.warning(change)
            refused = change if isinstance(change, str) else self._change(change)
            if refused is None and everyone.rank == 0 and NODES in os.environ:
                self._keep(change)
            if everyone.rank == 0:
                self._answer(path, {"step": step, "plan": self._engine.plan.to_dict(), "refused": refused})

    def _change(self, change: Mapping[str, Any]) -> str | None:
        """Changes the plan; returns why not, if it was refused."""
        engine = self._engine
        try:
            plan = changed(engine.plan, change, engine.world.size)
            refused = go_on_under(plan, self._settled, engine, self._recorder, self._saver)
        except UserError as error:
            refused = str(error)
        if refused is not None:
            self._recorder.warning(f"after step {engine.step_index} the plan stays as it is: {refused}")
        return refused

    def _keep(self, change: Mapping[str, Any]) -> None:
        """Keeps the change for later generations: of a plan that the planner found all of it, since the job file does
        not have what was changed."""
        job, origins = self._settled.job, self._settled.origins
        if job.auto.wanted or job.auto.open:
            change = whole(self._engine.plan)
        if origins.get("train.microbatch") == "planner":
            change = {**change, ROWS: job.train.microbatch}
        try:
            keep(self._run_dir, change)
        except OSError as error:
            self._recorder.warning(f"the plan holds until the membership changes: it cannot be kept ({error})")

    def _read(self) -> tuple[Path, dict[str, Any] | str] | None:
        """Returns the first request, and the fields to change, or what is wrong with it; None if it was taken back."""
        for path in sorted(self._run_dir.glob(REQUEST.format("*"))):
            with suppress(FileNotFoundError):
                try:
                    said = json.loads(path.read_text(encoding="utf-8"))
                    asked, change = Holder(**said["run"]), dict(said["plan"])
                except (ValueError, TypeError, KeyError) as error:
                    return path, f"{path} is no request: {error}"
                if asked == self._me:
                    return path, change
                path.unlink()
                self._recorder.warning(f"{path} asked an earlier attempt of this run to change its plan: it is deleted")
        return None

    def _answer(self, request: Path, answer: Mapping[str, Any]) -> None:
        """Answers a request that was not taken back meanwhile, and removes it."""
        with suppress(OSError):  # a full disk: whoever asked sees the plan in the run's own output
            if request.exists():
                replace_text(request.with_suffix(ANSWERED), json.dumps(answer))
        request.unlink(missing_ok=True)


def _request(path: Path, holder: Holder, change: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps({"run": asdict(holder), "plan": dict(change)}))


def _instead(run_dir: Path, change: Mapping[str, Any]) -> str:
    """What to do where nothing trains whose plan could change: the command that starts the run again under the plan
    that was asked for. Raises UserError for one that its ranks cannot have."""
    resolved = run_dir / "resolved.toml"
    if not resolved.is_file():
        return "give the directory of a run of `shoal train`"
    before = load_job(resolved)[0].plan
    after = changed(before, change, before.size)
    check_exchange(after, "whole")
    old = whole(before)
    new = {key: value for key, value in whole(after).items() if value != old[key]}
    sets = " ".join(f"--set {shlex.quote(f'plan.{key}={toml_value(value)}')}" for key, value in new.items())
    ends = ", which goes on from its newest checkpoint" if completed(checkpoints_in(run_dir)) else ""
    command = f"shoal train {shlex.quote(str(resolved))} {sets}"
    return f"start it again, with more steps if it has trained all: {command}{ends}"


def ask(run_dir: Path, change: Mapping[str, Any]) -> dict[str, Any]:
    """Asks the run that trains in `run_dir` to change these fields of its plan; returns its answer, with the `step` and
    the `plan` in force, when it has come.

    Raises UserError where no run trains there, or none of ranks, where it refuses, or ends first.
    """
    if not run_dir.is_dir():
        raise UserError(f"no such directory: {run_dir} (from {Path.cwd()}). Give the directory of a run that trains")
    holder = holder_of(run_dir)
    without = (run_dir / STATE).exists() if holder is None else not holder.replans
    if without:
        raise UserError(
            f"the plan of {run_dir} cannot change while it trains: plans are of ranks that train in step, and this run "
            "has a parameter server, or is of `shoal fed`"
        )
    if holder is None:
        raise UserError(f"no run trains in {run_dir}: {_instead(run_dir, change)}")
    request = run_dir / REQUEST.format(f"{time.time_ns()}-{uuid.uuid4().hex}")  # in the order of asking
    answer = request.with_suffix(ANSWERED)
    _request(request, holder, change)
    until = float("inf")  # when nobody is expected any more
    try:
        while not answer.exists():
            now, left = holders(run_dir)
            if left is not None and left.job == holder.job and time.monotonic() < until:
                until = min(until, time.monotonic() + OTHERS_SECONDS)
                time.sleep(LOOK_SECONDS)
                continue
            until = float("inf")
            if now is not None and now.job and now != holder and now.job == holder.job:
                holder = now  # ranks have come or gone, and another one speaks for them
                _request(request, holder, change)
            if now != holder:
                raise UserError(f"the run in {run_dir} has ended before it changed its plan")
            time.sleep(LOOK_SECONDS)
        said: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    finally:
        request.unlink(missing_ok=True)  # also where whoever asks does not wait any longer
        answer.unlink(missing_ok=True)
    if said["refused"] is not None:
        raise UserError(f"{said['refused']} (the plan stays as it is)")
    return said
