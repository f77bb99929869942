"""`shoal plan --memory` on a job file: tables, verdict, JSON, and that nothing is trained."""

from __future__ import annotations

import json

import pytest

SMALL = {"host": 2**25, "process": 2**20}
"""A machine for which few and small models are looked at."""


def both_ways(capfd, job_file, *assignments: str) -> tuple[str, dict]:
    """The words and the JSON of one answer, for a small host."""
    from shoal.cli.memory_table import show
    from shoal.jobs.plan import plan_memory

    answer = plan_memory(job_file, assignments, **SMALL)
    capfd.readouterr()
    show(answer, as_json=False)
    words = " ".join(capfd.readouterr().out.split())
    show(answer, as_json=True)
    return words, json.loads(capfd.readouterr().out)


def predicted(job_file, *assignments: str):
    """The prediction alone, without the largest model."""
    from shoal.jobs.choose import Sizes, settle
    from shoal.jobs.forecast import Forecast
    from shoal.jobs.read import load_job
    from shoal.planner import Machine

    job, origins = load_job(job_file, assignments)
    ranks = job.plan.size
    settled = settle(job, origins, Sizes(ranks, ranks))
    return Forecast(settled, Machine(SMALL["host"], None, ranks), SMALL["process"]).predict(settled.job.plan)


def test_it_says_what_a_rank_needs_and_what_fits(shoal, job_file):
    answer = shoal("plan", job_file, "--memory", "--nproc", "2", "--host", "3GiB")
    assert answer.code == 0, answer.err
    words = " ".join(answer.out.split())
    assert words.startswith("gpt of 7.68k parameters in fp32, microbatch 2, 2 rank(s), dp = 2")
    for role in ("weights", "gradients", "optimizer state", "activations", "temporaries", "process", "most at a time"):
        assert role in answer.out
    assert "fits host memory:" in words and "largest that fits (width and depth" in words
    assert not (job_file.parent / "run").exists()


def test_an_option_of_the_planner_that_is_empty_is_not_left_out(shoal, job_file):
    answer = shoal("plan", job_file, "--budget", "")
    assert answer.code == 2 and answer.err.startswith("error: --budget goes with --on: name a machine")


def test_a_cluster_file_that_cannot_be_written_is_refused_before_measuring(shoal, tmp_path, monkeypatch):
    from shoal.cli import measured

    monkeypatch.setattr(measured, "here", lambda *_, **__: pytest.fail("it is measured"))
    answer = shoal("plan", "--measure", tmp_path / "none" / "here.toml", "--nproc", 1)
    assert answer.code == 2 and "here.toml: give a file in a directory that there is" in answer.err


def test_fewer_rows_than_a_step_should_have_are_said(shoal, job_file):
    answer = shoal("plan", job_file, "--on", "8xh100", "--set", "train.global_batch=100000")
    assert answer.code == 0 and "not 100000 as train.global_batch says: the data have no more" in answer.out
    assert "the data have no more" not in shoal("plan", job_file, "--on", "8xh100").out


def test_no_job_file_is_replaced(shoal, job_file, monkeypatch):
    from shoal.cli import measured

    monkeypatch.setattr(measured, "here", lambda *_, **__: pytest.fail("it is measured"))
    before = job_file.read_text()
    for command in (("--measure", job_file), (job_file, "--on", "8xh100", "--html", job_file)):
        answer = shoal("plan", *command)
        assert answer.code == 2 and "would replace a file of another kind: give another name, such as" in answer.err
    assert job_file.read_text() == before


