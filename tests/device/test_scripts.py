"""The GPU's benchmarks on the simulated accelerator, from their first line to the record."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu.all import JOBS
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
