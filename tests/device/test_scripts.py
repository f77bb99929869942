"""The GPU's benchmarks on the simulated accelerator, from their first line to the record."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu.all import JOBS
from shoal.report.metrics import read_metrics
from tests.device.simulator import why_not
from tests.device.simulator.command import simulate_script

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


IN_THE_MATRIX = ("exchange", "engine", "offload", "pipeline", "server")


@pytest.mark.parametrize("script", ["train", *(pytest.param(name, marks=pytest.mark.matrix) for name in IN_THE_MATRIX)])
def test_what_a_script_checks_holds_on_two_devices(script, tmp_path):
    options = ["--checks", "--device", "cuda", "--results", str(tmp_path)]
    options += ["--no-compile"] if script == "train" else []
    ended = simulate_script(["-m", f"benchmarks.gpu.{script}", *options], devices=2)
    assert ended.code == 0, ended.output
    assert ended.defects == []
    record = json.loads((tmp_path / f"gpu_{script}.json").read_text())
    assert record["hardware"] == "simulated" and all(each["seen"] <= each["allowed"] for each in record["checks"])


JOB = """
model = {name = "mlp", sizes = [2, 16, 3]}
data = {source = "spirals"}
train = {steps = 6, global_batch = 63, lr = 1e-2, clip = 0.5}
server = {policy = "sync", codec = "bf16"}
run = {trackers = [], eval_every = 3}
"""


@pytest.mark.matrix
def test_servers_and_workers_of_a_job_have_a_device_each(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    seen = []
    for name, devices in (("devices", 4), ("one", 1)):
        run_dir = tmp_path / name
        roles = ["--roles", "ps=2,worker=2", "--set", f"run.dir={run_dir}"]
        ended = simulate_script(["-m", "shoal.cli", "train", str(tmp_path / "job.toml"), *roles], devices=devices)
        assert ended.code == 0, ended.output
        assert ended.defects == []
        seen.append([step.loss for step in read_metrics(run_dir / "metrics.jsonl").steps])
        said = [(run_dir / f"logs/worker{number}.log").read_text() for number in range(2)]
        way = "from device to device" if devices == 4 else "by the host's memory"
        assert all(f"weights and gradients go {way}" in each for each in said), said
    assert len(seen[0]) == 6 and seen[0] == pytest.approx(seen[1], rel=1e-4)


@pytest.mark.matrix
@pytest.mark.alone
def test_everything_runs_through_in_tiny_form(tmp_path):
    options = ["--device", "cuda", "--tiny", "--minutes", "40", "--results", str(tmp_path)]
    ended = simulate_script(["-m", "benchmarks.gpu.all", *options], devices=2, timeout=2400)
    assert ended.code == 0, ended.output[-3000:]
    # FSDP gives gradients back to the stream that reduced them, which waits for the optimizer's when it reduces next.
    assert [defect for defect in ended.defects if "gpu/peers.py" not in defect.first] == []
    rows = json.loads((tmp_path / "gpu_all.json").read_text())["jobs"]
    assert [row["exit"] for row in rows] == ["needs compute-sanitizer" if job.sanitized else 0 for job in JOBS]
    assert {path.stem for path in tmp_path.glob("*.json")} == {"gpu_all", *(f"gpu_{job.script}" for job in JOBS)}
