"""Several servers of a job: who has which parameters, and from where they go on."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from shoal.checkpoint.directory import completed
from shoal.checkpoint.manifest import read_manifest
from shoal.engine import Engine
from shoal.errors import CheckpointError, UserError
from shoal.jobs.config import Job
from shoal.jobs.names import DIRECTORY
from shoal.jobs.resume import Restored
from shoal.jobs.served.tables import Tables
from shoal.launch.identity import Identity
from shoal.models import ModelSpec
from shoal.server.held import Held
from shoal.server.journal import has_pushes
from shoal.server.keeping import Keeping
from shoal.server.messages import Begin
from shoal.server.served_table import ServedTable
from shoal.server.shares import balanced
from shoal.server.spread import Followers, Spread

JOURNALS = "server"
"""The folder of the journals in a run directory, and of what each of several servers keeps."""
TIMEOUT = 300.0


def share_of(tables: Tables, index: int, count: int) -> ModelSpec:
    """Returns the model of server `index` of `count`: its parameters but the `tables`, divided by bytes; the first one
    also has the buffers. Raises UserError for more servers than parameters."""
    model, sizes = tables.left_out(), tables.others
    if count == 1:
        return model
    if count > len(sizes):
        raise UserError(f"ps={count}: the model has {len(sizes)} parameters to divide among servers. Give ps=1")
    names = balanced(sizes, count)[index]

    def held() -> nn.Module:
        return Held(model.factory(), names, buffers=index == 0)

    return replace(model, factory=held)


def part_path(run_dir: Path, index: int) -> Path:
    """Returns where server `index` keeps its part of checkpoints."""
    return run_dir / JOURNALS / str(index)


def timeout_of(job: Job) -> float:
    """Returns for how many seconds workers and servers try to reach a server."""
    return TIMEOUT if job.server.timeout is None else job.server.timeout


def line_of(run_dir: Path, count: int) -> str:
    """Returns the line (see messages.Begin) of the newest checkpoint of a run; "" where it has none of `count`
    servers."""
    try:
        found = completed(run_dir / DIRECTORY)
        state = read_manifest(found[0][1]).extra["user"]["server"] if found else {}
        return str(state["line"]) if state.get("servers") == count else ""
    except (CheckpointError, KeyError, TypeError):
        return ""


@dataclass(frozen=True)
class Line:
    """What several servers go on with together (see messages.Begin).

    is_new: others, or another number of servers, have made the checkpoint.
    """

    begin: Begin
    is_new: bool

    @classmethod
    def found(cls, job: Job, restored: Restored, checkpoint: Path | None, servers: int) -> Line:
        """Returns from where the servers of a job go on. Raises UserError where other servers have gradients that no
        checkpoint has."""
        state = restored.user.get("server")
        then = 0 if state is None else int(state.get("servers", 1))
        journals = Keeping(None, 1, False, 0.0, Path(job.run.dir) / JOURNALS)
        pushed = state is not None and has_pushes(journals.journal(state["version"], state["journal"]))
        if pushed and then != servers:
            raise UserError(
                f"the run was cut short with ps={then}, and the journals have gradients that no checkpoint has: go on "
                f"with ps={then}; a run that has ended, also by SIGTERM, goes on with any number"
            )
        same = then == servers
        name = str(state["line"]) if same and state is not None and servers > 1 else secrets.token_hex(8)
        source = "" if checkpoint is None else str(checkpoint)
        return cls(Begin(name, restored.saved, source, not pushed), state is not None and not same)


def spread_weights(
    job: Job,
    engine: Engine,
    place: Identity,
    line: Line,
    about: Callable[[], Mapping[str, Any]],
    tables: Sequence[ServedTable],
) -> Spread:
    """Returns the weights of a job's first server, once all others have what they go on with."""
    followers = Followers(place.servers[1:], place.size, timeout_of(job), line.begin)
    parts = [part_path(Path(job.run.dir), index) for index in range(len(place.servers))]
    clip, codec = job.train.clip or None, job.server.codec or "fp32"
    return Spread(engine, codec, clip, job.run.keep, about, followers, parts, tables)
