"""An optimizer that begins anew over the same parameters, as each local training of a federated client does."""

from __future__ import annotations

from shoal.optim.optimizer import ChunkOptimizer


def begin_anew(optimizer: ChunkOptimizer, factor: float = 1.0) -> None:
    """Forgets the state of all updates, and sets the options to those of the beginning, the learning rate times
    `factor`. For state in memory."""
    optimizer.settle()
    inner = optimizer.torch
    groups = inner.state_dict()["param_groups"]
    inner.load_state_dict(
        {
            "state": {},
            "param_groups": [
                {**group, **given, "lr": given["lr"] * factor}
                for group, given in zip(groups, optimizer.given, strict=True)
            ],
        }
    )
