"""A follower of a job's first parameter server: has a share of the parameters, and does what that one says."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from shoal.comm import World
from shoal.errors import LaunchError
from shoal.jobs.assemble import make_engine
from shoal.jobs.choose import Sizes, settle
from shoal.jobs.config import Job, Origins
from shoal.jobs.served.devices import device_of_server
from shoal.jobs.served.settings import check_served
from shoal.jobs.served.several import line_of, part_path, share_of, timeout_of
from shoal.jobs.served.tables import tables_of
from shoal.launch.identity import Identity
from shoal.launch.local import signals
from shoal.server import ParameterServer
from shoal.server.follower import Follower
from shoal.server.shares import Share
from shoal.server.weights import Weights

_LOOK_SECONDS = 0.05
_FINISH_SECONDS = 60.0  # after a signal, which the first server may have got, too


def follow(job: Job, origins: Origins, place: Identity) -> int:
    """Serves as parameter server `place.serves` of several, from 1 on, until the first one has ended; returns the
    number of the signal that ended it, 0 for none. Raises LaunchError where the first one stays away."""
    check_served(job, place.size)
    assert place.serves
    settled, run_dir = settle(job, origins, Sizes(1, 1)), Path(job.run.dir)
    tables, share = tables_of(settled), Share(place.serves, len(place.servers))
    model, device = share_of(tables, share.index, share.count), device_of_server(job, place)
    engine = make_engine(settled.job, model, settled.total, World.single(device))
    weights = Weights(engine, job.server.codec or "fp32", tables=tables.served(share, device))
    follower = Follower(
        weights, part_path(run_dir, place.serves), bool(job.server.durable), line_of(run_dir, len(place.servers))
    )
    with signals() as received, ParameterServer.of(follower, place.servers[place.serves], None, say=_say) as server:
        seen, until = time.monotonic(), float("inf")
        while not follower.finished.wait(_LOOK_SECONDS):
            now = time.monotonic()
            if follower.broken is not None:
                raise follower.broken
            if received and until == float("inf"):
                until = now + _FINISH_SECONDS
            seen = now if place.size in server.clients() else seen  # by which rank the first server has come
            if now > until:
                break
            if now - seen > timeout_of(job):
                raise LaunchError(f"the first parameter server, at {place.servers[0]}, has not come back")
    return received[0] if received else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
