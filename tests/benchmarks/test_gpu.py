"""The road of the GPU's benchmarks, on the CPU."""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import exchange, offload, peers, pipeline, planner, races, rates, records, train
from benchmarks.gpu.all import JOBS, Job, run_all
from shoal.exchange.named import ALGORITHMS
from shoal.jobs.read import load_job
from shoal.models import GPTConfig
from shoal.planner import Machine

TINY = GPTConfig(61, 16, 3, 32, 4)


def given(directory=None, **more):
    return argparse.Namespace(
        **{
            "device": "cpu",
            "results": directory,
            "checks": False,
            "times": False,
            "minutes": 1.0,
            "tiny": False,
            **more,
        }
    )


def test_a_check_says_whether_it_holds(capsys):
    assert records.check("so much", 2.0, 3.0)["seen"] == 2.0
    assert capsys.readouterr().out.startswith("ok   so much: 2")
    bad = records.check("so much", 4.0, 3.0)
    assert capsys.readouterr().out.startswith("FAIL so much: 4")
    with pytest.raises(SystemExit), records.Record("nothing", given()) as record:
        record.check([bad])


def test_a_record_keeps_what_was_seen_before_a_script_ended(tmp_path):
    with pytest.raises(KeyError), records.Record("some", given(tmp_path, steps=3)) as record:
        record.check([records.check("first", 1.0, 2.0)])
        record.keep(table=[1, 2])
        raise KeyError
    with records.Record("some", given(tmp_path, rounds=4)) as record:
        record.check([records.check("second", 1.0, 2.0), records.check("first", 0.5, 2.0)])
    found = json.loads((tmp_path / "some.json").read_text())
    assert [(each["check"], each["seen"]) for each in found["checks"]] == [("second", 1.0), ("first", 0.5)]
    assert found["table"] == [1, 2] and found["torch"] == torch.__version__
    assert found["arguments"] == {"device": "cpu", "steps": 3, "minutes": 1.0, "tiny": False, "rounds": 4}


def test_two_jobs_of_one_script_keep_the_tables_of_both(tmp_path):
    for preset in ("124m", "1.3b"):
        with records.Record("some", given(tmp_path)) as record:
            record.keep(tables={preset: [preset]}, peak=preset)
    found = json.loads((tmp_path / "some.json").read_text())
    assert found["tables"] == {"124m": ["124m"], "1.3b": ["1.3b"]} and found["peak"] == "1.3b"


@pytest.mark.parametrize(("only", "seen"), [({}, ["a", "b"]), ({"checks": True}, ["a"]), ({"times": True}, ["b"])])
def test_a_script_does_what_it_is_asked_for(tmp_path, only, seen):
    done = []

    def checks(arguments):
        done.append("a")
        yield records.check("that", 0.0, 1.0)

    records.run("some", given(tmp_path, **only), checks, lambda arguments, record: done.append("b"))
    assert done == seen


def test_a_record_of_another_commit_is_replaced(tmp_path):
    (tmp_path / "some.json").write_text(json.dumps({"commit": "another", "checks": [{"check": "old"}]}))
    with records.Record("some", given(tmp_path)) as record:
        record.keep(table=[])
    assert json.loads((tmp_path / "some.json").read_text())["checks"] == []


def test_nothing_is_recorded_of_a_cpu_by_itself():
    before = sorted(records.RESULTS.iterdir())
    with records.Record("some", given()) as record:
        record.keep(table=[])
    assert sorted(records.RESULTS.iterdir()) == before


@dataclass(frozen=True)
class Program(Job):
    """A job that is some lines of Python."""

    def command(self, arguments):
        return [sys.executable, "-c", self.script]


def test_jobs_end_at_their_limits_and_what_had_no_time_is_named(tmp_path):
    jobs = (
        Program("print('well')", 30.0),
        Program("raise SystemExit(1)", 30.0),
        Program("import time; time.sleep(60)", 0.5),
        Job("engine", 60, sanitized=True),
    )
    with records.Record("gpu_all", given(tmp_path)) as record:
        table = run_all(given(tmp_path), record, jobs)
    assert [row["exit"] for row in table] == [0, 1, "stopped at its limit", "needs compute-sanitizer"]
    assert 0.5 <= table[2]["seconds"] < 20
    assert json.loads((tmp_path / "gpu_all.json").read_text())["jobs"] == table
    late = run_all(given(tmp_path, minutes=0.01), record, jobs[:1])
    assert late[0]["exit"] == "no time was left"


def test_checks_of_every_script_come_before_what_is_timed():
    timed = [number for number, job in enumerate(JOBS) if "--checks" not in job.arguments and job.script != "races"]
    scripts = {job.script for job in JOBS[: timed[0]]}
    assert scripts == {"engine", "exchange", "pipeline", "offload", "train", "races", "server"}
    assert sum(job.seconds for job in JOBS[: timed[0]]) <= 9 * 60


