"""The memory of a rank for the record: the tiers of `plan.memory`, or else the bytes of chunks and optimizer state."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from shoal.chunks import Tier
from shoal.device import is_accelerator
from shoal.engine import Engine
from shoal.optim.buddy import FOR_BUDDY


def tiers(engine: Engine) -> list[Tier]:
    """Returns the tiers at this moment, the disk included. Without `plan.memory` there is one tier, with what the rank
    keeps from step to step, and beside that of an accelerator the host's, where it keeps a buddy's state."""
    if engine.parts.tier is None or engine.parts.host is None:
        kept, of_buddy = _kept(engine), _of_buddy(engine)
        if not is_accelerator(engine.device):
            return [Tier("memory.host", device=engine.device, held={**kept, **of_buddy}, ledger=engine.ledger)]
        own = Tier("memory.device", device=engine.device, held=kept, ledger=engine.ledger)
        return [own, *([Tier("memory.host", held=of_buddy, ledger=engine.ledger)] if of_buddy else [])]
    found = [engine.parts.tier, engine.parts.host]
    if engine.parts.pager is not None and engine.parts.pager.disk is not None:
        found.append(
            Tier(
                "plan.memory.disk",
                engine.parts.pager.disk.capacity,
                held=engine.parts.pager.held(),
                ledger=engine.ledger,
            )
        )
    return found


def _kept(engine: Engine) -> dict[str, int]:
    kept: Counter[str] = Counter()
    for chunk in engine.parts.chunks:
        owned = chunk.owned
        kept["weights"] += owned.data.nbytes if chunk.passes else chunk.data.nbytes
        if chunk.trainable:
            gradient = chunk.grad if chunk.grad is not None else owned.gradient
            kept["gradients"] += gradient.nbytes
            kept["masters"] += owned.nbytes_masters
    states = engine.optimizer.torch.state.values()
    storages = {id(value): value.nbytes for state in states for value in state.values() if isinstance(value, Tensor)}
    kept["optimizer state"] = sum(storages.values())
    return dict(kept)


def _of_buddy(engine: Engine) -> dict[str, int]:
    """What the rank keeps of another one, which is in its host's memory."""
    return {} if engine.parts.buddy is None else {FOR_BUDDY: engine.parts.buddy.nbytes}
