"""`shoal plan --measure FILE`: measures this machine anew, keeps that for later plans, and writes a cluster file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from shoal.comm import Reaches
from shoal.device import CPU, WITHOUT_ACCELERATORS, accelerators, any_device, is_accelerator
from shoal.errors import LaunchError, UserError
from shoal.jobs.ranks import default_ranks
from shoal.launch import launch
from shoal.launch.scratch import scratch
from shoal.planner.cluster_file import write_cluster
from shoal.planner.measure import here
from shoal.replace import place_of
from shoal.toml import read_toml


def measure_machine(path: Path, nproc: int | None, as_json: bool) -> None:
    """Measures with so many ranks, which are started for that, and writes `path`. Raises LaunchError where they do not
    come together."""
    ranks = default_ranks() if nproc is None else nproc
    if ranks < 1:
        raise UserError(f"--nproc {ranks}: give at least 1 rank")
    if path.suffix != ".toml":
        raise UserError(f"--measure {path}: cluster files are called *.toml, so that --on knows them")
    place = place_of(path, "--measure", "here.toml", _is_cluster)
    device = any_device() if len(accelerators()) >= ranks else CPU
    dtype = torch.bfloat16 if is_accelerator(device) else torch.float32
    groups = _groups(ranks) if ranks > 1 else None
    cluster = here(ranks, ranks, dtype, device, groups, fresh=True)
    write_cluster(place, cluster)
    if as_json:
        print(json.dumps({"file": str(path), "said": list(cluster.said)}, indent=1))
        return
    for each in (*cluster.said, f"written to {path}, for shoal plan JOB --on {path}"):
        Console(highlight=False, soft_wrap=True).print(escape(each))


def _is_cluster(path: Path) -> bool:
    """Whether a file describes a cluster, or nothing."""
    content = read_toml(path, "cluster file")
    return not content or "hosts" in content


def _groups(ranks: int) -> Reaches:
    env = {} if len(accelerators()) >= ranks else WITHOUT_ACCELERATORS
    with scratch("measure") as folder:
        result = folder / "result.json"
        code = launch(["-m", "shoal.cli.group_ranks", str(result)], ranks, env=env, run_dir=folder)
        if code or not result.exists():
            raise LaunchError(f"the {ranks} ranks that measure ended with exit code {code}: see above")
        return Reaches.from_wire(json.loads(result.read_text()))
