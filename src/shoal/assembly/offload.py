"""What a plan's `memory` makes of an engine: the tiers, where each chunk's optimizer side lies, when and where it is
updated, what of it is committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint import optimizer_state, state
from shoal.chunks import Buffer, Chunk, Gather, Tier, budget
from shoal.chunks.allocate import Private
from shoal.comm import Group, World
from shoal.device import forget_most_allocated, is_accelerator, new_stream, on_stream, synchronize
from shoal.errors import StorageError, UserError
from shoal.optim.fused.host_adam import adam_update
from shoal.optim.groups import OptimizerFactory, state_keys, updates_on_host
from shoal.optim.optimizer import ChunkOptimizer
from shoal.optim.tiers.deferred_update import DeferredUpdate
from shoal.optim.tiers.disk import Disk, directory_of
from shoal.optim.tiers.host import HostStore, streams
from shoal.optim.tiers.in_turn import InTurn
from shoal.optim.tiers.page import has_master
from shoal.optim.tiers.pager import Pager, in_turn
from shoal.optim.tiers.placement import IN_TURN, move_to_device, on_device, on_disk
from shoal.plan import Plan
from shoal.precision import Precision

TRIAL = 1 << 22
"""Elements of a trial of the link and of the host's update: 16 MiB in fp32."""


