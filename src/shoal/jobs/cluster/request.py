"""What a scheduler is to run: read from a job file, or from a file with Cloud-ML's field names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import UserError
from shoal.jobs.cluster import cloudml
from shoal.jobs.cluster.table import Cluster
from shoal.jobs.config import Job
from shoal.jobs.imports import imports
from shoal.jobs.read import parse_job
from shoal.plan import MOST_RANKS
from shoal.toml import read_toml

MOST_NAME = 40
"""Characters of a name at most: Kubernetes takes 63, of which its controllers need some."""


@dataclass(frozen=True)
class Request:
    """A job of which every host runs `ranks` ranks of the same program.

    file: the job file, for `shoal train`; None for a module.
    assignments: values that replace those of the file, "train.lr=1e-3".
    module: the name of a module and its arguments, for a program of the user's own.
    parameter_servers: processes of a module beside the ranks, in that role of TF_CONFIG.
    run_dir: the run directory as the job names it.
    fixed: its plan changes by step (run.at), so its hosts cannot change.
    directory: where the job's relative paths begin.
    """

    name: str
    cluster: Cluster
    ranks: int
    run_dir: Path
    directory: Path
    file: Path | None = None
    assignments: tuple[str, ...] = ()
    module: tuple[str, ...] = ()
    parameter_servers: int = 0
    fixed: bool = False

    @property
    def record(self) -> Path:
        """The run directory on this host, which keeps what is known of the job."""
        return self.directory / self.run_dir

    def rank(self, file: str | None = None) -> list[str]:
        """Returns the command of one rank. file: the path of the job file there; by default its path here."""
        if self.module:
            return ["python", "-m", *self.module]
        sets = [each for assignment in self.assignments for each in ("--set", assignment)]
        return ["shoal", "train", file or str(self.file), *sets]

    def host(self, file: str | None = None) -> list[str]:
        """Returns the command that starts all ranks of a single host."""
        if not self.module:
            return [*self.rank(file), "--nproc", str(self.ranks)]
        ranks = ["--nproc", str(self.ranks)]
        if self.parameter_servers:
            ranks = ["--roles", f"ps={self.parameter_servers},worker={self.ranks}"]
        return ["shoal", "run", *ranks, "-m", self.module[0], "--", *self.module[1:]]


def read_request(path: Path, assignments: Sequence[str] = ()) -> Request:
    """Returns what the file asks for: a job file of Shoal, or a TOML or JSON file with Cloud-ML's field names.

    Raises UserError for what is wrong in it, also where its plan does not fit the ranks of the cluster.
    """
    content = _read(path)
    if cloudml.is_cloudml(content):
        if assignments:
            raise UserError(f"--set {assignments[0]}: {path} has Cloud-ML's fields, and no values of a job to replace")
        return _module(cloudml.read_fields(content, str(path)))
    if path.suffix == ".json":
        raise UserError(f"{path} has no field of Cloud-ML's (job_name, module_name), and a job file of Shoal is TOML")
    job, origins = parse_job(content, assignments, where=str(path), default_dir=f"runs/{path.stem}")
    ranks, hosts = _ranks(job), job.cluster.hosts
    if ranks * hosts > MOST_RANKS:
        raise UserError(
            f"cluster.nodes = {hosts} with {ranks} ranks each (run.nproc or cluster.gpus) are {ranks * hosts} ranks, "
            f"and a job has at most {MOST_RANKS}: give fewer nodes, or fewer ranks of each"
        )
    with imports():
        from shoal.jobs.ranks import spread
    spread(job, origins, ranks * hosts)  # refuses a plan that does not fit, before the job waits for hosts
    given = (*assignments, *(() if "run.dir" in origins else (f"run.dir={json.dumps(job.run.dir)}",)))
    name, run_dir, fixed = name_of(path.stem), Path(job.run.dir), bool(job.run.at)
    return Request(name, job.cluster, ranks, run_dir, Path.cwd(), path.resolve(), given, fixed=fixed)


def name_of(text: str) -> str:
    """Returns a name that every scheduler takes: lower-case letters, digits and "-"."""
    found = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:MOST_NAME].strip("-")
    return found if found[:1].isalpha() else f"job-{found}".strip("-")


def _read(path: Path) -> Mapping[str, Any]:
    if path.suffix != ".json":
        return read_toml(path, "job file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no such job file: {path} (from {Path.cwd()})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the job file {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"the job file {path} is no JSON object")
    return content


def _ranks(job: Job) -> int:
    """Returns the ranks of a host: `run.nproc`, else one for each GPU, else the plan's share of a host."""
    return job.run.nproc or job.cluster.gpus or max(1, job.plan.size // job.cluster.hosts)


def _module(fields: cloudml.Fields) -> Request:
    cluster = Cluster(
        nodes=fields.worker_count,
        cpus=fields.cpu_limit,
        memory=fields.memory_limit,
        gpus=fields.gpu_limit,
        image=fields.docker_image,
        setup=[fields.prepare_command] if fields.prepare_command else None,
        finish=[fields.finish_command] if fields.finish_command else None,
    )
    return Request(
        name=name_of(fields.job_name),
        cluster=cluster,
        ranks=fields.gpu_limit or 1,
        run_dir=Path("runs") / name_of(fields.job_name),
        directory=Path.cwd(),
        module=(fields.module_name, *fields.job_args),
        parameter_servers=fields.ps_count or 0,
    )
