"""Modules that run in other processes, with distributed autograd; see docs/remote.md."""

from shoal.server.remote.contexts import Context, context
from shoal.server.remote.module import RemoteModule, remote
from shoal.server.remote.owner import Owner, OwnerOptions

__all__ = ["Context", "Owner", "OwnerOptions", "RemoteModule", "context", "remote"]
