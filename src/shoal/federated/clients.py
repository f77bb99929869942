"""The samples of all clients of a simulation, in one tensor a key, and the batches that each client trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.keyed import derive_key, keyed_hash
from shoal.data.loader import stack_samples
from shoal.federated.partition import Numbers, Shares, shares_of

PIECE = 1024
"""Samples that are stacked at a time."""


@dataclass(frozen=True)
class Held:
    """Samples [N, ...] by key, those of one client after those of another: client k has rows offsets[k] to
    offsets[k + 1]."""

    tensors: Mapping[str, Tensor]
    offsets: Numbers

    @property
    def counts(self) -> Numbers:
        """The number of samples of each client."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def of(self, client: int) -> Held:
        """Returns the samples of one client, as the only one."""
        first, last = self.offsets[client], self.offsets[client + 1]
        tensors = {key: values[first:last] for key, values in self.tensors.items()}
        return Held(tensors, np.array([0, last - first], np.int64))

    def owners(self) -> Numbers:
        """Returns whose each row is."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


@dataclass(frozen=True)
class Clients:
    """What each client trains on, and what it holds out."""

    train: Held
    held_out: Held

    @property
    def number(self) -> int:
        return len(self.train.offsets) - 1

    def only(self, client: int) -> Clients:
        """Returns one client, as the only one."""
        return Clients(self.train.of(client), self.held_out.of(client))


def clients_of(dataset: Any, shares: Shares, validation: float, seed: int, device: torch.device) -> Clients:
    """Returns the clients that have `shares` of a map-style dataset of equally shaped samples.

    validation: the share of its samples that each client holds out.
    """
    train, held_out = shares.split(validation, seed)
    return Clients(_held(dataset, train, device), _held(dataset, held_out, device))


def client_of(dataset: Any, shares: Shares, client: int, validation: float, seed: int, device: torch.device) -> Clients:
    """Returns one of the clients that `clients_of` would give, as the only one; no other's samples are read."""
    train, held_out = shares.split(validation, seed)
    return Clients(*(_held(dataset, shares_of([each.of(client)]), device) for each in (train, held_out)))


def _held(dataset: Any, shares: Shares, device: torch.device) -> Held:
    rows = shares.order if len(shares.order) else np.zeros(1, np.int64)  # one row tells the shapes of none
    pieces = [
        stack_samples([dataset[int(row)] for row in rows[first : first + PIECE]])
        for first in range(0, len(rows), PIECE)
    ]
    tensors = {key: torch.cat([piece[key] for piece in pieces])[: len(shares.order)].to(device) for key in pieces[0]}
    return Held(tensors, shares.offsets)


def rows_of_batches(
    held: Held,
    clients: Sequence[int],
    turns: Sequence[int],
    steps: int,
    batch: int,
    seed: int,
    numbers: Sequence[int] | None = None,
) -> Tensor:
    """Returns the rows of `held` on which each of `clients` trains in its steps: int64 [clients, steps, batch].

    A client goes through its samples in an order that is drawn for its turn, and begins again in that order when it is
    through; so all batches are full. The draw depends on seed, turn and client alone. `numbers`: what the clients are
    among all, where `held` has not all of them.
    """
    which = np.asarray(clients, np.int64)
    drawn = which if numbers is None else np.asarray(numbers, np.int64)
    counts = held.counts[which]
    places = np.arange(counts.max(), dtype=np.uint64)
    own = (drawn.astype(np.uint64) << np.uint64(32)) + np.asarray(turns, np.uint64)
    key = derive_key("federated order", seed)
    keys = keyed_hash(keyed_hash(own, key)[:, None] + places, key)
    keys[places >= counts[:, None].astype(np.uint64)] = np.iinfo(np.uint64).max
    order = np.argsort(keys, axis=1)
    taken = np.arange(steps * batch) % counts[:, None]
    rows = np.take_along_axis(order, taken, axis=1) + held.offsets[which][:, None]
    return torch.from_numpy(rows.reshape(len(which), steps, batch))
