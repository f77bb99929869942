"""Chooses the values that a job leaves open, from the model, the data and the machine. Their origin is "planner"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.comm import World
from shoal.data import ArrayData, Cursor, TextData, Tokenizer, open_text
from shoal.device import any_device
from shoal.errors import UserError, in_section
from shoal.jobs.config import Data, Job, Origins, put
from shoal.jobs.model_table import from_text, sequence_of
from shoal.jobs.optimizers import optimizer_named
from shoal.jobs.ranks import spread
from shoal.jobs.samples import DEFAULT, fitted, open_samples, settings_from
from shoal.jobs.trials import Trials
from shoal.models import ModelSpec, build
from shoal.models.losses import can_write
from shoal.optim.groups import decay_matrices_only
from shoal.plan import Plan
from shoal.planner import Subject, with_stages
from shoal.planner.degrees import chosen_fields
from shoal.precision import precision
from shoal.training.microbatches import check_microbatch, largest_share, usual_microbatch

WARMUP_SHARE, WARMUP_MOST = 0.05, 1000


@dataclass(frozen=True)
class Settled:
    """A job with all values chosen, its model and its data.

    total: number of steps; None where only train.seconds ends the run.
    tokenizer: None where the data is not text.
    trials: of plans that are tried in the run, None without plan.measure.
    why: the plan is what it is, in words; "" where the job gives it.
    """

    job: Job
    origins: Origins
    model: ModelSpec
    data: TextData | ArrayData
    total: int | None
    trials: Trials | None = None
    why: str = ""

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.data.tokenizer if isinstance(self.data, TextData) else None

    @property
    def content(self) -> str:
        """Tells the data from what it was before it changed: a hash of text, or how many samples there are."""
        if isinstance(self.data, TextData):
            return self.data.content
        return f"{len(self.data.train)} samples and {len(self.data.validation or ())} held out"

    @property
    def classes(self) -> list[str]:
        """The names of the classes, in the order of their numbers; [] where they have none."""
        return list(self.data.names) if isinstance(self.data, ArrayData) else []

    def steps_of(self, seconds: float) -> int:
        """Number of steps of the whole job where one takes `seconds`: `total`, or those that begin within
        train.seconds where that ends the run sooner."""
        limits = [] if self.total is None else [self.total]
        if (limit := self.job.train.seconds) is not None:
            limits.append(math.ceil(limit / seconds))
        return min(limits)


@dataclass(frozen=True)
class Sizes:
    """The part of a World that choices depend on: the number of ranks, in all and on this host."""

    size: int
    local_size: int


def settle(job: Job, origins: Origins, world: World | Sizes) -> Settled:
    """Opens the data, tokenising it where that was not done before, and chooses all values that `job` leaves open.

    Raises UserError where job, model, data and ranks do not fit together.
    """
    return at_size(opened(*spread(job, origins, world.size)), world)


def opened(job: Job, origins: Origins) -> Settled:
    """Chooses the values that do not depend on the ranks, and opens the data. Raises UserError as `settle`."""
    with in_section("train"):
        check_microbatch(job.train.microbatch, job.train.global_batch)
    job, origins, model, data = (_settle_samples if job.model["name"] in DEFAULT else _settle_text)(job, origins)
    if job.run.sample and not can_write(model.loss):
        raise UserError(
            f'run.sample = {job.run.sample!r:.100}: model.name = "{model.name}" does not predict the next token, so '
            "that it writes no text: remove it"
        )
    total = _total(job, data)
    return Settled(*_put_schedule(job, origins, total), model, data, total)


def at_size(settled: Settled, world: World | Sizes) -> Settled:
    """Chooses what depends on the ranks: the plan, for so many, and its stages. Raises UserError as `settle`."""
    job, origins = spread(settled.job, settled.origins, world.size)
    if job.run.nproc is None:
        job, origins = put(job, origins, "run", nproc=world.local_size)
    job, origins = _put_stages(job, origins, settled.model, settled.data, world)
    return replace(settled, job=job, origins=origins)


def with_plan(settled: Settled, plan: Plan, world: World | Sizes) -> Settled:
    """Returns the job under another plan, with its stages found anew."""
    job, origins = _put_stages(replace(settled.job, plan=plan), settled.origins, settled.model, settled.data, world)
    return replace(settled, job=job, origins=origins)


def under(settled: Settled, plan: Plan, microbatch: int | None) -> Settled:
    """The job under `plan`, with microbatches of that size; what it did not give itself has the origin "planner", and
    nothing has it still from a plan that was chosen before."""
    job, given = settled.job, ("file", "cli")
    origins = {key: each for key, each in settled.origins.items() if not key.startswith("plan.") or each in given}
    fields = (f"plan.{key}" for key in chosen_fields(plan))
    origins.update({key: "planner" for key in fields if key not in origins})
    if job.train.microbatch is None and microbatch is not None:
        job = replace(job, train=replace(job.train, microbatch=microbatch))
        origins["train.microbatch"] = "planner"
    return replace(settled, job=replace(job, plan=plan), origins=origins)


def _settle_text(job: Job, origins: Origins) -> tuple[Job, Origins, ModelSpec, TextData]:
    table = dict(job.model)
    if job.data.size is not None:
        raise UserError(
            f'data.size = {job.data.size} is of images, which model.name = "{table["name"]}" does not read: remove it'
        )
    if job.data.sequence is None:
        job, origins = put(job, origins, "data", sequence=sequence_of(table))
    data = _open(job)
    job, origins = _put_model(job, origins, from_text(table, data.tokenizer.vocab_size, job.data.sequence))
    model = build(job.model)
    _check_model(model, job, data)
    return job, origins, model, data


def _settle_samples(job: Job, origins: Origins) -> tuple[Job, Origins, ModelSpec, ArrayData]:
    if "data.source" not in origins and isinstance(job.data.source, str) and job.data.source == Data.source:
        job, origins = put(job, origins, "data", source=DEFAULT[job.model["name"]])
    data = open_samples(job)
    job, origins = _put_model(job, origins, settings_from(data, job))
    model = build(job.model)
    return job, origins, model, fitted(data, model, job.data.source)


def _open(job: Job) -> TextData:
    data = job.data
    assert data.sequence is not None
    with in_section("data"):
        return open_text(
            data.source,
            tokenizer=data.tokenizer,
            sequence=data.sequence,
            validation=data.validation,
            attend=data.attend,  # type: ignore[arg-type]  # open_text refuses another word
            seed=job.train.seed,
            field=data.field,
        )


def _check_model(model: ModelSpec, job: Job, data: TextData) -> None:
    assert model.vocab_size is not None
    ids, masks = data.tokenizer.vocab_size, model.name == "bert"
    if model.vocab_size < ids + masks:
        raise UserError(
            f"model.vocab_size = {model.vocab_size} is less than the {ids} ids of data.tokenizer = "
            f'"{job.data.tokenizer}"{" and the mask" * masks}: give model.vocab_size = {ids + masks}'
        )
    if job.data.attend == "document" and not model.tells_documents():
        raise UserError(
            f'data.attend = "document": model.name = {model.name!r} is not told where a document of a row ends, and '
            'would go on from one to the next: give attend = "row"'
        )
    if model.sequence is not None and job.data.sequence is not None and model.sequence < job.data.sequence:
        raise UserError(
            f"data.sequence = {job.data.sequence} is longer than the {model.sequence} tokens that the model takes: "
            "shorten the one or lengthen the other"
        )


def _total(job: Job, data: TextData | ArrayData) -> int | None:
    limits = [] if job.train.steps is None else [job.train.steps]
    if job.train.epochs is not None:
        limits.append(
            job.train.epochs * Cursor(len(data.train), job.train.global_batch, job.train.seed).steps_per_epoch
        )
    return min(limits, default=None)


def _put_schedule(job: Job, origins: Origins, total: int | None) -> tuple[Job, Origins]:
    if job.train.schedule is None:
        job, origins = put(job, origins, "train", schedule="constant" if total is None else "cosine")
    elif total is None and job.train.schedule != "constant":
        raise UserError(
            f'train.schedule = "{job.train.schedule}" ends at the last step, which train.seconds does not tell: give '
            'train.steps too, or schedule = "constant"'
        )
    if job.train.warmup is None:
        job, origins = put(
            job, origins, "train", warmup=0 if total is None else min(WARMUP_MOST, int(WARMUP_SHARE * total))
        )
    return job, origins


def microbatches_of(job: Job) -> tuple[int, int]:
    """Returns the number of samples in a microbatch, and the most microbatches that a rank has in a step."""
    train = job.train
    rows = usual_microbatch(train.microbatch, train.global_batch, job.plan, train.sync_bn)
    if train.microbatch is not None:
        return rows, largest_share(math.ceil(train.global_batch / rows), job.plan)
    return rows, math.ceil(largest_share(train.global_batch, job.plan) / rows)


def _put_stages(
    job: Job, origins: Origins, model: ModelSpec, data: TextData | ArrayData, world: World | Sizes
) -> tuple[Job, Origins]:
    """Replaces a name in plan.stages ("counted", "measured") by the cuts that rank 0 finds and broadcasts."""
    if not isinstance(job.plan.stages, str | Mapping):
        return job, origins
    train = job.train
    found: Any = None
    if not isinstance(world, World) or world.rank == 0:
        try:
            microbatch, microbatches = microbatches_of(job)
            sample = model.prepare_data(data.train)[0]
            groups = decay_matrices_only(train.weight_decay)
            with in_section("train"):
                numbers = precision(train.precision)
            subject = Subject(model.factory, model.loss, sample, microbatch, numbers, job.plan, groups)
            device = any_device()
            found = with_stages(
                job.plan, subject, optimizer_named(train.optimizer, train.lr), microbatches, device
            ).stages
        except Exception as error:  # broadcast, so that all ranks raise it
            found = UserError(f"plan.stages: {type(error).__name__}: {error}")
            found = error if isinstance(error, UserError) else found
    if isinstance(world, World):
        found = world.everyone.broadcast_object(found)
    if isinstance(found, UserError):
        raise found
    return put(job, origins, "plan", stages=found)


def _put_model(job: Job, origins: Origins, values: Mapping[str, Any]) -> tuple[Job, Origins]:
    return replace(job, model={**job.model, **values}), {**origins, **{f"model.{key}": "planner" for key in values}}
