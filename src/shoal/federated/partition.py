"""Deals samples to clients: evenly, by label, by document. Draws are keyed: a deal is the same on any machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.keyed import derive_key
from shoal.errors import UserError, check_choice, check_names
from shoal.federated.settings import PARTITIONS

Numbers = NDArray[np.int64]
TRIES = 100


@dataclass(frozen=True)
class Shares:
    """Which samples each client has: those of client k are `order[offsets[k] : offsets[k + 1]]`."""

    order: Numbers
    offsets: Numbers

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> Numbers:
        """The number of samples of each client."""
        return np.diff(self.offsets)

    def of(self, client: int) -> Numbers:
        """Returns the samples of a client."""
        return self.order[self.offsets[client] : self.offsets[client + 1]]

    def split(self, share: float, seed: int) -> tuple[Shares, Shares]:
        """Splits the samples of each client into those it trains on and the `share` that it holds out: at least one
        where it has two and the share is not 0."""
        if not 0 <= share < 1:
            raise UserError(f"data.validation = {share}: give the share that each client holds out, 0 to below 1")
        rng = np.random.default_rng(derive_key("federated held out", seed))
        kept, held = [], []
        for client in range(self.clients):
            own = rng.permutation(self.of(client))
            out = 0 if share == 0 or len(own) < 2 else min(len(own) - 1, max(1, round(share * len(own))))
            kept.append(np.sort(own[out:]))
            held.append(np.sort(own[:out]))
        return shares_of(kept), shares_of(held)


def shares_of(parts: list[Numbers]) -> Shares:
    """Returns the shares of clients that have `parts`."""
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    return Shares(np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64), offsets)


def check_partition(option: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the name and the parameters of `federated.partition`. Raises UserError for unknown ones."""
    name = option if isinstance(option, str) else option.get("name")
    check_choice(f"federated.partition = {name!r} is not one of", name, PARTITIONS)
    given = {} if isinstance(option, str) else {key: value for key, value in option.items() if key != "name"}
    check_names(f"federated.partition {name!r} has no parameter", given, ["alpha"] if name == "label" else [])
    _check_alpha(given.get("alpha", 0.5))
    return str(name), given


def _check_alpha(alpha: object) -> None:
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not alpha > 0:
        raise UserError(f"federated.partition.alpha = {alpha!r}: give a number above 0; smaller is more uneven")


def iid(samples: int, clients: int, seed: int) -> Shares:
    """Deals samples at random, to each client as many as to any other, or one more."""
    _enough(samples, clients)
    order = np.random.default_rng(derive_key("federated iid", seed)).permutation(samples)
    return shares_of([np.sort(part) for part in np.array_split(order, clients)])


def by_label(labels: NDArray[Any], clients: int, alpha: float, seed: int) -> Shares:
    """Deals the samples of each label in shares drawn from Dirichlet's distribution (https://arxiv.org/abs/1909.06335):
    with a small `alpha` a client has few labels, with a large one all of them alike.

    The draw is repeated until each client has a sample, and after 100 tries those without one get one from who has
    most.
    """
    _check_alpha(alpha)
    _enough(len(labels), clients)
    rng = np.random.default_rng(derive_key("federated label", seed))
    for _ in range(TRIES):
        parts: list[list[Numbers]] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            cuts = np.rint(np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(members)).astype(np.int64)
            for own, part in zip(parts, np.split(members, cuts), strict=True):
                own.append(part)
        found = [np.concatenate(own) for own in parts]
        if min(map(len, found)):
            break
    for client in [index for index, part in enumerate(found) if not len(part)]:
        largest = max(range(clients), key=lambda each: len(found[each]))
        found[client], found[largest] = found[largest][-1:], found[largest][:-1]
    return shares_of([np.sort(part) for part in found])


def by_document(documents: NDArray[Any], clients: int, seed: int) -> Shares:
    """Deals whole documents: samples with the same number in `documents` go to one client. The largest are dealt first,
    each to the client that has least, so shares are as even as the documents allow.

    With fewer documents than clients there are as many clients as documents.
    """
    names, place, counts = np.unique(documents, return_inverse=True, return_counts=True)
    clients = min(clients, len(names))
    _enough(len(documents), clients)
    rng = np.random.default_rng(derive_key("federated document", seed))
    drawn = rng.permutation(len(names))
    loads, owner = np.zeros(clients, np.int64), np.zeros(len(names), np.int64)
    for document in drawn[np.argsort(-counts[drawn], kind="stable")]:
        client = int(loads.argmin())
        owner[document] = client
        loads[client] += counts[document]
    owners = owner[place]
    return shares_of([np.flatnonzero(owners == client) for client in range(clients)])


def _enough(samples: int, clients: int) -> None:
    if clients < 1:
        raise UserError(f"federated.clients = {clients}: give a number above 0")
    if samples < clients:
        raise UserError(f"federated.clients = {clients}, but there are {samples} samples: give at most that many")