def test_without_memory_it_shows_who_holds_what(shoal, job_file):
    answer = shoal(
        "plan",
        job_file,
        "--nproc",
        "8",
        "--set",
        "plan.dp=2",
        "--set",
        "plan.cp=2",
        "--set",
        "plan.tp=2",
        "--set",
        "plan.zero=3",
    )
    assert answer.code == 0, answer.err
    lines = [" ".join(line.split()) for line in answer.out.splitlines()]
    assert lines[:6] == [
        "8 rank(s) by number: dp 2 x cp 2 x tp 2",
        "dp cp tp 0 tp 1",
        "0 0 0 1",
        "0 1 2 3",
        "1 0 4 5",
        "1 1 6 7",
    ]
    assert "zero = 3: optimizer state, gradients and weights cut among 4 ranks, such as 0, 2, 4, 6" in lines
    assert json.loads(shoal("plan", job_file, "--json", "--nproc", "2").out)["ranks"] == [[[[0]], [[1]]]]
    wrong = shoal("plan", job_file, "--nproc", "4", "--set", "plan.dp=3")
    assert wrong.code == 2 and "dp = 4" in wrong.err
    for given in (("--memory",), ("--nproc", "2"), ("--host", "1GiB")):
        refused = shoal("plan", job_file, "--on", "8xh100", *given)
        assert refused.code == 2 and "leave out --memory, --nproc and --host" in refused.err
    asks = "shoal train asks the planner, which may choose another plan"
    for more in ((), ("--memory", "--host", "3GiB")):
        shown = (shoal("plan", job_file, "--nproc", "2", *more, *auto).out for auto in ((), ("--set", "plan=auto")))
        assert [asks in " ".join(each.split()) for each in shown] == [False, True]
        given = (("plan", job_file, "--nproc", "2", "--json", *more, *auto) for auto in ((), ("--set", "plan=auto")))
        assert [[asks in each for each in json.loads(shoal(*args).out)["said"]] for args in given] == [[], [True]]
    large = shoal("plan", job_file, "--nproc", "1024", "--set", "plan.tp=8")
    assert (
        "1024 rank(s) by number: dp 128 x tp 8" in large.out
        and len(large.out.splitlines()) < 25
        and "1023" in large.out
    )


def test_a_pipeline_says_how_its_schedule_runs(shoal, job_file):
    stages = ("--nproc", "4", "--set", "plan.pp=4", "--set", "train.global_batch=8", "--set", "train.microbatch=1")
    answer = shoal("plan", job_file, *stages)
    line = (
        "along pp: other stages of the model, 4 in all; 1f1b, 8 microbatch(es) a step: ranks wait 27.3% of the time "
        "for each other, and keep activations of up to 4 microbatches"
    )
    assert answer.code == 0 and line in " ".join(answer.out.split())
    assert (
        "2 a rank); zbv, 8 microbatch(es) a step: ranks wait 5.9%"
        in shoal("plan", job_file, *stages, "--set", "plan.schedule=zbv").out
    )
    assert "weights of up to 2 versions" in shoal("plan", job_file, *stages, "--set", "plan.schedule=2bw").out
    wrong = shoal("plan", job_file, *stages, "--set", "plan.schedule=1f2b")
    assert wrong.code == 2 and "is none of gpipe" in wrong.err


def test_the_memory_of_each_stage(shoal, job_file, capfd):
    stages = ("run.nproc=2", "plan.pp=2", "model.layers=4")
    words, found = both_ways(capfd, job_file, *stages)
    assert "memory of the rank that needs most" in words and "by place along pp a rank needs" in words
    first, last = ({row["role"]: row["nbytes"] for row in stage["rows"]} for stage in found["stages"])
    assert first["weights"] + last["weights"] >= 4 * found["parameters"] and first["weights"] != last["weights"]
    unflushed = predicted(job_file, *stages, "plan.schedule=2bw").need
    assert unflushed.of("older weights") == unflushed.of("weights")
    assert unflushed.of("gradients under way") == unflushed.of("gradients")
    given = [part for each in (*stages, "plan.stages=[3,3]") for part in ("--set", each)]
    wrong = shoal("plan", job_file, "--memory", *given)
    assert wrong.code == 2 and "the model has 4 blocks" in wrong.err


