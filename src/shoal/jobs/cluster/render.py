"""One job file in the form of each scheduler."""

from __future__ import annotations

import json
from collections.abc import Callable

from shoal.errors import check_choice
from shoal.jobs.cluster.kubernetes import KINDS, to_yaml
from shoal.jobs.cluster.pods import Document
from shoal.jobs.cluster.ray_job import specification
from shoal.jobs.cluster.request import Request
from shoal.jobs.cluster.script import local_script
from shoal.jobs.cluster.slurm_script import sbatch_script


def _ray(request: Request) -> str:
    return json.dumps(specification(request), indent=2) + "\n"


def _yaml(make: Callable[[Request], list[Document]]) -> Callable[[Request], str]:
    return lambda request: to_yaml(make(request))


TARGETS: dict[str, Callable[[Request], str]] = {"local": local_script, "slurm": sbatch_script, "ray": _ray}
TARGETS |= {name: _yaml(make) for name, make in KINDS.items()}


def render(request: Request, target: str) -> str:
    """Returns the job as a script, JSON or YAML. Raises UserError for an unknown target, and for what it cannot do."""
    check_choice(f"--for {target}: there is no such target. Targets:", target, TARGETS)
    return TARGETS[target](request)
