"""Modules that run in other processes, with distributed autograd; see docs/remote.md."""

from shoal.server.remote.contexts import Context, context
from shoal.server.remote.local import local_owners
from shoal.server.remote.module import RemoteModule, remote
from shoal.server.remote.optimizer import DistributedOptimizer
from shoal.server.remote.owner import Owner, OwnerOptions

__all__ = [
    "Context",
    "DistributedOptimizer",
    "Owner",
    "OwnerOptions",
    "RemoteModule",
    "context",
    "local_owners",
    "remote",
]