def test_json_has_the_numbers_and_the_sizes_of_chunks(shoal, job_file):
    answer = shoal(
        "plan", job_file, "--memory", "--json", "--nproc", "1", "--host", "1GiB", "--set", 'plan.memory={device="2MiB"}'
    )
    found = json.loads(answer.out)
    assert answer.code == 0 and found["parameters"] == 7680
    rows = {(row["role"], row["tier"]): row["nbytes"] for row in found["rows"]}
    assert rows["weights", "host"] >= 4 * 7680 and rows["optimizer state", "host"] > 8 * 7680
    assert found["smallest_device"] <= 2 * 2**20
    assert found["chunk_bytes"] in [each["chunk_bytes"] for each in found["chunk_sizes"]]
    assert [fit["memory"] for fit in found["fits"]] == ["plan.memory.device", "host memory"]
    assert found["largest"]["table"]["d_model"] >= 16


def test_what_does_not_fit_is_said_with_plans_that_would(shoal, job_file):
    chunk = ("--set", 'plan.memory.chunk="1MiB"')
    plenty = shoal("plan", job_file, "--memory", "--json", "--nproc", "1", "--host", "1GiB", *chunk)
    least = json.loads(plenty.out)["smallest_device"]
    answer = shoal(
        "plan",
        job_file,
        "--memory",
        "--nproc",
        "1",
        "--host",
        "1GiB",
        *chunk,
        "--set",
        f"plan.memory.device={least - 1}",
    )
    assert answer.code == 1
    assert "does not fit  plan.memory.device" in answer.out and "1 B are missing" in answer.out
    assert "it would fit with memory = {}" in answer.out
    nothing = shoal("plan", job_file, "--memory", "--nproc", "1", "--host", "1MiB")
    assert "no plan of zero, memory and recompute fits" in nothing.out and "no model of this family fits" in nothing.out


def test_what_tensor_parallel_makes_of_each_layer(shoal, job_file):
    answer = shoal("plan", job_file, "--memory", "--nproc", "2", "--set", "plan.tp=2", "--host", "3GiB")
    rows = [line.split() for line in answer.out.splitlines()]
    assert answer.code == 0, answer.err
    became = {row[0]: row[1] for row in rows if row and row[0].startswith("blocks.*")}
    assert became["blocks.*.attention.qkv"] == "qkv" and became["blocks.*.mlp.down"] == "row"


def test_few_models_are_run_dry_and_none_is_deep(job_file, monkeypatch):
    """What `shoal plan --memory` costs is dry runs of blocks: the job's own model as it is, larger ones with four
    blocks."""
    from shoal.jobs import dry_runs
    from shoal.jobs import plan as asked
    from shoal.planner import SHALLOW, dry_run

    depths = []

    def counted(subject):
        depths.append(len(subject.factory().blocks))
        return dry_run(subject)

    monkeypatch.setattr(dry_runs, "dry_run", counted)
    own = 6
    answer = asked.plan_memory(job_file, [f"model.layers={own}", "run.nproc=1"], host=2**30, process=2**28)
    assert answer.largest.table["layers"] > 2 * own
    assert depths[0] == own and all(depth <= SHALLOW for depth in depths[1:]) and len(depths) <= 10


@pytest.mark.parametrize("plan", ["pp=2", pytest.param("pp=4", marks=pytest.mark.matrix)])
def test_the_largest_model_of_a_pipeline_fits_and_the_next_does_not(job_file, monkeypatch, plan):
    from shoal.jobs import dry_runs
    from shoal.jobs import plan as asked
    from shoal.planner import SHALLOW, dry_run_stages, family

    depths = []

    def counted(subject):
        depths.append(len(subject.factory().blocks))
        return dry_run_stages(subject)

    monkeypatch.setattr(dry_runs, "dry_run_stages", counted)
    ranks, own = int(plan[-1]), 12
    job = [f"model.layers={own}", f"plan.{plan}"]
    answer = asked.plan_memory(job_file, job, **SMALL)
    assert answer.largest.parameters > answer.parameters and len(answer.stages) == ranks
    assert depths[0] == own and all(depth <= min(ranks, 3) * SHALLOW for depth in depths[1:])
    sizes = family(answer.settled.job.model, answer.settled.model.values)
    for more in (0, 1):
        member = sizes.member(answer.largest.table["heads"] + more)
        given = [f"model.{key}={value}" for key, value in member.items() if isinstance(value, int)]
        assert (predicted(job_file, *job, *given).free >= 0) == (not more)


