"""Gathers whose ranks must mean the same: each brings a number, and where they differ, all are told.

Where the transport compares the numbers itself (`transport.Compares`), they take no meeting of their own.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from shoal.comm.collectives import Group
from shoal.comm.flat import flat_of, write_back
from shoal.comm.sizes import check_fit
from shoal.comm.transport import Compares, Unlike, sent_bytes
from shoal.device import kind_of


def gather_alike(group: Group, out: Tensor, tensor: Tensor, number: int, purpose: str, asks: str) -> None:
    """Fills `out` with every rank's `tensor` in rank order, as `Group.all_gather` does. Raises Unlike before that, on
    all ranks, where they have not come with the same `number`, 1 to 2**31 - 1. `asks`: what is asked, for the ledger,
    which books it as a gather of its own."""
    if not getattr(group.transports[kind_of(out.device)], "compares", False):
        meet_alike(group, number, asks)
        group.all_gather(out, tensor, purpose)
        return
    into, flat = flat_of(out), flat_of(tensor)
    check_fit("all_gather", group.name, group.size, whole=into, cut=flat)
    payload = group.size * torch.int32.itemsize
    group.ledger.count(group.name, "all_gather", asks, payload, sent_bytes("all_gather", payload, group.size))
    group.run("all_gather", purpose, into, lambda t: cast("Compares", t).all_gather_alike(into, flat, number))
    write_back(out, into)


def meet_alike(group: Group, number: int, asks: str) -> None:
    """Raises Unlike, on all ranks, where they have not come with the same `number`, here or in `gather_alike`."""
    mine = torch.tensor([number], dtype=torch.int32)
    numbers = mine.new_empty(group.size)
    if getattr(group.transports["cpu"], "compares", False):
        group.run("all_gather", asks, numbers, lambda t: cast("Compares", t).all_gather_alike(numbers, mine, number))
        return
    group.all_gather(numbers, mine, asks)
    if (numbers != number).any():
        raise Unlike(numbers.tolist())
