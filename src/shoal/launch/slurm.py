"""Ranks that are tasks of a step of Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shoal.errors import UserError
from shoal.launch.identity import Identity, Names, meeting, number, numbers, store_at

NAMES = Names("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_HERE")


def is_task(environ: Mapping[str, str]) -> bool:
    """Returns whether `srun` started this process. The script of sbatch has SLURM_PROCID too, but is no step."""
    return NAMES.rank in environ and any(name in environ for name in ("SLURM_STEP_ID", "SLURM_STEPID"))


def identity(environ: Mapping[str, str]) -> Identity | None:
    """Returns the Identity of a task of `srun`; None for another process."""
    if not is_task(environ):
        return None
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_NTASKS_PER_NODE", ""))
    here = _tasks_on_node(tasks, environ.get("SLURM_NODEID", "0"))
    step = {"SLURM_NTASKS": environ.get("SLURM_STEP_NUM_TASKS", ""), NAMES.local_size: here}
    found = numbers(NAMES, {**environ, **{name: value for name, value in step.items() if value}})
    nodelist = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    host = environ.get("MASTER_ADDR") or ("127.0.0.1" if found.local_size == found.size else first_host(nodelist))
    job = number(environ, "SLURM_JOB_ID") or 0
    step_id = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", "0"))
    # Linux takes ephemeral ports from above 10000-29999; the steps of a job get ports of their own
    port = 10000 + (16 * job + (int(step_id) if step_id.isdecimal() else 0)) % 20000
    return meeting(found, store_at(environ, host, port), rank0_serves=True)


def first_host(nodelist: str) -> str:
    """Returns the first host of a Slurm node list: "node[003-005,9],x1" -> "node003". Raises UserError for others."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist)
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group()) if first else ""
    if not re.fullmatch(r"[\w.-]+", host):
        raise UserError(
            f"SLURM_STEP_NODELIST={nodelist!r} is no list of hosts like node[1-4]. Set MASTER_ADDR to the first host."
        )
    return host


def _tasks_on_node(tasks_per_node: str, node: str) -> str:
    """Returns the number of tasks on a node of Slurm's compressed list: ("4(x2),1", "2") -> "1"; empty if unknown."""
    counts = [
        m[1]
        for part in tasks_per_node.split(",")
        if (m := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part))
        for _ in range(int(m[2] or 1))
    ]
    if len(counts) == 1 and "(" not in tasks_per_node:
        return counts[0]
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else ""
