"""Opens the data of a federated job, and deals it to clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data import ArrayData
from shoal.data.corpus import open_corpus
from shoal.errors import UserError
from shoal.federated.clients import Clients, client_of, clients_of
from shoal.federated.partition import Shares, by_document, by_label, check_partition, iid, shares_of
from shoal.federated.settings import Federated
from shoal.jobs.choose import Settled, opened
from shoal.jobs.config import Job, Origins, put


@dataclass(frozen=True)
class Joined:
    """The samples of several map-style datasets, one after the other."""

    parts: Sequence[Any]
    starts: Sequence[int]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        part = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.parts[part][index - self.starts[part]]


@dataclass(frozen=True)
class Dealt:
    """A job whose data is open: `shares[k]` are client k's samples of `dataset`, in the shape that the model takes."""

    settled: Settled
    federated: Federated
    dataset: Any
    shares: Shares

    def clients(self, device: torch.device) -> Clients:
        """Reads the samples of all clients."""
        job = self.settled.job
        return clients_of(self.dataset, self.shares, job.data.validation, job.train.seed, device)

    def client(self, number: int, device: torch.device) -> Clients:
        """Reads the samples of one client, which is the only one of what it returns."""
        job = self.settled.job
        return client_of(self.dataset, self.shares, number, job.data.validation, job.train.seed, device)


def deal(job: Job, origins: Origins) -> Dealt:
    """Opens the data of a job and deals it, as `federated.partition` says. Raises UserError as `settle` does."""
    if job.federated is None:
        raise UserError("the job has no table [federated]: give one, with e.g. clients = 10 and rounds = 100")
    for key in ("at", "norms_every", "verify_every"):
        if getattr(job.run, key):
            raise UserError(f"run.{key} with `shoal fed`: it is of ranks that train in step. Leave run.{key} out")
    settings = job.federated
    name, parameters = check_partition(settings.partition)
    for key, value in {"schedule": "constant", "warmup": 0}.items():  # which count rounds
        if getattr(job.train, key) is None:
            job, origins = put(job, origins, "train", **{key: value})
    whole = replace(job, data=replace(job.data, validation=0.0))  # each client holds out samples of its own
    found = opened(whole, origins)
    if isinstance(found.data, ArrayData):
        data, shares = found.data.train, _of_samples(found.data, name, parameters, job)
    else:
        data, shares = _of_text(found, name, job)
    federated = replace(settings, clients=shares.clients)
    data_table = replace(found.job.data, validation=job.data.validation)
    settled = replace(found, job=replace(found.job, data=data_table, federated=federated))
    return Dealt(settled, federated, settled.model.prepare_data(data), shares)


def _of_samples(data: ArrayData, name: str, parameters: dict[str, Any], job: Job) -> Shares:
    assert job.federated is not None
    clients, seed = job.federated.clients, job.train.seed
    if name == "document":
        raise UserError(f'federated.partition = "document", but data.source = {job.data.source!r} has no documents')
    if name == "iid":
        return iid(len(data.train), clients, seed)
    if data.classes is None:
        raise UserError(f'federated.partition = "label", but data.source = {job.data.source!r} has no labels')
    labels = np.array([int(data.train[index]["labels"]) for index in range(len(data.train))])
    return by_label(labels, clients, parameters.get("alpha", 0.5), seed)


def _of_text(settled: Settled, name: str, job: Job) -> tuple[Any, Shares]:
    """Deals rows at random, or documents: those of the standard library by package, others each by itself."""
    assert job.federated is not None
    text: Any = settled.data.train
    clients, seed = job.federated.clients, job.train.seed
    if name == "label":
        raise UserError('federated.partition = "label", but text has no labels: give "iid" or "document"')
    if name == "iid":
        return text, iid(len(text), clients, seed)
    groups = open_corpus(job.data.source, job.data.field).groups
    names = np.arange(len(text.lengths)) if groups is None else np.array(groups())
    rows = np.maximum(1, text.lengths // text.sequence)
    of_rows = np.repeat(np.arange(len(names)), rows)
    dealt = by_document(names[of_rows], clients, seed)
    parts = [text.part(np.unique(of_rows[dealt.of(client)])) for client in range(dealt.clients)]
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).tolist()
    return Joined(parts, starts), shares_of([np.arange(starts[k], starts[k + 1]) for k in range(len(parts))])
