"""The state of exchange algorithms in a checkpoint: by replica, under any number of replicas that reads it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.checkpoint.pieces import Piece, Want, canonical, wants_of
from shoal.checkpoint.role import WriterRole
from shoal.checkpoint.source import Source
from shoal.plan import Option

States = Mapping[str, tuple[Mapping[str, Tensor], str]]
_KEEPING = ("residual", "waiting")
"""In the names of states that are gradients which no update has had yet."""


def exchange_pieces(states: Mapping[str, Mapping[str, Tensor]], role: WriterRole) -> list[Piece]:
    """Returns the pieces of the exchange algorithm's state on this rank's replica, given as {state: {parameter:
    tensor}}."""
    found = []
    for state, tensors in states.items():
        for name, tensor in tensors.items():
            title = _exchange_title(role.of(name).rank, state, name, tensor, role)
            writer = WriterRole(role.layouts) if "@" in title else role.of(name).alone
            found += writer.share(title, name, canonical(tensor.detach()))
    return found


def restore_exchange(source: Source, states: States, role: WriterRole) -> bool:
    """Reads the state of an exchange algorithm in place.

    `states`: {state: (tensors by parameter, effect of a resize: "split" or "mean")}. Returns False if
    `source` lacks some of them, which stay as they are: it was written under another algorithm, before it had any, or
    under another cut of parameters with a state that is not laid out as they are.
    """
    saved = source.shapes()
    replicas = _replicas(saved)

    def wants(replica: int, state: str, tensors: Mapping[str, Tensor]) -> list[Want]:
        return [
            want
            for name, tensor in tensors.items()
            for want in wants_of(_exchange_title(replica, state, name, tensor, role), role.layout(name, tensor), tensor)
        ]

    complete, own = True, list[Want]()
    for state, (tensors, on_resize) in states.items():
        there = {
            name: each
            for name, each in tensors.items()
            if all(want.name in saved for want in wants(0, state, {name: each}))
        }
        complete = complete and len(there) == len(tensors)
        before = {name: replicas[f"{state}.{name}"] for name in there}
        resized = {name: each for name, each in there.items() if before[name] != role.of(name).size}
        for name in there.keys() - resized.keys():
            own += wants(role.of(name).rank, state, {name: there[name]})
        totals = {name: torch.zeros_like(each) for name, each in resized.items()}
        for replica in range(max((before[name] for name in resized), default=0)):
            # one by one, so that memory holds one replica's state at a time
            theirs = {name: torch.empty_like(each) for name, each in resized.items() if replica < before[name]}
            source.load(wants(replica, state, theirs))
            for name, each in theirs.items():
                totals[name] += each
        for name, each in resized.items():
            each.copy_(totals[name] / (role.of(name).size if on_resize == "split" else before[name]))
    source.load(own)
    return complete


def warnings_of(source: Source, states: States, role: WriterRole, exchange: Option, complete: bool) -> list[str]:
    """Returns what the user is to know of a restoring of `states` (see `restore_exchange`), which returned `complete`.
    `exchange`: that of the plan."""
    said = []
    if not complete:
        said.append(
            f"{source.name} holds no state of plan.exchange = {exchange!r}, or of parameters cut otherwise: that "
            "starts anew"
        )
    lost = set[str]()
    for title in _replicas(source.shapes()):
        state, name = title.split(".", 1)
        keeps = any(kind in state for kind in _KEEPING)
        if keeps and name in role.layouts and name not in states.get(state, ({}, ""))[0]:
            lost.add(state)
    if lost:
        was = source.extra["plan"].get("exchange", "allreduce")
        said.append(
            f"{source.name} holds gradients that plan.exchange = {was!r} has kept back ({', '.join(sorted(lost))}), "
            f"and {exchange!r} does not take them over: they are lost"
        )
    return said


def _exchange_title(rank: int, state: str, name: str, tensor: Tensor, role: WriterRole) -> str:
    """Returns the checkpoint's name for a tensor of an exchange algorithm.

    If the parameter is cut and the state is not laid out as it, the name includes the part; but for a single number,
    which all parts have alike.
    """
    own = name in role.layouts and not role.layouts[name].alike and role.layout(name, tensor).alike
    mine = role.of(name)
    return f"exchange.{rank}.{state}.{name}" + (f"@{mine.place}of{mine.places}" if own and tensor.numel() > 1 else "")


def _replicas(saved: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Returns the number of replicas that have written each state of each parameter, by "state.parameter"."""
    found: dict[str, int] = {}
    for title in saved:
        if title.startswith("exchange."):
            _, number, rest = title.split(".", 2)
            name = rest.partition("@")[0]
            found[name] = max(found.get(name, 0), int(number) + 1)
    return found
