"""Two steps of a small model, for tests that compare ranks with one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shoal import Engine, Plan


def losses_of(world: Any, model: Any, loss: Any, rows: Any, plan: dict[str, Any], batch: int) -> list[float]:
    """The losses of two steps on `rows`, in microbatches of half a `batch`."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = Engine(model, loss, sgd, Plan(**plan), global_batch=batch, microbatch=batch // 2, world=world)
    try:
        return [float(engine.step(each).loss) for each in engine.batches(rows, steps=2)]
    finally:
        engine.close()
