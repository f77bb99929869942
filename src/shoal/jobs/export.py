"""The weights of a checkpoint for others, without the run that made it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from shoal.comm import World
from shoal.errors import CheckpointError, UserError
from shoal.jobs.assemble import make_engine
from shoal.jobs.read import load_job
from shoal.jobs.save import DIRECTORY, TOKENIZER
from shoal.models import build
from shoal.plan import Plan


def export_checkpoint(path: Path, out: Path, job_file: Path | None = None) -> Path:
    """Writes the weights of `path` (a checkpoint, or a run or directory whose newest good one is taken) to `out`, with the run's tokenizer; returns `out`.

    The model is that of `job_file`, by default resolved.toml of the run that `path` lies in. Raises UserError where there is none.
    """
    if not path.is_dir():
        raise UserError(f"no such directory: {path}")
    job, _ = load_job(job_file or _resolved(path))
    if not {"schedule", "warmup"} <= {key for key, value in vars(job.train).items() if value is not None}:
        job = replace(job, train=replace(job.train, schedule="constant", warmup=0))
    alone = replace(job, plan=Plan(memory=job.plan.memory))
    engine = make_engine(alone, build(job.model), job.train.steps, World.single())
    directory = path / DIRECTORY if (path / DIRECTORY).is_dir() else path
    engine.load(directory)
    engine.export(out)
    engine.close()
    own = [file for parent in (path, *path.resolve().parents[:2]) for file in sorted((parent / TOKENIZER).glob("tokenizer*.json"))]
    try:
        for file in own:
            shutil.copy(file, out)
    except OSError as error:
        raise CheckpointError(f"the tokenizer was not copied to {out}: {error}; free space there, or export elsewhere") from error
    return out


def _resolved(path: Path) -> Path:
    for parent in (path, *path.resolve().parents[:2]):
        if (parent / "resolved.toml").is_file():
            return parent / "resolved.toml"
    raise UserError(f"{path} lies in no run directory, whose resolved.toml tells the model: give the job file by --job")
