"""Servers of parameters: workers pull weights from them and push gradients, each over a session of its own; see
docs/server.md."""

from shoal.server.client import Client, connect
from shoal.server.options import Options
from shoal.server.parameter_server import ParameterServer
from shoal.server.policies import Async, Batch, BoundedStaleness, Sync
from shoal.server.shares import Share
from shoal.server.table import Table

__all__ = [
    "Async",
    "Batch",
    "BoundedStaleness",
    "Client",
    "Options",
    "ParameterServer",
    "Share",
    "Sync",
    "Table",
    "connect",
]