class Offload:
    """The memory of `plan` on the device of `world`. `tier` and `host` count what is on the device and on the host,
    `allowed` is what the plan allows. `everyone`: the ranks that decide together, `group` the replicas among them.
    `disk`: makes the disk of a directory."""

    def __init__(
        self, plan: Plan, world: World, group: Group, everyone: Group, disk: Callable[[Path, int | None], Disk]
    ) -> None:
        device, ledger = world.device, world.ledger
        allowed = budget(plan.memory, device)
        assert allowed is not None
        self.allowed, self._device, self._group, self._everyone = allowed, device, group, everyone
        self._ledger, self._lane, self._disk = ledger, world.host_lane, disk
        self._streams: bool | None = None
        self.tier = Tier("plan.memory.device", allowed.device, device, ledger=ledger)
        self.host = Tier("plan.memory.host", allowed.host, ledger=ledger)
        self.home = Private(torch.device("cpu"), pinned=is_accelerator(device))
        self._places_are_open = allowed.device is not None
        self._committed: tuple[dict[str, Any], dict[str, Tensor]] | None = None

    def in_turn(self, pager: Pager | None) -> InTurn | None:
        """What surrounds updates of one chunk after the other: on their way elsewhere, during the forward, or since
        some stay on the device. None where all are updated at once."""
        if self.update == "at once" and self.allowed.device is None and pager is None:
            return None
        deferred = DeferredUpdate(self._lane()) if self.update == "deferred" else None
        return InTurn(pager, deferred, None if pager is None else partial(self._commit, pager))

    def narrow_gradients(
        self, module: nn.Module, given: Precision, factory: OptimizerFactory, options: list[dict[str, Any]], once: bool
    ) -> Precision:
        """Gradients go to the host as bf16 where that loses nothing: autograd gives such of all parameters, of a single
        rank, where they come `once` a step, nothing is added to them, and the host's kernel takes them as they are,
        which it cannot of sparse embeddings, that stay on the device."""
        exact = once and self._everyone.size == 1 and given.model == torch.bfloat16 and given.is_uniform(module)
        goes = exact and not any(getattr(each, "sparse", False) for each in module.modules())
        if not goes or not updates_on_host(factory, options):
            return given
        if self.allowed.may_stream(given.keep) and self._prefers_device(state_keys(factory, options, given.master)):
            return given
        return replace(given, grad=given.model)

    def bytes_in_turn(self, precision: Precision, keys: Callable[[torch.dtype], list[str]]) -> int:
        """Bytes of the device for each element that a rank owns of the largest chunk, where updates pass through it; 0
        elsewhere. `keys` gives those of the optimizer's state. A collective call."""
        if not precision.low or not self.allowed.may_stream(precision.keep):
            return 0
        own = keys(precision.master)
        return in_turn(own, precision.master) if self._prefers_device(own) else 0

    def pages(
        self, chunks: Sequence[Chunk], factory: OptimizerFactory, options: list[dict[str, Any]], precision: Precision
    ) -> Pager | None:
        """Decides what of the optimizer's side lies on the disk, if there is one, or is streamed through the device,
        and makes its pages."""
        keys = self._keys = state_keys(factory, options, precision.master)
        disk, owned = self.allowed.disk, [chunk.owned for chunk in chunks if chunk.passes]
        away = on_disk(owned, keys, self.host, disk is not None, self.allowed.activations > 0)
        trained = [chunk for chunk in owned if chunk.trainable and chunk.slots]
        self.update = self._how(trained, disk is not None)
        if self.update == "streamed":
            pager = Pager(trained, keys, HostStore(self._device), False, {}, self._ledger)
            pager.reserve()  # before the first step sees what the device has left
            self.tier.measures = True  # that step says what would have been enough, for these and all else
            self.tier.take(IN_TURN, pager.nbytes)
            return pager
        if disk is None:
            return None
        all_is_there = len(away) == len(trained) and all(chunk.passes for chunk in chunks if chunk.trainable)
        durable = all(self._everyone.all_gather_object(all_is_there))
        made: Pager | None = None
        problem = ""
        if away or durable:
            rank, ranks = self._everyone.rank, self._everyone.size
            about = {"rank": rank, "ranks": ranks, "precision": precision.name, "keep": precision.keep, "keys": keys}
            try:
                store = self._disk(directory_of(disk.path, rank), disk.size)
                with ExitStack() as undo:
                    undo.callback(store.close)
                    made = Pager(away, keys, store, durable, about, self._ledger)
                    undo.pop_all()
            except StorageError as error:  # all ranks are to raise it
                problem = str(error)
        if said := next(filter(None, self._everyone.all_gather_object(problem)), ""):
            if made is not None:
                made.close()
            raise StorageError(said)
        if made is not None and durable:
            known = self._everyone.all_gather_object(list(made.records))
            made.begin_after(max(set(known[0]).intersection(*known), default=0))
        return made

    def _how(self, trained: Sequence[Buffer], disk: bool) -> str:
        """When and where what is at home on the host is updated, all ranks alike: on the host at once beside a CPU,
        which has something else to do during the forward; else where it takes less."""
        asked = self.allowed.update
        if asked == "auto" and not is_accelerator(self._device):
            return "at once"
        if asked not in ("auto", "streamed"):
            return asked
        able = all(self._everyone.all_gather_object(not disk and all(map(has_master, trained))))
        if asked == "streamed" and not able:
            raise UserError(
                'plan.memory.update = "streamed" moves masters beside low-precision weights through the device: it '
                "goes with bf16 or fp16 and whole masters, without plan.memory.disk"
            )
        return "streamed" if able and self._prefers_device(self._keys) else "deferred"

    def _prefers_device(self, keys: Sequence[str]) -> bool:
        """Whether masters and the state under `keys` go through the device for their update, where they can: asked for,
        or measured, once. A collective call."""
        if self.allowed.update != "auto" or not is_accelerator(self._device):
            return self.allowed.update == "streamed"
        if self._streams is None:
            faster = streams(link_rate(self._device), host_seconds(), 4 * (1 + len(keys)))
            self._streams = bool(self._everyone.broadcast_object(faster))
        return self._streams

    def use_the_device(self, chunks: Sequence[Chunk], gather: Gather, optimizer: ChunkOptimizer) -> bool:
        """Once, after the first step: what it left of the device's memory gets what is updated, with its weights, as
        far as that goes. Nothing that is computed changes. Returns whether chunks have moved."""
        if not self._places_are_open:
            return False
        self._places_are_open = False
        away = {id(page.chunk) for page in optimizer.pages}
        movable = [chunk for chunk in chunks if chunk.passes and chunk.trainable and id(chunk.owned) not in away]
        fit = on_device(movable, self._keys, gather.executor.spare, self._device)
        number = min(self._group.all_gather_object(len(fit)))  # they are gathered together
        if number:
            optimizer.settle()
        for chunk in fit[:number]:
            move_to_device(chunk, self._keys, self.host, self.tier)
            chunk.stay()
            gather.stays(chunk)
            optimizer.stays(chunk)
        return number > 0

    def note(self, module: nn.Module, place: Callable[[], Mapping[str, Any]], pager: Pager | None) -> None:
        """After a step: what a generation of its update will need beside its pages, before the next step changes it."""
        if pager is not None and pager.durable:
            self._committed = dict(place()), {name: each.clone() for name, each in state.buffers(module)}

    def _commit(self, pager: Pager, optimizer: ChunkOptimizer) -> None:
        """Makes what the disk holds the place to go on from, once the update of the step that was noted has ended."""
        if pager.is_new and self._committed is not None:
            about, buffers = self._committed
            pager.commit(
                {**buffers, **optimizer_state.small_state(optimizer)},
                {**about, **optimizer_state.optimizer_extra(optimizer, None)},
            )


def link_rate(device: torch.device) -> float:
    """Bytes a second from the host to a GPU and back, both ways at once."""
    up, down = (torch.zeros(TRIAL, pin_memory=True) for _ in range(2))
    there, back = (torch.zeros(TRIAL, device=device) for _ in range(2))
    one, other = new_stream(device), new_stream(device)
    best = float("inf")
    for _ in range(5):
        synchronize(device)
        started = time.perf_counter()
        with on_stream(one):
            there.copy_(up, non_blocking=True)
        with on_stream(other):
            down.copy_(back, non_blocking=True)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    del there, back
    forget_most_allocated(device)  # the trial is no part of a run's peak
    return up.nbytes / best


def host_seconds() -> float:
    """Seconds an element of Adam on the host, with all of torch's threads."""
    p, g, m, v = (torch.zeros(TRIAL) for _ in range(4))
    best = float("inf")
    for step in range(1, 5):
        started = time.perf_counter()
        adam_update(p, g, m, v, step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=True)
        best = min(best, time.perf_counter() - started)
    return best / TRIAL
