"""The global model as a checkpoint of the run, for `shoal eval`, `generate` and `ckpt export`."""

from __future__ import annotations

import time
from pathlib import Path

from shoal.checkpoint.directory import step_path
from shoal.checkpoint.whole import put_whole
from shoal.comm import World
from shoal.errors import UserError
from shoal.federated.settings import STATE
from shoal.federated.simulation import Federation
from shoal.jobs.assemble import make_engine
from shoal.jobs.choose import Settled
from shoal.jobs.names import DIRECTORY
from shoal.report.metrics import CheckpointRecord


def refuse_other_runs(run_dir: Path, resume: str) -> None:
    """Raises UserError where a directory holds a run that is not federated, or any run while `resume` is "never"."""
    if (run_dir / "metrics.jsonl").exists() and (resume == "never" or not (run_dir / STATE).exists()):
        raise UserError(
            f"{run_dir} already holds {'rounds' if (run_dir / STATE).exists() else 'a run of `shoal train`'}: give "
            "another run.dir (or delete that directory)"
        )


def save_model(settled: Settled, simulation: Federation, world: World) -> CheckpointRecord:
    """Writes the global model as the checkpoint of the round. Raises CheckpointError."""
    began, run_dir, number = time.perf_counter(), Path(settled.job.run.dir), simulation.number
    engine = make_engine(settled.job, settled.model, simulation.settings.rounds, world)
    try:
        put_whole(engine.module, engine.parts.chunks, simulation.state_dict(), strict=False)
        engine.step_index = number
        engine.save(run_dir / DIRECTORY, keep=settled.job.run.keep)
    finally:
        engine.close()
    path = step_path(run_dir / DIRECTORY, number).relative_to(run_dir)
    return CheckpointRecord(step=number, path=str(path), seconds=time.perf_counter() - began)