def test_no_model_is_run_dry_twice(job_file, monkeypatch):
    """Also where the largest that fits is the job's own, which another table describes."""
    from shoal.jobs import dry_runs
    from shoal.jobs import plan as asked
    from shoal.planner import dry_run

    ran = []

    def counted(subject):
        ran.append(repr(subject.factory))
        return dry_run(subject)

    monkeypatch.setattr(dry_runs, "dry_run", counted)
    job = (job_file, ["model.layers=5", "run.nproc=1"])
    needed = asked.plan_memory(*job, host=2**29, process=2**28).prediction.fits[0].needed
    ran.clear()
    answer = asked.plan_memory(*job, host=needed, process=2**28)
    assert answer.largest.parameters == answer.parameters and len(set(ran)) == len(ran)


def test_each_plan_of_a_run_is_looked_at(job_file, capfd):
    from shoal.jobs.plan import plan_memory

    job_file.write_text(
        job_file.read_text()
        + '\n[[run.at]]\nstep = 2\nplan.zero = 3\n\n[[run.at]]\nstep = 4\nplan.memory.device = "64KiB"\n'
    )
    words, found = both_ways(capfd, job_file, "run.nproc=2")
    assert "does not fit plan.memory.device" in words, "the device of the last plan is too small"
    assert "after step 2: dp = 2, zero = 3" in words and 'after step 4: dp = 2, zero = 3, memory = {device = "' in words
    assert [(each["step"], each["plan"].get("zero")) for each in found["later"]] == [(2, 3), (4, 3)]
    whole, cut = (
        next(row["nbytes"] for row in each["rows"] if row["role"] == "optimizer state")
        for each in (found, found["later"][0])
    )
    assert cut == pytest.approx(whole / 2, rel=0.1)
    smallest = found["later"][1]["smallest_device"]
    assert not plan_memory(job_file, ["run.nproc=2"], **SMALL).fits
    job_file.write_text(job_file.read_text().replace('"64KiB"', str(smallest)))
    assert plan_memory(job_file, ["run.nproc=2"], **SMALL).fits


def test_of_models_of_another_depth_those_beside_the_answer_are_compared(job_file, tmp_path, monkeypatch):
    """Between the job's own and the largest that fits none is built. Where one of the two is not as assumed, the search
    is made once more, with dry runs of whole models: it finds the same."""
    pytest.importorskip("transformers")
    from shoal.jobs import dry_runs
    from shoal.jobs import plan as asked
    from shoal.planner import alike_blocks

    own = 6
    config = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 512}
    config |= {"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 4, "num_hidden_layers": own}
    data = job_file.read_text().partition("[data]")[2]
    job_file.write_text(f'[model]\nname = "hf"\nconfig = "{tmp_path / "config.json"}"\n\n[data]{data}')

    def largest(most_alike: int, **settings: object) -> tuple[dict, list[int]]:
        compared = []
        (tmp_path / "config.json").write_text(json.dumps(config | settings))

        def counted(shallow, deep, numbers):
            blocks = alike_blocks(shallow, deep, numbers)
            compared.append(blocks.number)
            return blocks if blocks.number <= most_alike else None

        monkeypatch.setattr(dry_runs, "alike_blocks", counted)
        monkeypatch.setattr(dry_runs, "_COMPARED", {})
        answer = asked.plan_memory(job_file, ["run.nproc=1"], host=2**24, process=2**20)
        return answer.to_dict()["largest"], compared

    assert largest(2**12, layer_types=["full_attention"] * own) == (None, []), "of layers that are listed one by one"
    found, compared = largest(2**12)
    layers = found["table"]["num_hidden_layers"]
    assert layers > 2 * own and sorted(compared) == [own, layers, layers + 1]
    for most_alike in (own, layers):
        again, more = largest(most_alike)
        assert again == found and len(more) > len(compared)