@pytest.mark.matrix
@pytest.mark.alone
def test_everything_runs_through_in_tiny_form(tmp_path):
    options = ["--device", "cpu", "--tiny", "--minutes", "20", "--results", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.gpu.all", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads((tmp_path / "gpu_all.json").read_text())["jobs"]
    assert [row["exit"] for row in rows] == ["needs compute-sanitizer" if job.sanitized else 0 for job in JOBS]
    assert {path.stem for path in tmp_path.glob("*.json")} == {"gpu_all", *(f"gpu_{job.script}" for job in JOBS)}


@pytest.mark.parametrize("name", [pytest.param("deferred updates", marks=pytest.mark.matrix), "zero 3"])
def test_a_run_under_delays_is_compared_with_one_that_waits(name):
    torch.set_num_threads(1)
    found = races.check_delays(name, "cpu", 1, 2)
    assert found["seen"] == found["allowed"] == 0
    assert races.trained(name, "cpu", 2, partial(races.Waiting, "cpu"))[0] > 3  # ln(61), about


def test_a_figure_that_is_not_finite_differs_from_all():
    assert races.worst([math.nan, 1.0], [1.0, 1.0]) == math.inf
    assert races.worst([1.0], [2.0]) == 0.5
    assert exchange.worst([1.0, math.nan], [1.0, 1.0]) == pipeline.worst([1.0], [math.inf]) == math.inf


def test_streams_are_delayed_as_threads_enter_them(monkeypatch):
    delays = []
    monkeypatch.setattr(races, "keep_busy", lambda device, draw: delays.append(draw.random()))
    with races.streams_delayed("cpu", random.Random(0)), torch.cuda.StreamContext(None):
        pass
    assert len(delays) == 1
    with races.Delaying("cpu", random.Random(0)):
        for _ in range(200):
            torch.ones(1) + 1
    assert 10 < len(delays) < 120


@pytest.mark.parametrize("name", exchange.CODECS)
def test_codecs_are_compared_and_timed(name):
    assert exchange.check_codec(name, "cpu")["seen"] == 0
    row = exchange.time_codec(name, "cpu", 1, 1)
    assert row["codec"] == name and row["encode"] > 0 and row["decode"] > 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_repeats_itself(name):
    """What the GPU is compared with is the same whenever it is run."""
    torch.set_num_threads(1)
    assert exchange.check_algorithm(name, "cpu")["seen"] == 0


@pytest.mark.parametrize("name", ["zbv", pytest.param("recompute", marks=pytest.mark.matrix), "2bw"])
def test_stages_follow_what_they_are_held_against(name):
    torch.set_num_threads(1)
    assert pipeline.check_plan(name, "cpu")["seen"] <= 1e-9


def test_the_delay_of_2bw_is_seen():
    assert pipeline.worst(pipeline.reference("2bw"), pipeline.reference("1f1b")) > 1e-6


@pytest.mark.parametrize("schedule", pipeline.TIMED)
def test_both_sides_have_stages_of_as_many_blocks(schedule):
    cut = pipeline.numbers(schedule, 9)
    assert sum(cut) == 9 and max(cut) - min(cut) <= 1 and len(cut) in (2, 4)


PLAIN = """
import sys
from pathlib import Path

MISSING = {"safetensors", "tokenizers", "rich", "typer", "psutil", "jinja2", "matplotlib", "tensorboard"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
for script in sorted(Path("benchmarks/gpu").glob("*.py")):
    __import__(f"benchmarks.gpu.{script.stem}")
"""


def test_a_plain_image_of_pytorch_has_all_that_they_import():
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_offload_follows_training_without_it():
    torch.set_num_threads(1)
    found = offload.check_losses("cpu")
    assert len(found) == 4 and all(each["seen"] <= each["allowed"] for each in found)


def test_recompute_follows_plain_training():
    assert train.check_losses("cpu", "recompute", 1e-2, recompute=train.RECOMPUTE["every second"])["seen"] == 0


def test_rates_are_measured(tmp_path):
    found = rates.all_rates("cpu", 1, 1, tmp_path)
    assert len(found) == 7 and all(figure > 0 for figure in found.values())
    assert not list(tmp_path.iterdir())


def test_a_budget_that_is_too_small_becomes_the_smallest():
    """What is moved is what was planned."""
    row = offload.of_engine(TINY, 2, "cpu", {"device": 1000}, 1)
    assert row["plan.memory"]["device"] > 1000 and row["peak"] <= row["plan.memory"]["device"]
    assert row["moved"] == row["planned"] > 0 and row["stalled_ms"] > 0
    assert offload.of_engine(TINY, 2, "cpu", None, 1).keys() == {"plan.memory", "ms", "peak", "tokens_per_second"}


def test_budgets_of_all_contenders(monkeypatch):
    def absent(*arguments, **more):
        raise ImportError("No module named 'deepspeed'")

    monkeypatch.setattr(offload, "deepspeed_step", absent)
    table = list(offload.budgets(TINY, 2, "cpu", [60], 1))
    assert [row["contender"] for row in table] == [
        "no offload",
        "no budget",
        "fsdp2, CPUOffloadPolicy",
        "60%, deferred",
        "60%, at once",
    ]
    for row in table:
        offload.show(row)


def test_rows_of_budgets_are_kept_before_the_next_is_measured(monkeypatch, tmp_path):
    def interrupted(*arguments):
        yield {"contender": "first", "ms": 1.0, "tokens_per_second": 1.0, "peak": 1}
        raise KeyError

    monkeypatch.setattr(offload, "budgets", interrupted)
    arguments = given(tmp_path, preset="1m", tokens=64, steps=1, share="50", only="budgets")
    with pytest.raises(KeyError), records.Record("some", arguments) as record:
        offload.times(arguments, record)
    assert [row["contender"] for row in json.loads((tmp_path / "some.json").read_text())["budgets"]] == ["first"]


@pytest.fixture(autouse=True)
def no_process_group_stays():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("offloaded", [False, True])
def test_fsdp2_learns(offloaded):
    step = peers.fsdp2_step(TINY, 2, "cpu", offloaded)
    seen = [step() for _ in range(4)]
    assert seen[-1] < seen[0]


def test_the_largest_model_is_trained():
    found = offload.largest_model("1m", 1, "cpu", Machine(60 * 2**20), most=2)
    assert found["model"]["heads"] == 2 and found["parameters"] > 0
    assert len(found["losses"]) == 2
    with pytest.raises(ValueError, match="nothing of this family fits"):
        offload.largest_model("1m", 1, "cpu", Machine(2**10), most=2)


@pytest.mark.parametrize("kind", planner.KINDS)
def test_jobs_of_the_planner_are_what_shoal_reads(tmp_path, kind):
    case = planner.Case("1m", kind, tmp_path / "case")
    job, _ = load_job(case.write(tokens=512, steps=3))
    assert (job.train.steps, job.train.global_batch, Path(job.run.dir)) == (3, 2, case.run_dir)
    assert (job.plan.compile, job.plan.recompute) == (kind == "compiled", "full" if kind == "full" else "none")


def test_the_planner_keeps_each_row_as_it_comes(tmp_path, monkeypatch):
    def row(case, *_):
        if case.kind == "full":
            raise KeyError(case.name)
        return {"case": case.name}

    monkeypatch.setattr(planner, "trained", lambda cases, *_: iter(cases))
    monkeypatch.setattr(planner, "row", row)
    arguments = given(tmp_path, preset="1m", kinds="plain,full", tokens=512, steps=3, machine=None)
    arguments.directory = tmp_path
    with pytest.raises(KeyError), records.Record("some", arguments) as record:
        planner.times(arguments, record)
    assert json.loads((tmp_path / "some.json").read_text())["table"] == [{"case": "1m, plain"}]


def test_groups_of_training_are_measured():
    table = list(train.measure_groups(TINY, 2, "cpu", 1, 1, False, 1e9))
    plain = [row for row in table if row["contender"].startswith("plain loop")]
    assert len(table) == 7 and all(row["ratio_to_plain"] == 1 for row in plain)
    assert all(row["utilisation"] > 0 for row in table)


def test_groups_of_training_are_kept_before_the_next_is_measured(monkeypatch, tmp_path):
    row = dict.fromkeys(("ms", "min", "max", "tokens_per_second", "utilisation", "ratio_to_plain"), 1.0)

    def interrupted(*arguments):
        yield {"contender": "first", **row}
        raise KeyError

    monkeypatch.setattr(train, "measure_groups", interrupted)
    monkeypatch.setattr(train, "measure_peak_flops", lambda *arguments: 1.0)
    arguments = given(tmp_path, preset="1m", tokens=64, rounds=1, steps=1, no_compile=True)
    with pytest.raises(KeyError), records.Record("some", arguments) as record:
        train.times(arguments, record)
    assert json.loads((tmp_path / "some.json").read_text())["tables"] == {"1m": [{"contender": "first", **row}]}


def test_races_of_some_plans(tmp_path):
    arguments = given(tmp_path, seeds=1, steps=1, only="1f1b")
    with records.Record("some", arguments) as record:
        races.run(arguments, record)
    assert [each["check"].split(":")[0] for each in record._content["checks"]] == ["1f1b"]
