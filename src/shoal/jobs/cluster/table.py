"""`[cluster]`: what a scheduler is asked for. Nothing here imports torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from shoal.errors import UserError
from shoal.plan import MOST_RANKS, MOST_RANKS_OF_A_HOST, nbytes

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LEAST_MEMORY = 2**20
_OWN = re.compile(
    "(SHOAL_|LOCAL_|PMI_)?RANK|(LOCAL_)?WORLD_SIZE|SHOAL_(SIZE|LOCAL_RANK|LOCAL_SIZE|STORE)|PMI_SIZE"
    "|JOB_COMPLETION_INDEX|SLURM_PROCID|PET_(NNODES|NODE_RANK)|(OMPI|MV2)_COMM_WORLD_.*"
)
"""Variables by which a rank knows itself; a test has those of launch.environment."""


@dataclass(frozen=True)
class Cluster:
    """The table of that name. Each of `nodes` hosts has `run.nproc` ranks (by default as many as it has GPUs).

    least: the fewest hosts with which a job on Ray goes on where others are lost (default: `nodes`).
    cpus, memory, gpus: of a host; memory as bytes or a text such as "64GiB".
    time: the longest time, such as "90m", "12h", "2d" or Slurm's "1-12:00:00".
    queue: Slurm's partition, or Kueue's queue.
    image, volumes, secret: of pods: their image, persistent volume claims with the paths where they are mounted, and
        the Secret with the ranks' secret as its key `secret` (default: the job's name).
    env: environment variables; no place for passwords, since they are written into the rendered document.
    setup, finish: shell commands before training, and after training that succeeded.
    options: further options of sbatch, such as "--account=lab".
    """

    nodes: int | None = None
    least: int | None = None
    cpus: float | None = None
    memory: str | int | None = None
    gpus: int | None = None
    time: str | int | None = None
    queue: str | None = None
    image: str | None = None
    volumes: dict[str, str] | None = None
    secret: str | None = None
    env: dict[str, str] | None = None
    setup: list[str] | None = None
    finish: list[str] | None = None
    options: list[str] | None = None

    def __post_init__(self) -> None:
        for key, most in (("nodes", MOST_RANKS), ("gpus", MOST_RANKS_OF_A_HOST)):
            value = getattr(self, key)
            if value is not None and not 1 <= value <= most:
                raise UserError(f"cluster.{key} = {value}: give at least 1 and at most {most}, or leave it out")
        if self.least is not None and not 1 <= self.least <= self.hosts:
            raise UserError(f"cluster.least = {self.least}: give a number from 1 to cluster.nodes = {self.hosts}")
        if self.cpus is not None and not self.cpus > 0:
            raise UserError(f"cluster.cpus = {self.cpus}: give a number above 0")
        if self.memory_bytes is not None and self.memory_bytes < LEAST_MEMORY:
            raise UserError(f'cluster.memory = {self.memory!r}: give at least "1MiB"')
        for key in ("env", "volumes"):
            for name, value in (getattr(self, key) or {}).items():
                if not isinstance(value, str):
                    raise UserError(f'cluster.{key}.{name} = {value!r}: give a text, "{value}"')
        for name in self.env or {}:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise UserError(f"cluster.env: {name!r} is no name of an environment variable")
            if _OWN.fullmatch(name):
                raise UserError(
                    f"cluster.env.{name}: by this variable a rank knows itself, and what starts the ranks sets it: "
                    "leave it out"
                )
            if name == "SHOAL_SECRET":
                raise UserError(
                    "cluster.env.SHOAL_SECRET: it would be written into the rendered document. Leave it out: Slurm and "
                    "Ray make one for each job, and Kubernetes takes that of cluster.secret"
                )
        for claim, path in (self.volumes or {}).items():
            if not path.startswith("/"):
                raise UserError(f'cluster.volumes.{claim} = {path!r}: give the path where it is mounted, e.g. "/data"')
        for option in self.options or []:
            if not option.startswith("-") or "\n" in option:
                raise UserError(f'cluster.options: {option!r} is no option of sbatch, such as "--account=lab"')
        _ = self.seconds

    @property
    def hosts(self) -> int:
        return self.nodes or 1

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else nbytes(self.memory, "cluster.memory")

    @property
    def seconds(self) -> int | None:
        """The longest time in seconds; None without a limit. Raises UserError for a text that is no time."""
        if self.time is None:
            return None
        text = str(self.time).strip()
        if short := re.fullmatch(r"(\d{1,12}(?:\.\d+)?)([smhd]?)", text):
            found = math.ceil(float(short[1]) * _UNITS[short[2] or "s"])
        elif slurm := re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9}):(\d\d):(\d\d)", text):
            days, hours, minutes, seconds = (int(each or 0) for each in slurm.groups())
            found = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        else:
            found = 0
        if not found:
            raise UserError(f'cluster.time = {self.time!r:.100}: give seconds, "90m", "12h", "2d" or "1-12:00:00"')
        return found
