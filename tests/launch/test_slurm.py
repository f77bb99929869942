"""A real Slurm with two nodes on this host: its ranks, and jobs that it takes the nodes from and starts again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.report.metrics import read_metrics
from tests.launch.conftest import LONG, RANKS, TRAIN, losses
from tests.launch.slurm import Slurm, cluster

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def test_srun_over_two_nodes(slurm: Slurm, place: Path, run, expected) -> None:
    run("srun", "-N2", f"-n{RANKS}", *TRAIN, "--set", "run.dir=srun", **slurm.variables)
    assert losses(place / "srun") == expected


def test_srun_in_the_script_of_a_job_which_is_itself_no_rank(slurm: Slurm, place: Path, run) -> None:
    look = "from shoal.launch import discover; found = discover(); print(found.rank, found.size, found.source)"
    python = TRAIN[0]
    script = place / "look.sh"
    script.write_text(f"#!/bin/sh\n{python} -c '{look}'\nsrun -l {python} -c '{look}'\n")
    job = slurm.submit(script, "--nodes=2", "--ntasks=3", f"--chdir={place}", "--output=look.out")
    slurm.wait(job, "COMPLETED")
    alone, *tasks = (place / "look.out").read_text().splitlines()
    assert alone == "0 1 single process"
    assert sorted(tasks) == [f"{rank}: {rank} 3 Slurm" for rank in range(3)]


@pytest.mark.parametrize("how", ["requeued", "preempted", "signalled"])
def test_a_job_that_lost_its_nodes_goes_on_by_itself(how: str, slurm: Slurm, place: Path, uninterrupted) -> None:
    """The lines of the script are those of docs/launch.md. What the second attempt trains is what the first would."""
    script, run_dir = place / f"{how}.sh", place / how
    script.write_text(
        "#!/bin/bash\n"
        "#SBATCH --nodes=2 --ntasks=3 --requeue --open-mode=append\n"
        f"srun {' '.join([*TRAIN, *LONG])} --set run.dir={how}\n"
        "code=$?\n"
        "[ $code = 143 ] && scontrol requeue $SLURM_JOB_ID\n"
        "exit $code\n"
    )
    job = slurm.submit(script, f"--chdir={place}", f"--output={how}.out", "--export=ALL,OMP_NUM_THREADS=1")
    wait_for_step(run_dir, 20)
    if how == "requeued":
        slurm.ask("scontrol", "requeue", job)
    elif how == "signalled":  # as --signal=TERM@120 does before the time limit
        slurm.ask("scancel", "--signal=TERM", job)
    else:
        (place / "urgent.sh").write_text("#!/bin/sh\n")
        slurm.wait(
            slurm.submit(place / "urgent.sh", "--partition=urgent", "--nodes=2", "--output=/dev/null"), "COMPLETED"
        )
    slurm.wait(job, "COMPLETED")
    records = read_metrics(run_dir / "metrics.jsonl")
    assert "stopped by SIGTERM" in (run_dir / "metrics.jsonl").read_text()
    assert records.attempts == 2 and len(records.resumed) == 1 and 20 <= records.resumed[0] < 600
    assert f"resumed from step {records.resumed[0]} (3 ranks then, 3 now)" in (place / f"{how}.out").read_text()
    assert losses(run_dir) == uninterrupted


def wait_for_step(run_dir: Path, step: int, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    path = run_dir / "metrics.jsonl"
    while not path.exists() or len(read_metrics(path).steps) < step:
        assert time.monotonic() < deadline, f"no step {step}"
        time.sleep(0.05)
