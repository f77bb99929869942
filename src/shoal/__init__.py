"""Shoal trains one PyTorch model, written for one device, on whatever devices there are.

Names are imported when they are first used: `shoal --help` and the launcher need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data import open_text
    from shoal.doors import initialize_engine
    from shoal.engine import Engine
    from shoal.errors import CheckpointError, LaunchError, RemoteError, ShoalError, TrainingError, UserError
    from shoal.exchange import as_ddp_hook
    from shoal.exchange.as_fsdp2 import as_fsdp2
    from shoal.optim import lr
    from shoal.optim.groups import decay_matrices_only
    from shoal.plan import Plan
    from shoal.planner.auto import auto_plan
    from shoal.server import Async, Batch, BoundedStaleness, ParameterServer, Sync, Table, connect
    from shoal.server.remote import DistributedOptimizer, Owner, context, remote
    from shoal.training.evaluation import Evaluation
    from shoal.training.result import StepResult

from shoal.errors import tell_plainly

tell_plainly()

_HOME = {
    "Async": "shoal.server",
    "Batch": "shoal.server",
    "BoundedStaleness": "shoal.server",
    "CheckpointError": "shoal.errors",
    "DistributedOptimizer": "shoal.server.remote",
    "Engine": "shoal.engine",
    "Evaluation": "shoal.training.evaluation",
    "LaunchError": "shoal.errors",
    "Owner": "shoal.server.remote",
    "ParameterServer": "shoal.server",
    "Plan": "shoal.plan",
    "RemoteError": "shoal.errors",
    "ShoalError": "shoal.errors",
    "StepResult": "shoal.training.result",
    "Sync": "shoal.server",
    "Table": "shoal.server",
    "TrainingError": "shoal.errors",
    "UserError": "shoal.errors",
    "as_ddp_hook": "shoal.exchange",
    "as_fsdp2": "shoal.exchange.as_fsdp2",
    "auto_plan": "shoal.planner.auto",
    "connect": "shoal.server",
    "context": "shoal.server.remote",
    "decay_matrices_only": "shoal.optim.groups",
    "initialize_engine": "shoal.doors",
    "open_text": "shoal.data",
    "remote": "shoal.server.remote",
}

__all__ = [
    "Async",
    "Batch",
    "BoundedStaleness",
    "CheckpointError",
    "DistributedOptimizer",
    "Engine",
    "Evaluation",
    "LaunchError",
    "Owner",
    "ParameterServer",
    "Plan",
    "RemoteError",
    "ShoalError",
    "StepResult",
    "Sync",
    "Table",
    "TrainingError",
    "UserError",
    "__version__",
    "as_ddp_hook",
    "as_fsdp2",
    "auto_plan",
    "connect",
    "context",
    "decay_matrices_only",
    "initialize_engine",
    "lr",
    "open_text",
    "remote",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata  # a fifth of what `shoal --help` takes, and seldom asked for

        try:
            return metadata.version("shoal")
        except metadata.PackageNotFoundError:
            return "source tree"  # it is not installed
    if name == "lr":
        return import_module("shoal.optim.lr")
    if name not in _HOME:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
