"""Trackers that show a run while it goes on. They get copies: `metrics.jsonl` stays the source of truth."""

from __future__ import annotations

import dataclasses
import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from types import ModuleType
from typing import Any, Protocol

from shoal.errors import UserError, check_names

from .metrics import EvalRecord, Record, RunRecord, SampleRecord, StepRecord

BEHIND = 10_000
"""Number of records that may wait for a tracker whose server does not answer."""
CLOSING = 30.0
"""Seconds that the end of a run waits for its trackers at most."""


class Tracker(Protocol):
    """A receiver of the records of a run, the RunRecord first. `Trackers` switches it off if it raises anything."""

    def start(self, run: RunRecord) -> None: ...

    def log(self, record: Record) -> None: ...

    def close(self) -> None: ...


def scalars(record: Record) -> dict[str, float]:
    """Returns the points that a record adds to curves, by name of the curve."""
    if isinstance(record, EvalRecord):
        return {"validation/loss": record.loss}
    if not isinstance(record, StepRecord):
        return {}
    points = {
        "train/loss": record.loss,
        "train/lr": record.lr,
        "train/grad_norm": record.grad_norm,
        "speed/tokens_per_second": record.tokens_per_second,
        "speed/mfu": record.mfu,
        "memory/bytes": float(record.memory_bytes),
        "experts/imbalance": record.imbalance,
        "experts/dropped": record.dropped,
    }
    points |= {f"norms/{layer}": norm for layer, norm in (record.norms or {}).items()}
    return {name: value for name, value in points.items() if value is not None}


class TensorBoard:
    """Writes event files to `directory`, for `tensorboard --logdir`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None
        self._run: RunRecord | None = None

    def start(self, run: RunRecord) -> None:
        _import("torch.utils.tensorboard", "tensorboard")
        self._run = run

    def log(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer_from(record).add_scalar(name, value, record.step)  # type: ignore[union-attr]
        if isinstance(record, SampleRecord):
            # TensorBoard reads Markdown: four blanks make a block of code.
            text = "\n".join(f"    {line}" for line in (record.prompt + record.text).splitlines())
            self._writer_from(record).add_text("samples", text, record.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _writer_from(self, record: Any) -> Any:
        """Returns the writer, opened at the first record with a step, which hides later points of a killed attempt."""
        if self._writer is None:
            assert self._run is not None, "start() comes first"
            module = _import("torch.utils.tensorboard", "tensorboard")
            self._writer = module.SummaryWriter(log_dir=str(self._directory), purge_step=record.step)
            self._writer.add_text("configuration", _as_markdown(self._run), record.step)
        return self._writer


class WeightsAndBiases:
    """Logs to one W&B run named after the run directory; `WANDB_MODE=offline` and its other variables work as usual."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._run: Any = None

    def start(self, run: RunRecord) -> None:
        wandb = _import("wandb", "wandb")
        name = self._directory.name
        project = os.environ.get("WANDB_PROJECT", "shoal")
        self._run = wandb.init(
            dir=str(self._directory), project=project, name=name, id=name, resume="allow", config=_flat(run)
        )

    def log(self, record: Record) -> None:
        if points := scalars(record):
            self._run.log(points, step=record.step)  # type: ignore[union-attr]

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class MLflow:
    """Logs to one MLflow run named after the run directory, at the tracking URI of MLflow's own variables."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mlflow: Any = None

    def start(self, run: RunRecord) -> None:
        self._mlflow = _import("mlflow", "mlflow")
        self._mlflow.start_run(run_name=self._directory.name)
        self._mlflow.log_params(_flat(run))

    def log(self, record: Record) -> None:
        if points := scalars(record):
            # Synchronous calls would block while a server that does not answer is retried.
            self._mlflow.log_metrics(points, step=record.step, synchronous=False)  # type: ignore[union-attr]

    def close(self) -> None:
        if self._mlflow is not None:
            self._mlflow.end_run()


TRACKERS: Mapping[str, Callable[[Path], Tracker]] = {
    "tensorboard": lambda run_dir: TensorBoard(run_dir / "events"),
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def check_trackers(names: Sequence[str]) -> None:
    """Raises UserError for an unknown name."""
    check_names("run.trackers: unknown tracker", names, TRACKERS, "Known ones")


def make_trackers(names: Sequence[str], run_dir: Path) -> dict[str, Tracker]:
    """Makes the trackers of those names, without starting them."""
    return {name: TRACKERS[name](run_dir) for name in names}


class Trackers:
    """Passes every record to each tracker, which runs in a thread of its own, so that none delays or ends a training.

    A tracker that raises, whose package is missing, or that is more than BEHIND records late is switched off, and
    reported once through `warn`, in the thread that calls these methods.
    """

    def __init__(self, trackers: Mapping[str, Tracker], warn: Callable[[str], None]) -> None:
        self._working = [_Worker(name, tracker) for name, tracker in trackers.items()]
        self._warn = warn

    def start(self, run: RunRecord) -> None:
        for each in self._working:
            each.put("start", run)

    def log(self, record: Record) -> None:
        for each in self._working:
            each.put("log", record)
        self._tell()

    def close(self) -> None:
        """Waits for all trackers to finish, at most CLOSING seconds."""
        until = time.monotonic() + CLOSING
        for each in self._working:
            each.put("close")
        for each in self._working:
            each.end(until)
        self._tell()

    def _tell(self) -> None:
        failed = [each for each in self._working if each.failure is not None]
        # Removed before the warnings: `warn` may log a record, which calls this method again.
        self._working = [each for each in self._working if each.failure is None]
        for each in failed:
            self._warn(f"tracker {each.name} {each.failure}")


class _Worker:
    """A thread that calls a tracker until it raises. `failure`: why it was switched off, or None."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self.failure: str | None = None
        self._tracker = tracker
        self._calls: Queue[tuple[str, tuple[Any, ...]]] = Queue(BEHIND)
        self._thread = Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, action: str, *values: Any) -> None:
        try:
            self._calls.put_nowait((action, values))
        except Full:
            self.failure = f"does not keep up ({BEHIND} records late) and is switched off; training goes on"

    def end(self, until: float) -> None:
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive() and self.failure is None:
            waited = f"has not answered for {CLOSING:.0f} s at the end of the run"
            self.failure = f"{waited} and is left behind: its last records may be missing"

    def _run(self) -> None:
        action = ""
        try:
            while action != "close" and self.failure is None:
                action, values = self._calls.get()
                getattr(self._tracker, action)(*values)
        except BaseException as error:  # in a thread nobody else would see it
            said = f"failed in {action}() ({type(error).__name__}: {error})"
            self.failure = f"{error if isinstance(error, UserError) else said} and is switched off; training goes on"


def _import(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = "pip install tensorboard" if package == "tensorboard" else "pip install 'shoal[trackers]'"
        raise UserError(f'needs the package "{package}", which cannot be imported ({error}; {remedy})') from error


def _flat(run: RunRecord) -> dict[str, Any]:
    about = {key: value for key, value in dataclasses.asdict(run).items() if key not in ("config", "versions")}
    versions = {f"versions/{name}": version for name, version in run.versions.items()}
    return about | versions | {key: entry["value"] for key, entry in run.config.items()}


def _as_markdown(run: RunRecord) -> str:
    return "\n".join(["| key | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in _flat(run).items())])
