"""plan = "auto": what a job may say, what is traced, and that what was chosen can be used as it is."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal import auto_plan
from shoal.cli.answer import Options, answer_for, money
from shoal.comm import Link as Measured
from shoal.comm import World
from shoal.errors import UserError
from shoal.exchange.algorithm import USUAL_CHUNK
from shoal.jobs import answer, auto, automatic, gain
from shoal.jobs.answer import profile_of, task_of
from shoal.jobs.asking import answer as answered
from shoal.jobs.asking import asked, keeps_microbatch, stays
from shoal.jobs.automatic import pinned
from shoal.jobs.choose import Settled, Sizes, at_size, opened
from shoal.jobs.config import Job, Train
from shoal.jobs.device_memory import check_device_memory
from shoal.jobs.forecast import Forecast
from shoal.jobs.gain import FINEST, SHARE, Ranks, is_small, why_not_searched
from shoal.jobs.read import parse_job
from shoal.models import build
from shoal.pipeline import schedule_of
from shoal.plan import Plan, nbytes
from shoal.planner import Machine, Subject
from shoal.planner.cluster import Cluster, Device, Host, Link
from shoal.planner.degrees import Spread
from shoal.planner.measure import Rates
from shoal.planner.prepare import Untraced, in_one_line
from shoal.planner.profile import profile
from shoal.planner.task import Task
from shoal.precision import precision
from tests.planner.models import task

GIB = 2**30
SGD = partial(torch.optim.SGD, lr=0.1)
MODEL = {"name": "gpt", "layers": 8, "d_model": 32, "heads": 4, "vocab_size": 257}
TRAIN = {"steps": 4, "global_batch": 8}


@pytest.fixture
def settled(tmp_path: Path) -> Callable[..., Settled]:
    (tmp_path / "text.txt").write_text("one fish, two fish, red fish, blue fish. " * 40)

    def made(plan: Any = None, **model: Any) -> Settled:
        data = {"source": str(tmp_path / "text.txt"), "sequence": 16, "validation": 0.0}
        content = {"model": {**MODEL, **model}, "data": data, "train": TRAIN}
        return opened(*parse_job(content if plan is None else {**content, "plan": plan}))

    return made


def machine(ranks: int = 4, memory: int = 8 * GIB) -> Cluster:
    device = Device("cores", {"fp32": 1e11}, memory, 1e10, launch=1e-5, on_host=True)
    return Cluster("here", (Host(device, ranks, Link(1e-5, 2e9), memory, 5e9),), Link(1e-4, 1e9), 0.3)


def test_what_a_job_may_say_of_its_plan() -> None:
    base = {"model": {"name": "gpt"}, "train": {"steps": 1}}
    job, origins = parse_job({**base, "plan": "auto"})
    assert job.auto.wanted and job.plan == Plan() and origins["plan.name"] == "file"
    assert parse_job(base, ["plan=auto"])[0].auto.wanted
    job, _ = parse_job({**base, "plan": {"name": "auto", "tp": 2}})
    assert job.auto.wanted and job.plan == Plan(tp=2)
    given = {**base, "plan": {"tp": 2, "dp": 1}}
    assert not parse_job(given)[0].auto.wanted
    job, origins = parse_job(given, ["plan.zero=1", "plan=auto", "plan.measure=3"])  # a resolved.toml gives all fields
    assert job.auto.wanted and job.auto.measure == 3 and job.plan == Plan(zero=1) and "plan.tp" not in origins
    assert parse_job(given, ["plan.name=auto"])[0].plan == Plan(tp=2)
    for plan in ({"name": "fast"}, "fast"):
        with pytest.raises(UserError, match='plan = "auto"'):
            parse_job({**base, "plan": plan})
    for wrong in ("plan.measure=-1", "plan.measure=x", "plan.allow=bf16", 'plan.allow=["bf61"]', "plan.name=fast"):
        with pytest.raises(UserError, match=re.escape(f"in --set {wrong}")):
            parse_job({**base, "plan": "auto"}, [wrong], where="job.toml")
    for wrong in ("plan.measure=2", 'plan.allow=["bf16"]'):
        with pytest.raises(UserError, match=rf"in --set {re.escape(wrong)}.*plan.name = .auto. beside"):
            parse_job(given, [wrong], where="job.toml")
    with pytest.raises(UserError, match=r"--set plan=fast: .*, or plan=auto to have the planner find it"):
        parse_job(base, ["plan=fast"])


def test_a_trace_counts_the_products_of_all_blocks(settled: Callable[..., Settled]) -> None:
    own = settled()
    found = profile_of(own, {"parts": (2,)})
    blocks = [part for part in found.parts if part.is_block]
    assert len(blocks) == 8 and found.refused["tokens"] == "not asked for"
    for part in blocks:
        assert part.products.value == 2 * 16 * 12 * 32**2  # four matrices for attention, eight for the MLP
        assert part.products.on(Spread(parts=4)) == part.products.value / 4
        assert part.attention.value == 2 * 2 * 16 * 16 * 32 / 2  # causal
        assert part.spared == pytest.approx(4 / 12)  # the MLP's second matrix, whose result backward does not need
        weights, moved = 12 * 32**2, 16 * 32 * (1 + 3 + 3 + 1 + 1 + 1 + 1 + 4 + 4 + 1)
        assert part.operands.value == pytest.approx(4 * (weights + moved), rel=0.05)  # and biases, log-sum-exps
    assert found.parameters == sum(each.numel() for each in own.model.factory().parameters())


def test_products_of_experts_are_counted(settled: Callable[..., Settled]) -> None:
    config = {"model_type": "mixtral", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = build({"name": "hf", "config": config, "num_hidden_layers": 2})
    row = {key: torch.zeros(16, dtype=torch.int64) for key in ("input_ids", "labels")}
    found = profile(Subject(model.factory, model.loss, row, 1, precision("fp32")), {})
    block = next(part for part in found.parts if part.is_block)
    assert block.products.value == 2 * 16 * (4 * 32**2 + 4 * 32 + 2 * 3 * 32 * 48)  # attention, router, two experts


def ranks(number: int, memory: int = 8 * GIB) -> Ranks:
    return Ranks(number, torch.device("cpu"), memory, Link(1e-4, 1e9))


def test_a_job_without_a_plan_is_searched_where_its_state_is_large(settled: Callable[..., Settled]) -> None:
    own = at_size(settled(), Sizes(2, 2))
    elements = sum(each.numel() for each in own.model.factory().parameters())
    state = 16 * elements  # weights, gradients and two moments in fp32
    assert is_small(own, round(4.01 * state)) and not is_small(own, round(3.99 * state))
    assert why_not_searched(own, ranks(2, round(3.99 * state))) is None
    assert why_not_searched(own, ranks(1)) == "its memory is enough"
    assert "of the whole job" in str(why_not_searched(own, ranks(2)))


def test_a_job_without_a_plan_is_searched_where_another_plan_could_gain(
    settled: Callable[..., Settled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, 1e12 FLOP/s, 8e9 bytes/s: an exchange of 4 bytes and an update of 32 an element."""
    monkeypatch.setattr(
        gain, "rates", lambda *_: Rates({"fp32": 1e12}, ((1e9, 1.0),), 8e9, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    )
    own = replace(at_size(settled(d_model=128), Sizes(2, 2)), total=10**6)
    elements = sum(each.numel() for each in own.model.factory().parameters())
    spared = 4 * elements / 1e9 + 32 * elements / 8e9
    row = own.model.flops_per_token(16) * 16 / 1e12  # type: ignore[misc]
    least = math.ceil(spared / (SHARE * row))  # rows of a rank beside which that is little

    def of(rows: int, **limits: Any) -> str | None:
        train = replace(own.job.train, global_batch=rows, **limits)
        return why_not_searched(replace(own, job=replace(own.job, train=train)), ranks(2))

    assert spared > FINEST and 4 * elements < USUAL_CHUNK
    assert of(2 * (least - 1)) is None and "all but the products" in str(of(2 * least))
    assert of(2 * least + 1) is None, "one rank has a row more than the other"
    assert "of the whole job" in str(of(2 * (least - 1), seconds=5.0))
    few = round(10 / spared)
    for steps, asked_for in ((few - 1, False), (few + 1, True)):
        assert (why_not_searched(replace(own, total=steps), ranks(2)) is None) == asked_for


def test_ranks_measure_their_link_only_where_a_slow_one_matters(
    settled: Callable[..., Settled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts: survivors of a job that nothing could gain for do not wait for a measurement where a rank joins."""
    everyone = SimpleNamespace(rank=0, broadcast_object=lambda value: value)
    world: Any = SimpleNamespace(size=2, on_host=1, rank=0, device=torch.device("cpu"), everyone=everyone)
    measured = list[object]()

    def link_of(group: object, _: torch.device) -> Measured:
        measured.append(group)
        return Measured("world", 2, "tcp", ((2**10, 1e-4), (2**20, 1e-4 + 2**20 / 1e9)))

    monkeypatch.setattr(automatic, "link_of", link_of)
    own = at_size(settled(), Sizes(2, 1))
    assert "of the whole job" in str(automatic.planned(own, world).why) and not measured
    monkeypatch.setattr(automatic, "why_not_searched", lambda _, ranks: _none_if(ranks.link == automatic.SLOW))
    assert automatic.planned(own, world).why == "the link is fast" and measured == [everyone]


def _none_if(slow: bool) -> str | None:
    return None if slow else "the link is fast"


def test_data_parallelism_stays_where_nothing_is_clearly_faster(settled: Callable[..., Settled]) -> None:
    fast, slow = (machine(2), replace(machine(2), hosts=(replace(machine(2).hosts[0], inside=Link(1e-5, 1e6)),)))
    two, many = (at_size(settled(), Sizes(size, size)) for size in (2, 16))
    assert stays(two, fast) == "the planner predicts none that is 10% faster"
    assert stays(two, slow) is None
    assert stays(many, machine(16)) is None, "more ranks than rows"


def test_what_a_caller_gives_of_a_plan_is_kept() -> None:
    job = Job({"name": "gpt"}, Train(steps=1), plan=Plan(tp=2, dp=2))
    assert pinned(job, {"plan.dp": "planner"}) == {"tp": 2}
    assert pinned(job, {"plan.dp": "cli", "plan.tp": "file", "plan.zero": "file"}) == {"dp": 2, "tp": 2, "zero": 0}


def test_a_model_is_traced_once(
    settled: Callable[..., Settled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    traced = []

    def counted(*given: Any) -> Any:
        traced.append(given)
        return profile(*given)

    monkeypatch.setattr(answer, "profile", counted)
    first = profile_of(settled(), {"parts": (2,)})
    assert profile_of(settled(), {"parts": (2,)}) == first and len(traced) == 1
    profile_of(settled(), {})
    profile_of(settled(), {"parts": (2,)}, Plan(placements={"lm_head": "whole"}))
    profile_of(settled(d_model=64), {"parts": (2,)})
    assert len(traced) == 4
    order = [{"**.up": "whole", "blocks.*.mlp.*": "column"}, {"blocks.*.mlp.*": "column", "**.up": "whole"}]
    for placements in order:  # the last pattern counts
        profile_of(settled(), {"parts": (2,)}, Plan(placements=placements))
    assert len(traced) == 6
    for path in (tmp_path / "cache" / "shoal" / "profiles").glob("*.json"):
        path.write_text(path.read_text()[:-9])
    assert profile_of(settled(), {"parts": (2,)}) == first and len(traced) == 7


def test_a_single_block_that_is_placed_otherwise_is_traced(settled: Callable[..., Settled]) -> None:
    """Few blocks were traced for all eight, of which none had that number: tp was predicted to divide nothing."""
    found = {
        place: profile_of(settled(), {"parts": (2,)}, Plan(placements={f"blocks.{place}.attention": "whole"}))
        for place in (1, 6, "*")
    }
    for place, each in found.items():
        assert each.refused["parts"] == ""
        divided = [part.attention.on(Spread(parts=2)) < part.attention.value for part in each.parts if part.is_block]
        assert divided == [place not in (number, "*") for number in range(8)]
    with pytest.raises(UserError, match=r"placements\['blocks.8.attention'\]: the model has no module of such a name"):
        asked(settled({"name": "auto", "placements": {"blocks.8.attention": "whole"}}), machine())


def test_a_dry_run_of_single_blocks_that_are_placed_otherwise_is_of_all_blocks(settled: Callable[..., Settled]) -> None:
    """The last of few stood for the last of all: what is whole was taken for the last stage's."""
    plan = Plan(tp=2, pp=2, placements={"blocks.7.mlp.*": "whole", "blocks.7.attention": "whole"})
    first, last = Forecast(settled(plan.to_dict(), layers=16), Machine(8 * GIB, None, 4), 0).of(plan, [0, 1])
    assert first.need.of("weights") > 1.1 * last.need.of("weights")


def test_the_plan_of_a_job_is_confirmed_and_pins_hold(settled: Callable[..., Settled]) -> None:
    chosen = asked(settled({"name": "auto", "zero": 1}), machine())
    assert chosen.plan.size == 4 and chosen.plan.zero == 1
    assert chosen.bytes <= chosen.task.usable and chosen.predictions
    origins = chosen.settled.origins
    assert origins["plan.dp"] == "planner" and origins["plan.zero"] == "file"
    assert chosen.settled.job.train.microbatch == chosen.estimate.choice.microbatch
    with pytest.raises(UserError, match="no degrees fit"):
        asked(settled({"name": "auto", "dp": 3}), machine())


def test_as_many_replicas_are_tried_where_their_number_matters(settled: Callable[..., Settled]) -> None:
    """DiLoCo on two replicas went on as tensor parallelism, without it, and came back."""
    dp = {}
    for exchange in ("allreduce", "diloco"):
        trials = answered(settled({"name": "auto", "measure": 6, "exchange": exchange}), machine(), True)[2]
        dp[exchange] = {each["plan"].get("dp", 1) for each in trials["candidates"]}
    assert dp == {"allreduce": {2, 4}, "diloco": {4}}


def test_plans_that_are_tried_compute_the_same(settled: Callable[..., Settled]) -> None:
    """With an exchange that is allowed the run went from one that rounds to the exact one, and back."""
    slow = machine()
    slow = replace(slow, hosts=(replace(slow.hosts[0], inside=Link(1e-5, 2e7)),))
    for given, way in ({}, "allreduce"), ({"zero": 0}, "bf16"):
        asks = {"name": "auto", "measure": 6, "allow": ["bf16"], "tp": 1, "pp": 1, "cp": 1, **given}
        trials = answered(settled(asks), slow, True)[2]
        plans = [Plan.from_dict(each["plan"]) for each in trials["candidates"]]
        assert {(each.exchange, each.dp) for each in plans} == {(way, 4)} and (len(plans) > 1 or given)


def going_by_values(settled: Settled) -> Settled:
    """The job of a model whose loss goes on by the values of what the model gives."""
    own = settled.model.loss

    def loss(model: Any, microbatch: Any) -> Any:
        sums = own(model, microbatch)
        return sums if sums[0] > 0 else (sums[0] * 2, sums[1])

    return replace(settled, model=replace(settled.model, loss=loss, values={**settled.model.values, "own": True}))


def test_a_job_that_goes_by_values_is_data_parallel(settled: Callable[..., Settled]) -> None:
    for given, fields in ((None, {}), ("auto", {}), ({"name": "auto", "zero": 2}, {"zero": 2})):
        for small in (True, False):
            plan, rows, trials, why = answered(going_by_values(settled(given, layers=2)), machine(), small)
            assert plan == {"dp": 4, **fields} and (rows, trials) == (None, None), given
            assert re.match(r".*test_auto.py:\d+ decides by values .* Memory and time are not predicted: pin", why)
    with pytest.raises(UserError, match=r"test_auto.py:\d+ decides .* and tp = 2 is pinned: leave it out, or give the"):
        answered(going_by_values(settled({"name": "auto", "tp": 2}, layers=2)), machine(), True)


def test_a_budget_is_not_refused_where_values_decide_what_a_step_needs(
    settled: Callable[..., Settled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a model could change to no plan with a budget, with the advice to give a plan."""
    little, alone = settled({"memory": {"device": "1KiB"}}, layers=2), World.single("cpu")
    with pytest.raises(UserError, match="a step needs"):
        check_device_memory(little, alone)

    def predict(*_: Any) -> None:
        with in_one_line(), FakeTensorMode():
            torch.zeros(()).item()

    monkeypatch.setattr(Forecast, "predict", predict)
    check_device_memory(little, alone)


def test_an_error_on_fake_tensors_is_told_by_a_line_that_python_does_not_come_with() -> None:
    """It named contextlib.py where a context manager of Shoal's failed."""
    with pytest.raises(Untraced, match=rf"\(JSONDecodeError at {re.escape(__file__)}:\d+\)"), in_one_line():
        json.loads("{")


def test_batch_statistics_keep_their_microbatch(settled: Callable[..., Settled]) -> None:
    own = settled()
    assert not keeps_microbatch(own)
    train = replace(own.job.train, sync_bn=True)
    assert keeps_microbatch(replace(own, job=replace(own.job, train=train))), "all of a rank's rows are one"


def test_what_experts_compute_is_not_left_to_the_machine(settled: Callable[..., Settled], tmp_path: Path) -> None:
    """How many rows share a microbatch decides what is dropped: the planner chose it, by the machine's speed."""
    moe = {"experts": 4, "per_token": 2, "capacity_factor": 1.25}
    alone, job = World.single("cpu"), settled("auto", layers=2, moe=moe)
    with pytest.raises(UserError, match=r"train.microbatch: the model's experts have a capacity, .*: give one"):
        automatic.planned(job, alone)
    given = replace(job, job=replace(job.job, train=replace(job.job.train, microbatch=2)))
    assert automatic.planned(given, alone, runs=False).job.train.microbatch == 2
    sample = job.model.prepare_data(job.data.train)[0]
    with pytest.raises(UserError, match="microbatch: the model's experts have a capacity"):
        auto_plan(job.model.factory, job.model.loss, SGD, sample, global_batch=8, world=alone, cluster=machine(1))
    file = tmp_path / "moe.toml"
    file.write_text(
        '[model]\nname = "gpt"\nlayers = 2\nd_model = 32\nheads = 4\nmoe = {experts = 4, capacity_factor = 1.25}\n'
        f'[data]\nsource = "{tmp_path}/text.txt"\nsequence = 16\nvalidation = 0.0\n[train]\nsteps = 4\n'
    )
    with pytest.raises(UserError, match=r"train.microbatch: the model's experts have a capacity"):
        answer_for(file, [], Options("2xh100"), True, None)  # as the run


def test_another_machine_is_named_as_to_the_command(settled: Callable[..., Settled], tmp_path: Path) -> None:
    job, alone = settled("auto", layers=2), World.single("cpu")
    ask = partial(auto_plan, job.model.factory, job.model.loss, SGD, job.model.prepare_data(job.data.train)[0])
    plan, _ = ask(global_batch=8, world=alone, cluster="2xh100")
    assert plan.size == 2
    wrong: dict[str, dict[str, Any]] = {
        r"cluster = \"2xh10\" is no machine. Did you mean": {"cluster": "2xh10"},
        r"cluster = 8: give a machine by name": {"cluster": 8},
        r"global_batch = 0: a step needs at least one sample": {"global_batch": 0},
        r"what trains apart are replicas, of which there are two at least": {"pins": {"exchange": "diloco"}},
    }
    for said, given in wrong.items():
        with pytest.raises(UserError, match=said):
            ask(**{"global_batch": 8, "world": alone, "cluster": "1xh100", **given})


def test_the_answer_is_a_plan_and_a_page(settled: Callable[..., Settled], tmp_path: Path, capsys: Any) -> None:
    settled()
    job, page = tmp_path / "job.toml", tmp_path / "plan.html"
    text = str(tmp_path / "text.txt")
    job.write_text(
        '[model]\nname = "gpt"\nlayers = 8\nd_model = 32\nheads = 4\n'
        f'[data]\nsource = "{text}"\nsequence = 16\nvalidation = 0.0\n'
        '[train]\nsteps = 4\nglobal_batch = 64\nprecision = "bf16"\n'
    )
    answer_for(job, [], Options("2xh100", ["pp=2", "schedule=1f1b"]), True, page)
    told = json.loads(capsys.readouterr().out)
    plan = Plan.from_dict(told["plan"])
    assert plan.size == 2 and plan.pp == 2 and sum(plan.stages) == 8  # type: ignore[arg-type]
    assert told["seconds"] == pytest.approx(sum(told["terms"].values()))
    assert told["terms"]["bubble"] > 0 and len(told["dry_run"]) == 2
    drawn = page.read_text()
    for what in ("pipeline communication", "pipeline bubble"):
        assert f">{what}</text>" in drawn, what
    assert ">copies<" not in drawn and "exchange, not" not in drawn, "terms have one name"
    assert drawn.count("<svg") == 5 and "<script" not in drawn and "href" not in drawn
    actions = schedule_of(plan, 64 // told["microbatch"]).orders
    assert re.findall(r"<title>([FBIW]\d+:\d+): ", drawn) == [str(each) for order in actions for each in order]
    ends = [float(end) for end in re.findall(r"<title>B\d+:\d+: [^<]* to ([\d.]+) ms</title>", drawn)]
    busy = 1e3 * (told["seconds"] - told["terms"]["copies"] - told["terms"]["optimizer"] - told["terms"]["other"])
    assert max(ends) == pytest.approx(busy, rel=0.01)  # as long as the schedule's actions take
    updates = re.findall(r"<title>optimizer: ([^<]*)</title>", drawn)
    assert len(updates) == 3 and len(set(updates[:2])) == 2, "each stage has its own, then the term of the step"
    for title in ("rank; same place", "a rank may use", "time; the number", "time of a step", "memory of the fullest"):
        assert title in drawn, title
    assert "Blocks of the stages: " + ", ".join(map(str, plan.stages)) in drawn  # type: ignore[arg-type]
    with pytest.raises(UserError, match="price"):
        answer_for(job, [], Options("2xh100", budget="10USD"), True, None)
    for where in (tmp_path, tmp_path / "nowhere" / "plan.html"):
        with pytest.raises(UserError, match="give a file in a directory that there is"):
            answer_for(job, [], Options("2xh100"), True, where)
    for limit in ("0", "0GiB", "-1GiB", "nan", "9" * 400):
        with pytest.raises(UserError, match=r"--device = .*: give at least 1 byte"):
            answer_for(job, [], Options("2xh100", device=limit), True, None)
    with pytest.raises(UserError, match="--pin pp=2"):
        answer_for(job, [], Options("2xh100", ["stages=[4,4]"]), True, None)
    with pytest.raises(UserError, match=r'--allow: "bf61" is no exchange: give one of .* Did you mean "bf16"'):
        answer_for(job, [], Options("2xh100", allow=["bf61"]), True, None)


def test_a_device_that_is_too_small_is_refused_with_one_that_does(tmp_path: Path, capsys: Any) -> None:
    """What was named was the estimate of what needs least, which dry runs refused, and nothing for a few bytes."""
    (tmp_path / "text.txt").write_text("one fish, two fish, red fish, blue fish. " * 40)
    job = tmp_path / "job.toml"
    job.write_text(
        '[model]\nname = "gpt"\nlayers = 4\nd_model = 32\nheads = 4\n'
        f'[data]\nsource = "{tmp_path}/text.txt"\nsequence = 16\nvalidation = 0.0\n[train]\nsteps = 4\n'
    )
    for device in ("40", "100KiB"):
        with pytest.raises(UserError, match=r"Give --device \S+iB, or take more devices, a smaller model") as refusal:
            answer_for(job, [], Options("2xh100", device=device), True, None)
        given = str(refusal.value).split("--device ")[1].split(",")[0]
        answer_for(job, [], Options("2xh100", device=given), True, None)
        told = json.loads(capsys.readouterr().out)
        assert max(each["bytes"] for each in told["dry_run"]) <= told["limit"] == nbytes(given, "--device")


@pytest.mark.parametrize("train", ["seconds = 36000", "seconds = 36000\nsteps = 1000000000000"])
def test_a_budget_is_of_the_seconds_that_a_job_trains(train: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "text.txt").write_text("one fish, two fish, red fish, blue fish. " * 40)
    job, machine = tmp_path / "job.toml", tmp_path / "four.toml"
    job.write_text(
        '[model]\nname = "gpt"\nlayers = 2\nd_model = 32\nheads = 4\n'
        f'[data]\nsource = "{tmp_path}/text.txt"\nsequence = 16\nvalidation = 0.0\n'
        f"[train]\n{train}\nglobal_batch = 64\n"
    )
    machine.write_text('[[hosts]]\ndevice = "h100"\ncount = 1\nnumber = 4\nprice = 20\n')
    answer_for(job, [], Options(str(machine), budget="450USD"), True, None)
    told = json.loads(capsys.readouterr().out)
    assert told["cluster"]["devices"] == 2 and told["hours"] == pytest.approx(10, rel=1e-3), "two hosts for ten hours"
    assert told["price"] == pytest.approx(400, rel=1e-3) and told["steps"] * told["seconds"] >= 36000
    assert told["kwh"] == pytest.approx(2 * 10 * 0.7, rel=1e-3)
    with pytest.raises(UserError, match=r"the cheapest takes 200\.\d USD"):
        answer_for(job, [], Options(str(machine), budget="150USD"), True, None)


def slow(ranks: int = 2) -> Cluster:
    """Ranks that take long to exchange gradients."""
    found = machine(ranks)
    host = found.hosts[0]
    device = replace(host.device, flops={"fp32": 1e11, "bf16": 1e11})
    return replace(found, hosts=(replace(host, device=device, inside=Link(1e-5, 1e7)),))


ALONE = {"name": "auto", "tp": 1, "pp": 1, "cp": 1, "zero": 0}
"""A plan of which replicas, and where experts lie, are left to find."""
EXPERTS = {"experts": 4, "per_token": 1, "d_ff": 512, "balance_loss": 0.0, "z_loss": 0.0}


def test_what_an_engine_refuses_beside_the_job_is_no_answer(settled: Callable[..., Settled]) -> None:
    """Norms by name of experts that only some ranks have, and statistics of the global batch of parts of rows."""
    own = settled(ALONE, layers=2, moe=EXPERTS)
    assert asked(own, slow()).plan.ep == 2
    normed = replace(own, job=replace(own.job, run=replace(own.job.run, norms_every=5)))
    assert asked(normed, slow()).plan.ep == 1
    with pytest.raises(UserError, match=r"norms_every takes gradients that all ranks have alike, and plan\.ep = 2"):
        pinning = settled({**ALONE, "ep": 2}, layers=2, moe=EXPERTS)
        asked(replace(pinning, job=replace(pinning.job, run=normed.job.run)), slow())
    cut = settled({"name": "auto", "cp": 2}, layers=2)
    assert asked(cut, machine(2)).plan.cp == 2
    with pytest.raises(UserError, match="does not go with sync_bn"):
        asked(replace(cut, job=replace(cut.job, train=replace(cut.job.train, sync_bn=True))), machine(2))
    with pytest.raises(UserError, match="routers with balance_rate follow the counts of all of them"):
        asked(settled({**ALONE, "exchange": "local_sgd"}, layers=2, moe={**EXPERTS, "balance_rate": 0.1}), slow())


def test_an_exchange_that_is_refused_leaves_the_others(settled: Callable[..., Settled]) -> None:
    """All twelve candidates averaged weights, which these masters do not keep whole: no plan was found. Replicas that
    are to vote on what they hold met a refusal in the run itself."""
    own = settled({**ALONE, "allow": ["local_sgd"]}, layers=2)
    assert asked(own, slow()).plan.exchange == "local_sgd"
    split = replace(own.job.train, precision={"name": "bf16", "master": "split"})
    assert asked(replace(own, job=replace(own.job, train=split)), slow()).plan.exchange == "allreduce"
    votes = replace(own.job.run, verify_every=2)
    assert asked(replace(own, job=replace(own.job, run=votes)), slow()).plan.exchange == "allreduce"


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., Path]:
    """A job whose blocks are faster where they are compiled, in the long run."""
    (tmp_path / "text.txt").write_text("one fish, two fish, red fish, blue fish. " * 400)

    def job(dropout: float = 0.0) -> Path:
        path = tmp_path / "job.toml"
        path.write_text(
            f'[model]\nname = "gpt"\nlayers = 8\nd_model = 512\nheads = 16\ndropout = {dropout}\n'
            'positions = "rotary"\nnorm = "rmsnorm"\nmlp = "swiglu"\n'
            f'[data]\nsource = "{tmp_path}/text.txt"\nsequence = 256\nvalidation = 0.0\n'
            '[train]\nsteps = 10000000\nglobal_batch = 32\nmicrobatch = 16\nprecision = "bf16"\n'
        )
        return path

    return job


def test_a_budget_is_kept_by_the_plan_that_is_confirmed(
    compiled: Callable[..., Path], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest has compiled blocks, which it turns out that these are not."""
    job, machine = compiled(), tmp_path / "one.toml"
    machine.write_text('[[hosts]]\ndevice = "h100"\ncount = 1\nnumber = 1\nprice = 20\nbandwidth = 3e11\n')

    def told(budget: str) -> dict[str, Any]:
        answer_for(job, [], Options(str(machine), budget=budget), True, None)
        return json.loads(capsys.readouterr().out)

    first = told("1000000USD")
    assert first["plan"]["compile"]
    monkeypatch.setattr(answer, "why_not_compiled", lambda _: "a block breaks")
    with pytest.raises(UserError, match=r"the cheapest takes [0-9.,]+ USD") as error:
        told(f"{1.02 * first['price']:.2f}USD")
    enough = re.search(r"takes ([0-9.,]+) USD", str(error.value))[1]  # type: ignore[index]
    found = told(f"{enough}USD")
    assert first["price"] < found["price"] <= float(enough.replace(",", ""))
    assert not found["plan"].get("compile") and found["not_compiled"] == "a block breaks"


@pytest.mark.parametrize(
    ("refused", "said"), [((), "takes 51.00 USD"), ((1,), "takes 52.00 USD"), ((1, 2), "2 hosts are too small")]
)
def test_the_price_that_is_said_to_be_enough_is_confirmed(
    refused: tuple[int, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was that of a plan that no dry run had been asked for, and as much was refused again, with a higher one."""

    def place(_: Any, part: Task) -> SimpleNamespace:
        if (hosts := len(part.cluster.hosts)) in refused:
            raise UserError(f"{hosts} hosts are too small")
        return SimpleNamespace(price=50.0 + hosts)

    monkeypatch.setattr(auto, "placed", place)
    monkeypatch.setattr(auto, "searched", lambda settled, asked: (asked, [], ""))
    with pytest.raises(UserError, match=said):
        auto._within(0.001, "", SimpleNamespace(steps_of=lambda _: 1000), task())  # type: ignore[arg-type]


def test_blocks_stay_as_they_are_written_where_graphs_cannot_do_what_is_pinned(
    compiled: Callable[..., Path], capsys: Any
) -> None:
    """Nobody has asked for compiled ones: the planner's own choice was refused, with a remedy against it."""
    job, selective = compiled(dropout=0.1), ["recompute=selective"]
    answer_for(job, [], Options("1xh100", selective), True, None)
    assert json.loads(capsys.readouterr().out)["plan"] == {"recompute": "selective"}
    with pytest.raises(UserError, match=r"it draws numbers .*: take \"full\", or compile = false"):
        answer_for(job, [], Options("1xh100", [*selective, "compile=true"]), True, None)


def test_money() -> None:
    assert money("40000USD") == (40000, "USD") and money(" 40,000.5 ") == (40000.5, "") and money("7 eur") == (7, "eur")
    assert money("40000€") == (40000, "€") and money("5 Swiss francs ") == (5, "Swiss francs")
    for text in ("much", "-5USD", "nanUSD", "infUSD", "1,5", "40_000", "0", "0.0USD", "USD", "", "1e5", "9" * 400):
        with pytest.raises(UserError, match="give an amount above 0 in digits"):
            money(text)


def test_a_step_has_no_more_rows_than_there_are(settled: Callable[..., Settled]) -> None:
    """A batch of all of 97 rows was priced as one of 50,000."""
    own = settled()
    there = len(own.data.train)
    for batch, ranks, rows in ((8, 4, 8), (50_000, 4, there), (50_000, 2 * there, 2 * there), (3, 4, 3)):
        train = replace(own.job.train, global_batch=batch)
        asked_of = replace(own, job=replace(own.job, train=train))
        assert task_of(asked_of, machine(ranks), {"tp": 1, "cp": 1, "ep": 1}).rows == rows


def test_a_microbatch_that_no_step_has_is_refused_as_by_the_run(settled: Callable[..., Settled]) -> None:
    own = settled()
    train = replace(own.job.train, microbatch=9)
    with pytest.raises(UserError, match=r"train.microbatch = 9: give 1 to global_batch \(8\) samples"):
        opened(replace(own.job, train=train), own.origins)
