"""Where a run goes on: the newest good checkpoint of its directory, one that is named, or the start."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from shoal import checkpoint
from shoal.checkpoint.manifest import read_manifest
from shoal.comm import Group
from shoal.engine import Engine
from shoal.errors import CheckpointError, UserError
from shoal.jobs.config import Job, Origins, describe
from shoal.jobs.read import load_job, parse_job
from shoal.jobs.write import to_toml

FREE = ("train.steps", "train.epochs", "train.seconds", "train.microbatch", "train.precision", "train.warmup", "run.", "plan.")
"""What may change from one attempt to the next: when to stop, and how the same mathematics is carried out."""


def find(job: Job, origins: Origins, group: Group) -> tuple[Path | None, list[str]]:
    """The checkpoint to continue, None for a fresh start, and warnings about damaged ones; rank 0 looks, all ranks get the same.

    Raises UserError where the run directory holds another job's run, or, under "never", any; CheckpointError for a path without
    a good checkpoint.
    """
    found: tuple[Path | None, list[str]] | Exception | None = None
    if group.rank == 0:
        try:
            found = _look(job, origins)
        except (UserError, CheckpointError) as error:  # raised by every rank below, so that none waits for another
            found = error
    found = group.broadcast_object(found)
    if isinstance(found, Exception):
        raise found
    assert found is not None
    return found


def go_on(job: Job, engine: Engine, found: Path | None) -> tuple[int, dict[str, Any]]:
    """Brings `engine` to where the run was: the checkpoint `found`, or what lies on the disk of plan.memory where that is newer. Returns the step of the
    checkpoint, 0 without one, and what the run had saved there."""
    manifest = read_manifest(found) if found is not None else None
    if job.run.resume == "auto" and engine.recover(after=manifest.step if manifest else 0):
        return (manifest.step, manifest.extra["user"]) if manifest else (0, {})
    if found is not None:
        engine.load(found)
    return engine.step_index, manifest.extra["user"] if manifest else {}


def _look(job: Job, origins: Origins) -> tuple[Path | None, list[str]]:
    run_dir = Path(job.run.dir)
    if job.run.resume == "never":
        if (run_dir / "metrics.jsonl").exists():
            raise UserError(
                f'{run_dir} already holds a run: continue it with resume = "auto", or give another run.dir (or delete that directory)'
            )
        return None, []
    damaged: list[str] = []

    def note(path: Path, reason: str) -> None:
        damaged.append(f"checkpoint {path.name} is passed over: {reason}")

    if job.run.resume == "auto":
        if (run_dir / "resolved.toml").exists():
            _same_job(job, origins, run_dir)
        return checkpoint.newest(run_dir / "checkpoints", note), damaged
    return _named(Path(job.run.resume), note), damaged


def _named(path: Path, note: Any) -> Path:
    """A step-..., a directory of them, or a run directory."""
    if not path.is_dir():
        raise UserError(
            f'run.resume = "{path}": no such directory; give "auto", "never", or the directory of a checkpoint or a run'
        )
    if path.name.startswith("step-"):
        return path
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = checkpoint.newest(directory, note)
    if found is None:
        raise CheckpointError(f"there is no good checkpoint in {directory}")
    return found


def _same_job(job: Job, origins: Origins, run_dir: Path) -> None:
    """Refuses to mix two jobs in one directory: a checkpoint keeps its learning rate, whatever the job now says."""
    before = describe(*load_job(run_dir / "resolved.toml"))
    now = describe(*parse_job(tomllib.loads(to_toml(job, origins))))  # as TOML has it: a tuple of Python is a list there
    for key in {**before, **now}:
        old, new = (table.get(key, {}).get("value") for table in (before, now))
        if old != new and not key.startswith(FREE):
            raise UserError(
                f"{run_dir} holds a run with {key} = {_shown(old)}, this job has {_shown(new)}: give another run.dir, or the value that it "
                "was started with"
            )


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)
