"""A worker of a job: asks the server for samples, pulls weights, pushes gradients, until the server has no more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm import World
from shoal.data import Batch, Cursor
from shoal.data.loader import stack_samples
from shoal.device import is_accelerator
from shoal.errors import UserError, counted_from_1
from shoal.jobs.assemble import make_engine
from shoal.jobs.attempt import FIRST_LOOK
from shoal.jobs.choose import Settled, Sizes, settle
from shoal.jobs.config import Job, Origins
from shoal.jobs.evaluate import Subsample, measure_of, write_on
from shoal.jobs.served.devices import device_of_worker
from shoal.jobs.served.policy import samples_of
from shoal.jobs.served.settings import check_served, shares
from shoal.jobs.served.several import timeout_of
from shoal.jobs.served.table import SYNC
from shoal.jobs.served.tables import tables_of
from shoal.launch.identity import Identity
from shoal.launch.local import signals
from shoal.module.batchnorm import RunningStatistics, other_buffers
from shoal.server import Client, connect
from shoal.server.embeddings import RowsInUse
from shoal.server.link import About
from shoal.server.messages import END, EVALUATE, TRAIN

ASK_SECONDS = 10.0


class Still(torch.optim.Optimizer):
    """Updates nothing: the server does."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leaves the parameters as they are."""


def work(job: Job, origins: Origins, place: Identity) -> int:
    """Trains as worker `place.rank` of a job; returns the number of the signal that ended it, 0 for none."""
    check_served(job, place.size)
    settled = settle(job, origins, Sizes(1, 1))
    device, timeout = device_of_worker(place), timeout_of(job)
    worker = _Worker(settled, place.size, device)
    with signals() as received, connect(place.servers, rank=place.rank, timeout=timeout, device=device) as client:
        direct = sum(map(is_accelerator, client.devices))
        where = {0: "by the host's memory", len(client.devices): "from device to device"}
        print(f"on {worker.engine.device}; weights and gradients go {where.get(direct, 'both ways')}", flush=True)
        worker.to_the_end(client, received)
    worker.engine.close()
    return received[0] if received else 0


class _Worker:
    """Computes gradients of the job's model, as the engine of one rank does."""

    def __init__(self, settled: Settled, workers: int, device: torch.device | None) -> None:
        self._settled, self._shares = settled, shares(settled.job, workers)
        self._gated = settled.job.server.kind[0] == SYNC
        self._data = settled.model.prepare_data(settled.data.train)
        self._cursor = Cursor(len(self._data), settled.job.train.global_batch, settled.job.train.seed)
        world, self._rows = World.single(device), RowsInUse()
        if settled.job.plan.compile:
            self._rows.keep_compilers_out()
        model = tables_of(settled).left_out(self._rows)
        self.engine = make_engine(settled.job, model, settled.total, world, optimizer=Still)
        self.engine.optimizer.torch.register_step_pre_hook(self._keep)
        self._gradients: dict[str, Tensor | None] = {}
        self._statistics = RunningStatistics(self.engine.module)
        self._buffers = {name: value.clone() for name, value in other_buffers(self.engine.module).items()}
        self._version = -1

    def _keep(self, *step: object) -> None:
        """Notes the gradients of a step, None of what its backward has not reached."""
        self._gradients = {name: parameter.grad for name, parameter in self.engine.optimizer.known.items()}

    def to_the_end(self, client: Client, received: list[int]) -> None:
        """Does what the server says, until it has no more or a signal has come."""
        found: Mapping[str, Any] = {}
        self._rows.client = client
        while not received:
            given = client.ask(ASK_SECONDS, found)
            found = {}
            if given.what == END:
                break
            if given.what == EVALUATE:
                self._pull(client)
                found = self._evaluate()
            elif given.what == TRAIN:
                self._train(client, given.ticket)

    def _train(self, client: Client, ticket: int) -> None:
        step, ids = samples_of(self._cursor, ticket, self._shares)
        if not (self._gated and self._version == step):
            self._pull(client)
        gradients: dict[str, Tensor | None] = dict.fromkeys(self._masters())
        if not ids:  # the epoch's last batch has fewer samples than shares
            client.push_work(gradients, self._version, About(0.0, ticket, {"loss": 0.0}))
            return
        load = partial(_load, self._data)
        batch = Batch(step, self._cursor.epoch(step), ids, load)
        self._statistics.begin()
        while True:
            self._rows.begin()
            self.engine.step_index = step
            with counted_from_1():
                result = self.engine.step(batch)
            if not result.skipped:
                break
            self._statistics.restore()  # the same samples come again, under a smaller loss scale
        if result.count:
            gradients |= self._gradients
        self._check_buffers()
        term = self._statistics.term().cpu()
        self._statistics.restore()  # the server has what was pulled, and adds the term
        loss = result.loss if result.count else 0.0
        rows = self._rows.gradients(result.to_mean)
        client.push_work(gradients, self._version, About(result.count, ticket, {"loss": loss}), term, rows)

    @torch.no_grad()
    def _pull(self, client: Client) -> None:
        self._version = client.pull_work(self._masters())
        for chunk in self.engine.parts.chunks:
            chunk.publish()
        if client.statistics is not None:
            self._statistics.put(client.statistics)

    def _masters(self) -> dict[str, Tensor]:
        """Returns the weights by name, in the precision in which they are kept."""
        return {slot.name: slot.view(chunk.master) for chunk in self.engine.parts.chunks for slot in chunk.slots}

    def _evaluate(self) -> dict[str, Any]:
        """Evaluates the weights that were pulled last, and continues the prompt `run.sample`."""
        settled, run = self._settled, self._settled.job.run
        rows = Subsample(settled.model.prepare_data(settled.data.validation), run.eval_samples)
        if self._version == 0:
            rows = Subsample(rows, min(FIRST_LOOK, len(rows)))
        right = measure_of(settled.model.loss)
        seen = self.engine.evaluate(rows, also=() if right is None else (right,))
        found: dict[str, Any] = {"step": self._version, "tokens": seen.tokens, "seconds": seen.seconds}
        found["loss"] = seen.loss if math.isfinite(seen.loss) else None
        found["accuracy"] = seen.also[0] if seen.also else None
        if run.sample and self._version and settled.tokenizer is not None:
            found["prompt"] = run.sample
            found["sample"] = write_on(self.engine, settled.tokenizer, run.sample)
        return found

    def _check_buffers(self) -> None:
        """Raises UserError where a forward changes what a checkpoint has beside the parameters."""
        if not self._buffers:
            return
        now = other_buffers(self.engine.module)
        for name, before in self._buffers.items():
            if not torch.equal(now[name], before):
                raise UserError(
                    f"the model's forward changes the buffer {name}; a parameter server keeps such only of BatchNorm. "
                    "Leave ps out of the roles, or take a model without it"
                )
        self._buffers.clear()


def _load(data: Any, ids: Any) -> dict[str, Tensor]:
    return stack_samples([data[int(each)] for each in ids])
