"""Uses of a trained run: exports its weights and tokenizer, continues a text, measures its loss on other data."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.comm import World
from shoal.data import ByteTokenizer, Tokenizer, load_tokenizer
from shoal.engine import Engine
from shoal.errors import CheckpointError, UserError
from shoal.federated.settings import STATE
from shoal.jobs.assemble import make_engine
from shoal.jobs.choose import Settled, Sizes, settle
from shoal.jobs.config import Job
from shoal.jobs.evaluate import Subsample, measure_of, write_on
from shoal.jobs.names import TOKENIZER, checkpoints_in
from shoal.jobs.read import load_job
from shoal.jobs.samples import DEFAULT
from shoal.models import ModelSpec, build
from shoal.models.losses import can_write
from shoal.plan import Option, Plan
from shoal.training.evaluation import Evaluation

_RESOLVED = "by --job the resolved.toml of the run that made the checkpoint, which has every value"


@dataclass(frozen=True)
class Trained:
    """A run's model with the weights of a checkpoint, whole in this process.

    path: where the checkpoint is. run_dir: None where that is in no run directory.
    kept: the run's own tokenizer, in its directory, in the checkpoint's or beside the job file; None where it is in
        none of them. about: the job as the checkpoint records it; empty where it does not.
    """

    job: Job
    model: ModelSpec
    engine: Engine
    path: Path
    run_dir: Path | None
    kept: Path | None
    about: Mapping[str, Any]

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's own tokenizer. Raises UserError where it is not there."""
        return ByteTokenizer() if self.named == "bytes" else load_tokenizer(self.named)

    @property
    def named(self) -> str:
        """Its name, as data.tokenizer has it. Raises UserError where it is not there."""
        given = self.job.data.tokenizer
        if given == "bytes" or (self.kept is None and not given.startswith("bpe:")):
            return given
        if self.kept is None:
            raise UserError(
                f"{self.run_dir or self.path} has no directory {TOKENIZER!r}: copy it there from the run that made the "
                "checkpoint"
            )
        return str(self.kept)


def open_trained(path: Path, job_file: Path | None = None) -> Trained:
    """Opens the model of `path`: a checkpoint, or the newest good one of a run or of a directory of checkpoints.

    job_file: describes the model; by default resolved.toml of the run that contains `path`.
    Raises UserError where there is neither, or it leaves settings of the model open.
    """
    if not path.is_dir():
        raise UserError(f"no such directory: {path}")
    run_dir = next((each for each in (path, *path.resolve().parents[:2]) if (each / "resolved.toml").is_file()), None)
    if job_file is None and run_dir is None:
        raise UserError(f"{path} lies in no run directory, whose resolved.toml tells the model: give {_RESOLVED}")
    job, _ = load_job(job_file if job_file is not None else run_dir / "resolved.toml")  # type: ignore[operator]
    train = replace(job.train, schedule=job.train.schedule or "constant", warmup=job.train.warmup or 0)
    try:
        model = build(job.model)
    except UserError as error:
        if job_file is None:
            raise
        raise UserError(f"--job {job_file}: {error} Give {_RESOLVED}") from error
    alone = replace(job, train=train, plan=Plan(memory=_of_the_device(job.plan.memory)))
    without_state = partial(torch.optim.SGD, lr=train.lr)  # nothing is trained
    engine = make_engine(alone, model, job.train.steps, World.single(), optimizer=without_state)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is used from here on")  # nothing is trained
        about = engine.load(checkpoints_in(path)).get("job") or {}
    beside = (run_dir, path, None if job_file is None else job_file.parent)
    kept = (each / TOKENIZER for each in beside if each is not None)
    own = next((each for each in kept if each.is_dir()), None)
    return Trained(job, model, engine, path, run_dir, own, about)


def _of_the_device(memory: Option | None) -> Option | None:
    """Returns the budget of the device alone. The disk is the run's own, which may train, or go on from an update that
    lies there."""
    if not isinstance(memory, Mapping):
        return memory
    return {key: value for key, value in memory.items() if key not in ("host", "disk")}


def export_checkpoint(path: Path, out: Path, job_file: Path | None = None) -> Path:
    """Writes the weights of `path` (see `open_trained`) to `out`, with the run's tokenizer; returns `out`."""
    trained = open_trained(path, job_file)
    trained.engine.export(out)
    trained.engine.close()
    own = sorted(trained.kept.glob("tokenizer*.json")) if trained.kept is not None else []
    try:
        for file in own:
            shutil.copy(file, out)
    except OSError as error:
        raise CheckpointError(
            f"the tokenizer was not copied to {out}: {error}; free space there, or export elsewhere"
        ) from error
    return out


def generate_text(path: Path, prompt: str, job_file: Path | None = None, **options: Any) -> str:
    """Returns the continuation of `prompt` by the model of `path` (see `open_trained`); `options`: those of `write_on`.

    Raises UserError for a model that does not predict the next token.
    """
    trained = open_trained(path, job_file)
    if not can_write(trained.model.loss):
        raise UserError(
            f'model.name = "{trained.model.name}" does not predict the next token, so that it cannot go on with a text'
        )
    text = write_on(trained.engine, trained.tokenizer, prompt, **options)
    trained.engine.close()
    return text


def evaluate_run(
    path: Path, source: str | None = None, samples: int = 0, job_file: Path | None = None
) -> tuple[Evaluation, float | None]:
    """Measures the loss of the model of `path` (see `open_trained`), and the accuracy of a classifier.

    source: data to evaluate on; by default what the run held out.
    samples: number of rows, evenly spaced; 0 for all.
    """
    trained = open_trained(path, job_file)
    data = _data(trained, source)
    rows = Subsample(trained.model.prepare_data(data), samples)
    right = measure_of(trained.model.loss)
    evaluation = trained.engine.evaluate(rows, also=() if right is None else (right,))
    trained.engine.close()
    return evaluation, evaluation.also[0] if evaluation.also else None


def _data(trained: Trained, source: str | None) -> Any:
    job = trained.job
    if source is None and trained.run_dir is not None and (trained.run_dir / STATE).exists():
        raise UserError("each client held samples of its own out, and the report has their accuracy: give --data")
    own: dict[str, Any] = {} if job.model["name"] in DEFAULT else {"tokenizer": trained.named}
    if source is not None:
        own |= {"source": source, "validation": 0.0}
    alone = replace(job, data=replace(job.data, **own), plan=Plan(), run=replace(job.run, at=[], sample=""))
    origins = {} if source is None else {"data.source": "cli"}
    settled: Settled = settle(alone, origins, Sizes(1, 1))
    if source is not None:
        if (classes := trained.about.get("classes")) and settled.classes and classes != settled.classes:
            raise UserError(
                f"{source} has folders of {', '.join(settled.classes)}, and the model's classes are "
                f"{', '.join(classes)}, numbered in that order: give a folder for each of them, empty where there are "
                "no images, and no other"
            )
        return settled.data.train
    if settled.data.validation is None:
        raise UserError("the run held nothing out (data.validation = 0): give --data")
    if trained.about.get("content", settled.content) != settled.content:
        print(
            f"warning: data.source = {job.data.source!r} has changed since the run, so what is held out of it now may "
            "have been trained on: give --data",
            file=sys.stderr,
        )
    return settled.data.validation
