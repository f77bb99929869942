"""The schema of a job, for the TOML file and for Python. Nothing here imports torch, so that a job is checked at once.

A field that is None is chosen by Shoal (see `choose`), or is absent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from shoal.errors import UserError, check_numbers
from shoal.federated.settings import Federated
from shoal.jobs.cluster.table import Cluster
from shoal.jobs.served.table import Server
from shoal.plan import MOST_RANKS_OF_A_HOST, Plan
from shoal.report.trackers import check_trackers

MOST_PIXELS = 1 << 14
"""On each side of an image."""
Origins = Mapping[str, str]
"""The origin of each value by dotted key: "file", "cli" or "planner"; a missing key has its default value."""


@dataclass(frozen=True)
class Data:
    """`[data]`: the text to train on (see `shoal.data.open_text`), or the samples (see `samples`).

    source: files, folders or the name of a set: text, or for models that read none arrays, images or a generated set.
        In Python also a `datasets.Dataset`.
    tokenizer, attend, field: as in `open_text`.
    sequence: tokens in a row; by default what the model takes.
    validation: the share of documents or samples held out, 0 to 1.
    size: images are resized to this many pixels on each side.
    """

    source: Any = "stdlib"
    tokenizer: str = "bytes"
    sequence: int | None = None
    validation: float = 0.05
    attend: str = "row"
    field: str = "text"
    size: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.source, str) and not self.source.strip():
            raise UserError('data.source is empty: give a file, a folder or the name of a set, such as "stdlib"')
        if self.size is not None and not 1 <= self.size <= MOST_PIXELS:
            raise UserError(f"data.size = {self.size}: give from 1 to {MOST_PIXELS}")


@dataclass(frozen=True)
class Train:
    """`[train]`: the mathematics of the run.

    steps, epochs, seconds: the run stops at the first of these limits; seconds of training, over all attempts.
    global_batch, microbatch: samples in a step of all ranks, and in one forward of a rank.
    precision: a name, or a table {name = "fp16", hysteresis = 1}.
    optimizer: a name of torch's, or a table {name = "sgd", momentum = 0.9}.
    weight_decay: acts on matrices only.
    schedule: of the learning rate after `warmup` steps: "cosine" or "linear" (both fall to a tenth), or "constant".
    clip: the largest norm of the gradient, 0 for none.
    sync_bn: BatchNorm uses statistics of all ranks.
    buffers: how buffers that forwards change are kept the same on all ranks.
    """

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    global_batch: int = 32
    microbatch: int | None = None
    precision: str | dict[str, Any] = "fp32"
    optimizer: str | dict[str, Any] = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.1
    schedule: str | None = None
    warmup: int | None = None
    clip: float = 1.0
    seed: int = 0
    sync_bn: bool = False
    buffers: str = "exact"

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None and self.seconds is None:
            raise UserError(
                "nothing says when to stop: give train.steps, train.epochs or train.seconds, e.g. steps = 1000"
            )
        for key in ("steps", "epochs", "seconds", "global_batch", "microbatch", "lr"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise UserError(f"train.{key} = {value}: give a number above 0")
        for key in ("weight_decay", "warmup", "clip"):
            value = getattr(self, key)
            if value is not None and not value >= 0:
                raise UserError(f"train.{key} = {value}: give 0 or more")


@dataclass(frozen=True)
class Run:
    """`[run]`: the run directory, and what the run does beside training.

    nproc: ranks on this host.
    eval_every, save_every: steps between evaluations and checkpoints; 0 for only at the end.
    eval_samples: validation rows in an evaluation, spread evenly; 0 for all.
    keep: number of checkpoints to keep.
    resume: "auto" continues the newest good checkpoint of `dir`, "never" requires a new `dir`, a path continues that
        checkpoint.
    trackers: any of "tensorboard", "wandb", "mlflow".
    sample: a prompt to continue at each evaluation, "" for none.
    norms_every: steps between records of the gradient norms by layer, 0 for none.
    verify_every: steps between votes of replicas on what they hold, which find silent corruption; 0 for none.
    first_within: where nodes come and go, seconds in which a generation's first step, save, sample and microbatch of an
        evaluation are to be done; a rank that takes longer counts as one that hangs. 0: they may take any time.
    at: changes of the plan, tables of the `step` after which one is made and the fields that it changes:
        {step = 1000, plan = {tp = 2}}. Without dp, that is what is left of the ranks.
    """

    dir: str = "runs/run"
    nproc: int | None = None
    eval_every: int = 0
    eval_samples: int = 512
    save_every: int = 0
    keep: int = 3
    resume: str = "auto"
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    sample: str = ""
    norms_every: int = 0
    verify_every: int = 0
    first_within: float = 1800.0
    at: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check_changes(self.at)
        if not str(self.dir).strip():
            raise UserError("run.dir is empty: give the directory of the run, or leave it out")
        if not str(self.resume).strip():
            raise UserError('run.resume is empty: give "auto", "never", or the directory of a checkpoint or a run')
        for key in ("dir", "resume"):
            if "\0" in str(getattr(self, key)):
                raise UserError(f"run.{key} = {getattr(self, key)!r:.100}: no path has a zero byte")
            object.__setattr__(self, key, os.path.expanduser(getattr(self, key)))
        for key in ("eval_every", "eval_samples", "save_every", "norms_every", "verify_every", "first_within"):
            if not getattr(self, key) >= 0:
                raise UserError(f"run.{key} = {getattr(self, key)}: give 0 or more")
        for key in ("nproc", "keep"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"run.{key} = {value}: give at least 1")
        check_trackers(self.trackers)
        if self.nproc is not None and self.nproc > MOST_RANKS_OF_A_HOST:
            raise UserError(
                f"run.nproc = {self.nproc}: that many ranks on this host? Give at most {MOST_RANKS_OF_A_HOST}"
            )


@dataclass(frozen=True)
class Auto:
    """What a job says of its plan beside the fields of a Plan: `wanted`, by plan = "auto" or plan.name = "auto", is
    found by the planner around the fields that are given. `measure`: so many of its best are tried in the run for a few
    steps each, and the fastest stays. `allow`: exchanges that may be taken beside the exact one. `open`: a file gives
    no plan at all, so the planner is asked where that is worth it."""

    wanted: bool = False
    measure: int = 0
    allow: tuple[str, ...] = ()
    open: bool = False


@dataclass(frozen=True)
class Job:
    """A whole job. `model` is the table for `shoal.models.build`: a `name` and that model's settings. `federated`: None
    where it has no such table.

    A `plan` with dp = 1 is spread over the ranks that are started, unless the job's origins say that dp was given.
    """

    model: Mapping[str, Any]
    train: Train
    data: Data = field(default_factory=Data)
    plan: Plan = field(default_factory=Plan)
    run: Run = field(default_factory=Run)
    cluster: Cluster = field(default_factory=Cluster)
    federated: Federated | None = None
    auto: Auto = field(default_factory=Auto)
    server: Server = field(default_factory=Server)

    def __post_init__(self) -> None:
        for section, table in tables(self).items():
            check_numbers(section, table)


SECTIONS: dict[str, type] = {
    "data": Data,
    "train": Train,
    "plan": Plan,
    "run": Run,
    "cluster": Cluster,
    "federated": Federated,
    "server": Server,
}
"""The tables with fixed keys; the keys of `[model]` depend on the model."""


def tables(job: Job) -> dict[str, dict[str, Any]]:
    """Returns the job as TOML tables, in the order in which they are written. Values of None are left out."""
    found = {"model": dict(job.model)}
    for section, kind in SECTIONS.items():
        if getattr(job, section) is None:
            continue
        values = {each.name: getattr(getattr(job, section), each.name) for each in fields(kind)}
        found[section] = {key: value for key, value in values.items() if value is not None}
    if not isinstance(job.data.source, str):
        found["data"]["source"] = f"(a {type(job.data.source).__name__} given in Python)"
    return found


def _check_changes(changes: list[dict[str, Any]]) -> None:
    """Raises UserError where the changes of `run.at` are not in the order of their steps, or change nothing."""
    before = 0
    for number, change in enumerate(changes):
        where, step = f"run.at[{number}]", change.get("step")
        if set(change) != {"step", "plan"} or not isinstance(change["plan"], Mapping) or not change["plan"]:
            raise UserError(
                f"{where} = {change}: give a step and what changes of the plan, e.g. step = 1000, plan.tp = 2"
            )
        if not isinstance(step, int) or isinstance(step, bool) or step <= before:
            raise UserError(
                f"{where}.step = {step!r}: give whole numbers of steps, each above the one before ({before})"
            )
        before = step


def put(job: Job, origins: Origins, section: str, **values: Any) -> tuple[Job, Origins]:
    """Returns the job with `values`, which Shoal has chosen, in a section, and the origins with theirs."""
    changed = replace(job, **{section: replace(getattr(job, section), **values)})
    return changed, {**origins, **{f"{section}.{key}": "planner" for key in values}}


def describe(job: Job, origins: Origins) -> dict[str, dict[str, Any]]:
    """Returns each value by dotted key with its origin: {"train.lr": {"value": 3e-4, "origin": "file"}}."""
    return {
        f"{section}.{key}": {"value": value, "origin": origins.get(f"{section}.{key}", "default")}
        for section, table in tables(job).items()
        for key, value in table.items()
    }
