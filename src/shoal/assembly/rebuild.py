"""What a running engine changes of itself once a step has shown what pays. Nothing that is computed changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from shoal.assembly.memory import Memory
from shoal.assembly.model import Local
from shoal.assembly.trainer import Trainer
from shoal.chunks import Chunk, move
from shoal.exchange.algorithm import by_parameter


class Rebuild:
    """Moves what is updated to the device where the first step has left room, lets a budget choose what backward
    computes again, and cuts the chunks anew in the order in which gradients came."""

    def __init__(self, local: Local, memory: Memory, trainer: Trainer) -> None:
        self._local, self._memory, self._trainer = local, memory, trainer
        self._may_recut = memory.recut and len(memory.trainable) > 1

    def after_step(self, place: Callable[[], Mapping[str, Any]]) -> None:
        """Called after each step, by all ranks alike. `place()`: where the run is, for who goes on from the disk's
        update."""
        local, memory, trainer = self._local, self._memory, self._trainer
        if (offload := memory.offload) is not None:
            if not memory.exchange.state():  # which would be lost
                offload.note(local.module, place, memory.pager)
            trainer.optimizer.end_of_step()
            if memory.gather is not None and offload.use_the_device(memory.chunks, memory.gather, trainer.optimizer):
                trainer.runner.follow()
        if local.recompute is not None:
            local.recompute.decide(local.ranks.stage.broadcast_object)
        if self._may_recut:
            self._may_recut = False
            self._order_chunks()

    def _order_chunks(self) -> None:
        """Cuts the chunks in the order in which the first step's gradients came, if they leave enough earlier so."""
        ranks, maker, runner = self._local.ranks, self._memory.maker, self._trainer.runner
        exchange, size = self._memory.exchange, self._memory.chunk_bytes
        order = runner.arrivals if maker.better(size, runner.arrivals) is not None else None
        order = ranks.stage.broadcast_object(order)
        if order is None:
            return
        cut = maker.cut_like(maker.cut(size, order), ranks.parts)
        runner.settle()
        exchange.settle()
        exchange.close()
        states = exchange.state().items()
        kept = {name: {key: each.clone() for key, each in part.tensors.items()} for name, part in states}
        new = maker.make(cut)
        gradients = by_parameter(exchange.replica.chunks, runner.gradients) if runner.gradients else {}
        move(self._memory.parameters, self._trainer.optimizer.parameters, self._memory.chunks, new)
        self._memory.chunks[:] = new
        trainable = self._memory.trainable
        runner.gradients = [_laid_out(chunk, gradients) for chunk in trainable if gradients]
        self._trainer.optimizer.follow(trainable)
        exchange.attach(replace(exchange.replica, chunks=trainable))
        for name, part in exchange.state().items():
            for key, each in part.tensors.items():
                each.copy_(kept[name][key])
        exchange.restored()
        runner.follow()


def _laid_out(chunk: Chunk, gradients: Mapping[str, Tensor]) -> Tensor:
    """Lays `gradients`, by parameter, out as `chunk`."""
    flat = chunk.like_gradient()
    for slot in chunk.slots:
        slot.view(flat).copy_(gradients[slot.name])
    return flat
