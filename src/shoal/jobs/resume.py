"""Finds where a run continues: the newest good checkpoint of its directory, a named checkpoint, or the start."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal import checkpoint
from shoal.checkpoint.directory import completed, is_checkpoint
from shoal.checkpoint.manifest import read_manifest
from shoal.chunks import budget
from shoal.comm import Group
from shoal.elastic.control import JOB
from shoal.engine import Engine
from shoal.errors import CheckpointError, UserError
from shoal.federated.settings import STATE
from shoal.jobs.changes import changes
from shoal.jobs.config import Job
from shoal.jobs.names import DIRECTORY, checkpoints_in
from shoal.optim.tiers.disk import directory_of
from shoal.optim.tiers.generations import committed
from shoal.plan import Plan


def find(job: Job, about: Mapping[str, Any], group: Group) -> tuple[Path | None, list[str]]:
    """Returns the checkpoint to continue (None for a fresh start), and warnings: damaged checkpoints and changed
    values.

    A collective of `group`: rank 0 looks, all ranks get its answer. `about`: the job as `changes.remembered` gives it.

    Raises UserError for a change that is refused, and under "never" where the run directory holds a run. Raises
    CheckpointError where a given path has no good checkpoint, or the run directory only damaged ones.
    """
    found: tuple[Path | None, list[str]] | Exception | None = None
    if group.rank == 0:
        try:
            path, said = _look(job)
            then = None if path is None else read_manifest(path).extra["user"].get("job")
            found = path, said + (changes(then, about) if then is not None else [])
        except (UserError, CheckpointError) as error:  # every rank raises it below, so that none waits for another
            found = error
    found = group.broadcast_object(found)
    if isinstance(found, Exception):
        raise found
    assert found is not None
    return found


@dataclass(frozen=True)
class Restored:
    """The state that an attempt continues from.

    saved: step of the checkpoint, 0 without one.
    user: the run's own data in the checkpoint.
    where: the step at which the run resumes, as a sentence.
    said: the engine's warnings on values that differ from the checkpoint's.
    """

    saved: int
    user: Mapping[str, Any]
    where: str
    said: list[str]


@dataclass(frozen=True)
class Update:
    """An update on the disk of plan.memory: of the step before `step`, made under `plan` by `ranks` ranks."""

    step: int
    plan: Plan
    ranks: int

    def refused(self, saved: int) -> str:
        """Names this where its plan is refused. `saved`: the step of the newest checkpoint."""
        return (
            f"the update of step {self.step} on the disk of plan.memory, whose plan is refused (give plan.memory.disk "
            f"another path, to go on from step {saved} instead)"
        )

    def lost(self, saved: int, ranks: int) -> str:
        """Says why a run goes on from the step `saved` instead."""
        why = "not all ranks have it, or the model, its precision or its optimizer were others"
        if ranks != self.ranks:
            why = f"it is of {self.ranks} ranks, and these are {ranks}"
        return (
            f"the update of step {self.step} on the disk of plan.memory cannot be taken over: {why}. Training goes on "
            f"from step {saved}, and the steps between are trained again"
        )


def update_on_disk(job: Job, plans: Iterable[Plan], after: int, group: Group) -> Update | None:
    """Finds the newest update of this run, later than the step `after`, on the disks of `plans`, whatever plan it was
    made under. A collective of `group`: rank 0 looks, where its own files are."""
    found: list[dict[str, Any]] = []
    if group.rank == 0 and job.run.resume == "auto":
        disks = set(filter(None, map(_disk, plans)))
        known = filter(None, (committed(directory_of(path, 0)) for path in disks))
        found = [each for each in known if each["run"] == run_name(job) and each["step"] > after]
    told = [[each["step"], each["plan"], each["makes"]["ranks"]] for each in found]
    told = group.broadcast_object(sorted(told, key=lambda each: int(each[0])))
    return Update(told[-1][0], Plan.from_dict(told[-1][1]), told[-1][2]) if told else None


def _disk(plan: Plan) -> Path | None:
    """Returns where the disk of a plan is; None if it has none, or is wrong, which is said when its step comes."""
    try:
        allowed = budget(plan.memory, torch.device("cpu"))
    except UserError:
        return None
    return None if allowed is None or allowed.disk is None else allowed.disk.path


def run_name(job: Job) -> str:
    """Returns the name by which a run knows its own updates on a disk."""
    return str(Path(job.run.dir).resolve())


def restore(job: Job, engine: Engine, found: Path | None) -> Restored:
    """Loads into `engine` the checkpoint `found`, or the state on the disk of plan.memory where that is newer."""
    manifest = read_manifest(found) if found is not None else None
    saved, user = (manifest.step, manifest.extra["user"]) if manifest else (0, {})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        recovered = job.run.resume == "auto" and engine.recover(after=saved)
        if found is not None and not recovered:
            engine.load(found)
    where = ""
    if recovered:
        where = f"resumed from step {engine.step_index}, the last update on the disk of plan.memory"
    elif manifest is not None:
        ranks = f"{manifest.world_size} rank{'s' * (manifest.world_size > 1)} then, {engine.world.size} now"
        where = f"resumed from step {manifest.step} ({ranks})"
    return Restored(saved, user, where, [str(each.message) for each in said])


def _look(job: Job) -> tuple[Path | None, list[str]]:
    run_dir = Path(job.run.dir)
    if (run_dir / STATE).exists():
        raise UserError(f"{run_dir} holds rounds of `shoal fed`: give another run.dir")
    if job.run.resume == "never":
        if (run_dir / "metrics.jsonl").exists():
            raise UserError(
                f'{run_dir} already holds a run: continue it with resume = "auto", or give another run.dir (or delete '
                "that directory)"
            )
        return None, []
    damaged: list[str] = []

    def note(path: Path, reason: str) -> None:
        damaged.append(f"checkpoint {path.name} is passed over: {reason}")

    if job.run.resume == "auto":
        found = checkpoint.newest(run_dir / DIRECTORY, note)
        broken = [path for _, path in completed(run_dir / DIRECTORY)] if found is None else []
        if broken:
            raise CheckpointError(
                f"no checkpoint in {run_dir / DIRECTORY} is whole: {'; '.join(damaged)}. Bring back a copy, or delete "
                f"{', '.join(map(str, broken))} to start anew from step 0"
            )
        return found, damaged
    path = _named(Path(job.run.resume), note, damaged)
    later = [each for step, each in completed(run_dir / DIRECTORY) if step > read_manifest(path).step]
    if later and JOB in os.environ:
        raise UserError(
            f"{run_dir} has checkpoints of later steps than run.resume = {job.run.resume!r}, and where nodes come and "
            f"go the ranks go on from the newest one after a failure: delete {', '.join(map(str, later))}, or give "
            "another run.dir"
        )
    if later:
        damaged.append(
            f'{run_dir} has checkpoints of later steps than this one, and run.resume = "auto" goes on from the newest: '
            f"delete {', '.join(map(str, later))} to have it go on from here"
        )
    return path, damaged


def _named(path: Path, note: Any, damaged: list[str]) -> Path:
    """Returns the checkpoint at `path`, which is one, a directory of them, or a run directory."""
    if not os.path.isdir(path):
        raise UserError(
            f'run.resume = "{path!s:.300}": no such directory; give "auto", "never", or the directory of a '
            "checkpoint or a run"
        )
    if is_checkpoint(path):
        if problems := checkpoint.verify(path):
            raise CheckpointError(
                f"the checkpoint {path} is damaged: {'; '.join(problems[:3])}. Give another one of that run"
            )
        return path
    directory = checkpoints_in(path)
    found = checkpoint.newest(directory, note)
    if found is None:
        raise CheckpointError(
            f"there is no good checkpoint in {directory}: "
            + ("; ".join(damaged) or "give the directory of a checkpoint or a run")
        )
    return found
