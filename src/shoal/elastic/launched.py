"""Nodes that Slurm, MPI or Kubernetes has started: each process is a supervisor, and no rank.

Such launchers number the processes that they start and say where the first one is. That one founds the job there, the
others join it. With an etcd cluster not even that is needed: any of them founds the job.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shoal.comm.address import host_port
from shoal.comm.secret import VARIABLE, find_secret
from shoal.comm.signed import derived
from shoal.errors import UserError
from shoal.launch import discover
from shoal.launch.environment import MARKS
from shoal.launch.identity import SINGLE

PATIENCE = 120.0
"""Seconds for which the other nodes look for the first one, which may begin later."""


@dataclass(frozen=True)
class Started:
    """A node that was started as the process `number`; the first one listens at `host` and `port`."""

    number: int
    host: str
    port: int

    @property
    def address(self) -> str:
        """host:port of the first node."""
        return host_port(self.host, self.port)

    def own_host(self) -> str:
        """Returns the address to which the first node's name leads, on that node. Raises UserError."""
        try:
            return str(socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise UserError(
                f"the name of the first node, {self.host}, leads to no address: {error}. Set MASTER_ADDR to one that "
                "all nodes reach"
            ) from error


def as_node(run_dir: Path, needs_first: bool, environ: MutableMapping[str, str] = os.environ) -> Started | None:
    """Returns what a launcher says of this process as a node; None where it says nothing or nothing is needed of it.

    run_dir: of the job, whose nodes get a secret of their own from that of their ranks' user.
    needs_first: the first node founds the job, and not any of them.

    What makes a process a rank is removed from `environ`, so that the ranks of this node do not take it for theirs.
    Raises UserError where the launcher has started several processes on this host, or serves its ranks' store itself.
    """
    found = discover(environ) if needs_first else SINGLE
    if found.evaluates:
        raise UserError("--nodes: TF_CONFIG makes this process the evaluator. Leave --nodes out there")
    if found.servers:
        raise UserError(
            "--nodes: the cluster of TF_CONFIG has a parameter server, whose workers come and go without it. Leave "
            "--nodes out, or ps out of the cluster"
        )
    if found.size > 1 and (found.local_size or 1) > 1:
        raise UserError(
            f"--nodes: {found.source} has started {found.local_size} processes on this host. A node is one of them, "
            "which starts its ranks itself: start one process on each host (Slurm: --ntasks-per-node=1)"
        )
    if found.size > 1 and not found.rank0_serves:
        raise UserError(
            f"--nodes: {found.source} has started this process as a rank, at an address of its own. Start shoal itself "
            "on each node, or give --coordinator"
        )
    for name in MARKS:
        environ.pop(name, None)
    if found.size == 1:
        return None
    environ[VARIABLE] = derived(find_secret(environ), "nodes", found.store_url, str(run_dir)).hex()
    place = urlsplit(found.store_url)
    assert place.hostname is not None and place.port is not None
    return Started(found.rank, place.hostname, place.port)
