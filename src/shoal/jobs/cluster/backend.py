"""What a scheduler does for a submitted job, and the job's record in its run directory.

The run directory is the handle of a job: `submitted.json` there says who runs it, and everything else follows.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from shoal.errors import UserError, check_choice
from shoal.jobs.cluster.request import Request
from shoal.replace import replace_text
from shoal.report.events import Event

NAME = "submitted.json"
BACKENDS = ("local", "slurm", "ray")
GOES_ON = ("waits", "runs")


@dataclass(frozen=True)
class State:
    """The state of a job.

    word: "waits", "runs", "ended", "failed", "stopped", "lost" (nobody knows it any more), or "unknown" (nobody
        answers).
    detail: what the scheduler says beyond it.
    """

    word: str
    detail: str = ""

    @property
    def goes_on(self) -> bool:
        return self.word in GOES_ON


@dataclass(frozen=True)
class Submitted:
    """A submitted job. number: its name at the scheduler; time: Unix time; about: what the backend needs to find it."""

    backend: str
    number: str
    name: str
    run_dir: Path
    time: float
    about: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        """The file with the output, for backends that keep it in the run directory."""
        return self.run_dir / "logs" / self.about["log"]


class Backend(Protocol):
    """A scheduler. Methods raise UserError where it cannot be asked."""

    def submit(self, request: Request, file: Path | None) -> tuple[str, dict[str, str]]:
        """Submits a job, of which `file` is a copy of the job file; returns `Submitted.number` and `.about`."""

    def state(self, job: Submitted) -> State: ...

    def log(self, job: Submitted) -> str:
        """Returns the output so far."""

    def stop(self, job: Submitted) -> None:
        """Has the job end; ranks save a checkpoint first."""

    def events(self, job: Submitted) -> list[Event]:
        """Returns what the scheduler knows of the job's life."""


def backend(name: str) -> Backend:
    """Returns the backend of that name. Raises UserError for an unknown one."""
    check_choice(f"--on {name}: there is no such backend. Backends:", name, BACKENDS)
    return cast(Backend, import_module(f"shoal.jobs.cluster.{name}").Backend())


def submit(request: Request, on: str) -> Submitted:
    """Submits a job; the run directory keeps a copy of its file. Raises UserError where its job goes on."""
    chosen, record = backend(on), request.record
    before = find(record) if (record / NAME).exists() else None
    if before is not None and (state := backend(before.backend).state(before)).goes_on:
        raise UserError(
            f"{record} has the job {before.number} of {before.backend}, which {state.word}: stop it by "
            f"`shoal jobs stop {shlex.quote(str(record))}`, or give another run.dir"
        )
    new = not record.exists()
    try:
        (record / "logs").mkdir(parents=True, exist_ok=True)
        file = None if request.file is None else _copy(request.file, record / "job.toml")
        began = float(int(time.time()))  # not after what a scheduler says, which counts whole seconds
        number, about = chosen.submit(request, file)
        job = Submitted(on, number, request.name, record, began, about)
        replace_text(record / NAME, json.dumps({**asdict(job), "run_dir": str(record)}))
    except UserError:
        if new:  # a refusal leaves nothing behind
            shutil.rmtree(record)
        raise
    except OSError as error:
        raise UserError(f"the run directory {record} cannot be written: {error}. Choose another run.dir") from error
    return job


def _copy(file: Path, to: Path) -> Path:
    """Copies a job file, so that it can change while the job waits."""
    if file != to:
        replace_text(to, file.read_text(encoding="utf-8"))
    return to


def find(run_dir: Path) -> Submitted:
    """Returns the job of a run directory. Raises UserError where none was submitted there."""
    path = run_dir / NAME
    if not run_dir.is_dir():
        raise UserError(f"no such directory: {run_dir} (from {Path.cwd()}). Give the run directory of a job")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Submitted(**{**content, "run_dir": run_dir})
    except FileNotFoundError:
        raise UserError(
            f"{run_dir} has no {NAME}: no job was submitted there. `shoal jobs submit JOB` submits one; a run that was "
            f"started by hand is seen by `shoal top {shlex.quote(str(run_dir))}`"
        ) from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}. Delete it, and submit the job again") from error


def jobs_in(directories: list[Path]) -> list[Submitted]:
    """Returns the jobs whose run directories these are, or which are directly inside, the oldest first."""
    found = []
    for directory in directories:
        paths = [directory / NAME] if (directory / NAME).exists() else sorted(directory.glob(f"*/{NAME}"))
        found += [find(path.parent) for path in paths]
    return sorted(found, key=lambda job: job.time)
