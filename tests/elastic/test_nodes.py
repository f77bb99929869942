"""The nodes of a real job: what is refused, the plan of any number of ranks, and training across changes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from shoal.cli import start
from shoal.cli.start import arrange, start_nodes
from shoal.elastic import nodes
from shoal.elastic.control import JOB as JOB_ID
from shoal.elastic.control import Place
from shoal.elastic.messages import Admitted, Ask, Drain, Start
from shoal.errors import UserError
from shoal.jobs import choose
from shoal.jobs.choose import Settled, under
from shoal.jobs.config import Job, Train
from shoal.jobs.generation import placed, record_of, resuming
from shoal.jobs.lock import Holder, refuse_if_taken
from shoal.jobs.plans import forget, keep, kept
from shoal.jobs.ranks import ASKED, fitted
from shoal.jobs.read import load_job, parse_job
from shoal.jobs.replan import Replanner
from shoal.plan import Plan
from shoal.report.metrics import RunRecords, read_metrics
from tests.caches import cache_in

JOB = """
[model]
name = "gpt"
layers = 1
d_model = 16
heads = 2
[data]
source = "corpus"
sequence = 16
validation = 0.2
[train]
steps = {steps}
global_batch = 8
microbatch = 2
lr = 1e-3
optimizer = {{name = "sgd", momentum = 0.9}}
schedule = "constant"
warmup = 0
[run]
trackers = []
nproc = 1
save_every = {every}
"""


@pytest.mark.fast
def test_the_line_by_which_nodes_join_is_one_for_a_shell() -> None:
    said = nodes.join_line(("10.0.0.1", 41467), Path("/home/me/my runs/job's/join.secret"))
    secret = "SHOAL_SECRET_FILE=/home/me/my runs/job's/join.secret"
    assert shlex.split(said) == [secret, "shoal", "train", "--join", "10.0.0.1:41467"]
    assert nodes.join_line(("::1", 41467), None) == "shoal train --join ::1:41467"
    assert nodes._place("::1:41467") == ("::1", 41467)


@pytest.mark.fast
@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(tp=4, pp=2),
        Plan(dp=2, tp=2, zero=3),
        Plan(dp=4, ep=4),
        Plan(dp=4, shard=2, zero=2),
        Plan(cp=2, tp=2, ep=2),
    ],
)
def test_every_number_of_ranks_from_1_to_64_has_a_plan(plan: Plan):
    inner = plan.size // plan.dp
    for size in range(1, 65):
        found = plan.fitted(size)
        found.check_groups()
        assert found.size == size
        if size % inner == 0:
            assert (found.tp, found.cp, found.pp) == (plan.tp, plan.cp, plan.pp)
        assert replace(found, dp=1, tp=1, cp=1, pp=1, ep=1, shard=None, zero=0) == replace(Plan(), memory=plan.memory)


@pytest.mark.fast
def test_the_nearest_degrees_are_said():
    job = Job({"name": "gpt"}, Train(steps=1), plan=Plan(tp=2))
    assert fitted(job, 4) == (["plan.dp=2"], "")
    assert fitted(job, 3) == (
        ["plan.dp=3", "plan.tp=1"],
        "3 ranks are no multiple of 2, so this generation has plan.tp=1",
    )
    none, _ = parse_job({"model": {"name": "gpt"}, "train": {"steps": 1}})
    assert fitted(none, 3) == ([], "") and fitted(none, 4, {"tp": 2}) == (["plan.dp=2", "plan.tp=2"], "")
    asking, _ = parse_job({"model": {"name": "gpt"}, "train": {"steps": 1}, "plan": {"name": "auto", "tp": 2}})
    assert fitted(asking, 4) == ([], "")
    assert fitted(asking, 3) == ([ASKED, "plan.tp=1"], "3 ranks are no multiple of 2, so this generation has plan.tp=1")
    assert fitted(replace(asking, plan=Plan(dp=2)), 3) == ([ASKED, "plan.dp=3"], "")
    at = replace(job, run=replace(job.run, at=[{"step": 1, "plan": {"tp": 1}}]))
    with pytest.raises(UserError, match=r"run.at with --nodes"):
        fitted(at, 2)


@pytest.mark.fast
def test_what_so_many_ranks_cannot_have_is_left_out_and_said():
    """Else who joins, or is killed, ends the job: the planner was asked for experts on ranks that ep does not fit."""

    def said(size: int, change: dict[str, Any] | None = None, **plan: Any) -> tuple[list[str], str]:
        return fitted(parse_job({"model": {"name": "gpt"}, "train": {"steps": 1}, "plan": plan})[0], size, change)

    for given in ({"ep": 2}, {"shard": 2}, {"shares": [3, 1]}):
        assert said(2, name="auto", **given) == said(4, name="auto", **given) == ([], "")
    assert said(3, name="auto", ep=2) == (
        [ASKED, "plan.ep=1"],
        "3 ranks cannot have plan.ep=2, so this generation has plan.ep=1",
    )
    assert said(3, name="auto", shard=2)[0] == [ASKED, "plan.shard=1"]
    assert said(3, name="auto", shares=[3, 1])[0] == [ASKED, "plan.shares=[]"]
    assert said(2, shares=[3, 1]) == (["plan.dp=2"], "")
    assert said(3, shares=[3, 1])[1] == "3 ranks cannot have plan.shares=[3, 1], so this generation has plan.shares=[]"
    args, why = said(3, pp=2, stages=[1, 1])
    assert args == ["plan.dp=3", "plan.pp=1", "plan.stages=none"] and why.endswith("plan.pp=1, plan.stages=none")
    stages = {"model": {"name": "gpt"}, "train": {"steps": 1}, "plan": {"pp": 2, "stages": [1, 1]}}
    assert parse_job(stages, args)[0].plan == Plan(dp=3)
    assert said(3, {"zero": 3, "shard": 2})[0] == ["plan.dp=3", "plan.shard=1", "plan.zero=3"]


@pytest.mark.fast
def test_what_nodes_cannot_have_is_refused_before_one_starts(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB.format(steps=9, every=0))
    at = ["run.nproc=1", "run.at=[{step=2, plan={zero=1}}]"]
    with pytest.raises(UserError, match=r"run.at with --nodes"):
        start_nodes(tmp_path / "job.toml", at, "1", None)
    assert [each.name for each in tmp_path.iterdir()] == ["job.toml"]


@pytest.mark.fast
def test_the_plan_of_a_job_follows_the_ranks_of_the_first_node_too(tmp_path: Path, monkeypatch):
    """Also that of the resolved.toml of a run of other ranks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB.format(steps=9, every=0) + "[plan]\ndp = 8\nzero = 3\n")
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(start, "found", lambda *args: started.append(args) or 0)
    assert start_nodes(tmp_path / "job.toml", ["run.nproc=2"], "1:4", None) == 0
    [(program, limits, here, _, arranging)] = started
    assert (limits, here, arranging(program.arguments, here)) == ((1, 4), 2, (["plan.dp=2"], ""))


@pytest.mark.fast
def test_a_plan_that_was_changed_while_it_trained_is_that_of_later_generations_too(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB.format(steps=9, every=0))
    arguments = ["-m", "shoal.jobs", str(tmp_path / "job.toml"), "plan.tp=2"]
    assert arrange(arguments, 4) == (["plan.dp=2"], "")
    folder = tmp_path / load_job(tmp_path / "job.toml", [])[0].run.dir
    folder.mkdir(parents=True)
    keep(folder, {"dp": 4, "tp": 1})
    keep(folder, {"zero": 3, "memory": {"device": "1GiB"}, "recompute": "all"})
    args, said = arrange(arguments, 4)
    job, _ = load_job(tmp_path / "job.toml", [*arguments[3:], *args])
    assert job.plan == Plan(dp=4, tp=1, zero=3, memory={"device": "1GiB"}, recompute="all") and said == ""
    keep(folder, {"tp": 2})
    assert arrange(arguments, 3)[1] == "3 ranks are no multiple of 2, so this generation has plan.tp=1"
    keep(folder, {"memory": "none"})
    args, said = arrange([*arguments, 'plan.memory={device = "1GiB"}'], 4)
    given = ['plan.memory={device = "1GiB"}', *args]
    assert load_job(tmp_path / "job.toml", given)[0].plan.memory is None and said == ""
    keep(folder, {"no such": 1})
    args, said = arrange(arguments, 4)
    assert args == ["plan.dp=2"] and said.startswith("the plan is that of the job file again: plan has no field")
    forget(folder)
    assert kept(folder) == {} and arrange(arguments, 4) == (["plan.dp=2"], "")


@pytest.mark.fast
def test_a_plan_of_the_planner_that_was_changed_by_hand_is_that_of_later_generations_whole(tmp_path: Path, monkeypatch):
    """Not data parallelism with what was changed, of which the planner is asked again, with trials."""
    monkeypatch.chdir(tmp_path)
    text = JOB.format(steps=9, every=0).replace("microbatch = 2\n", "").replace("validation = 0.2", "validation = 0")
    text = text.replace('"corpus"', '"corpus.txt"')
    (tmp_path / "job.toml").write_text(f'{text}[plan]\nname = "auto"\nmeasure = 3\n')
    arguments = ["-m", "shoal.jobs", str(tmp_path / "job.toml")]
    (tmp_path / "corpus.txt").write_text("a text that is long enough for a row or two " * 9)
    opened = choose.opened(*load_job(tmp_path / "job.toml", []))
    folder = Path(opened.job.run.dir)
    folder.mkdir(parents=True)
    said: list[str] = []

    def replanned(settled: Settled, before: Plan, change: dict[str, Any], size: int) -> Settled:
        """The job in the next generation, of so many ranks, after a hand has changed the plan."""
        plan = before.changed(change, 2)
        own: Any = SimpleNamespace(_settled=settled, _engine=SimpleNamespace(plan=plan), _run_dir=folder)
        Replanner._keep(own, change)
        args, why = arrange(arguments, size)
        said.append(why)
        place = Place.of(Start(2, 0, size, size, "127.0.0.1", 1, 2, "", 3, [], True, args), 0, 1, "secret")
        return placed(opened, arguments[2], [], place)

    found = Plan(pp=2, schedule="zb1p", stages=[1, 1])
    later = replanned(under(opened, found, 4), found, {"recompute": "full"}, 2)
    job = later.job
    assert later.origins["train.microbatch"] == "planner", "as resolved.toml says"
    assert job.plan == replace(found, recompute="full") and job.train.microbatch == 4
    assert not job.auto.wanted and not job.auto.measure, "what a hand has changed is not searched again"
    alone = replanned(replace(opened, job=job), job.plan, {"zero": 1}, 1).job
    assert alone.plan == Plan(zero=1, recompute="full", schedule="zb1p") and alone.train.microbatch == 4
    flat = replanned(replace(opened, job=job), job.plan, {"pp": 1, "schedule": "1f1b"}, 4).job
    assert flat.plan == Plan(dp=4, recompute="full") and said[0] == said[2] == "" and "plan.pp=1" in said[1]


@pytest.mark.fast
def test_the_planner_is_asked_around_what_is_given_by_any_number_of_ranks(tmp_path: Path):
    text = JOB.format(steps=9, every=0).replace("validation = 0.2", "validation = 0")
    path = tmp_path / "job.toml"
    path.write_text(text.replace("corpus", str(tmp_path / "corpus.txt")) + '[plan]\nname = "auto"\npp = 2\n')
    (tmp_path / "corpus.txt").write_text("a text that is long enough for a row or two " * 9)
    settled = choose.opened(*load_job(path, []))
    for size, degrees in ((1, Plan()), (2, Plan(pp=2)), (3, Plan(dp=3)), (4, Plan(dp=2, pp=2))):
        args, _ = arrange(["-m", "shoal.jobs", str(path)], size)
        place = Place.of(Start(2, 0, size, size, "127.0.0.1", 1, 2, "", 3, [], True, args), 0, 1, "secret")
        found = choose.at_size(placed(settled, str(path), [], place), choose.Sizes(size, 1))
        assert replace(found.job.plan, stages=None) == degrees and found.job.auto.wanted


@pytest.mark.fast
def test_what_follows_from_the_generation(tmp_path: Path):
    start = Start(3, 0, 4, 4, "127.0.0.1", 1, 2, "b is gone", 17, ["b is gone: silent"], False, [])
    job = Job({"name": "gpt"}, Train(steps=1))
    never = replace(job, run=replace(job.run, resume="never", dir=str(tmp_path)))
    place = Place.of(start, 2, 3, "secret")
    assert (place.rank, place.slot, place.here, place.size) == (2, 3, 4, 4)
    assert record_of(place, 10).lost == 7 and record_of(place, 20).lost == 0
    assert record_of(place, 17, "why").events == ["b is gone: silent", "why"]
    assert resuming(never, 1) == never
    assert resuming(never, 3).run.resume == "auto"  # its own run is what a later generation goes on with
    other = replace(job, run=replace(job.run, resume="elsewhere", dir=str(tmp_path)))
    assert resuming(other, 3).run.resume == "elsewhere"  # it has no checkpoint of its own yet


@pytest.mark.fast
def test_a_later_generation_takes_the_directory_over_from_another_host(tmp_path: Path, monkeypatch):
    lock = {"host": "a-host-that-vanished", "pid": 1, "started": 0.0, "taken": 1, "job": "id"}
    (tmp_path / "run.lock").write_text(json.dumps(lock))
    with pytest.raises(UserError, match="a-host-that-vanished"):
        refuse_if_taken(tmp_path)
    monkeypatch.setenv(JOB_ID, "id")
    refuse_if_taken(tmp_path)
    assert Holder.here().job == "id"
    monkeypatch.setenv(JOB_ID, "another")
    with pytest.raises(UserError, match="a-host-that-vanished"):
        refuse_if_taken(tmp_path)


@pytest.mark.fast
def test_addresses_of_interfaces(tmp_path: Path):
    assert nodes.address_of(None) == nodes.address_of("lo") == nodes.address_of("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UserError, match=r"--host eth99: .* it has .*lo"):
        nodes.address_of("eth99")
    for wrong in ("here", "host:", ":1", "host:99999", "host:x"):
        with pytest.raises(UserError, match="--join"):
            nodes.join(wrong, 1, None, lambda program, size: ([], ""))


@pytest.mark.fast
def test_a_node_that_does_not_see_the_job_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text("x")
    job = Admitted("a", 0, [], str(tmp_path), "", str(tmp_path / "job.toml"), nodes.digest(tmp_path / "job.toml"), 1, 1)
    nodes._check(job)
    with pytest.raises(UserError, match="another file here"):
        nodes._check(replace(job, digest="0"))
    for lacking in (replace(job, cwd="/no/such"), replace(job, file=str(tmp_path / "none"))):
        with pytest.raises(UserError, match="need to see its folder"):
            nodes._check(lacking)


@pytest.mark.fast
def test_what_is_changed_in_the_job_file_while_the_job_runs_reaches_none_of_its_processes(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "job.toml"
    file.write_text("lr = 1")
    program = nodes.Program(["-m", "shoal.jobs", str(file), "a=1"], file, tmp_path / "run")
    job = nodes._admitted(program, (1, 2))
    file.write_text("lr = 2")
    assert Path(job.program[2]).read_text() == "lr = 1" and job.program[3:] == ["a=1"]
    nodes._check(job)
    again = nodes._admitted(program, (1, 2))  # the next start
    assert Path(again.program[2]).read_text() == "lr = 2" and Path(job.program[2]).read_text() == "lr = 1"


@pytest.mark.fast
def test_the_secret_of_a_job_is_its_user_s_alone(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("SHOAL_SECRET", raising=False)
    secret = nodes._secret(tmp_path / "run")
    path = tmp_path / "run" / nodes.SECRET
    assert path.read_text().encode() == secret and path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("SHOAL_SECRET_FILE", str(path))
    assert nodes.find_secret() == secret == nodes._secret(tmp_path / "other") and not (tmp_path / "other").exists()


@pytest.mark.fast
def test_what_ctrl_c_at_a_node_asks_for(tmp_path: Path, monkeypatch):
    """At the first one, that the job ends. Any other leaves, and says by what: it may be the last one that is left."""
    told = list[Any]()

    async def supervise(secret: bytes, ranks: int, begin: Any, arranged: Any, asks: Any, *_: Any, **__: Any) -> int:
        told.append(asks)
        return 0

    monkeypatch.setattr(nodes, "_supervise", supervise)
    monkeypatch.setenv("SHOAL_SECRET", "0" * 64)
    (tmp_path / "job.toml").write_text("")
    program = nodes.Program([], tmp_path / "job.toml", tmp_path / "run")
    nodes.found(program, (1, 2), 1, None, arrange)
    nodes.join("127.0.0.1:4000", 1, None, arrange)
    nodes.found_or_join(program, (1, 2), 1, None, arrange, "etcd://127.0.0.1/one")
    nodes.join("etcd://127.0.0.1/one", 1, None, arrange)
    assert told == [Ask(signal.SIGINT), *[Drain(signal.SIGINT)] * 3]


def write_job(folder: Path, steps: int, every: int) -> Path:
    (folder / "corpus").mkdir()
    for number in range(20):
        text = "\n".join(f"{number} + {i} = {number + i}" for i in range(40))
        (folder / "corpus" / f"{number:02}.txt").write_text(text)
    (folder / "job.toml").write_text(JOB.format(steps=steps, every=every))
    return folder / "job.toml"


class Cli:
    """A node as the command line starts it."""

    def __init__(self, folder: Path, *args: str, prefix: tuple[str, ...] = (), secret: Path | None = None) -> None:
        self.out = folder / f"node{len(list(folder.glob('node*')))}.log"
        env = {**os.environ, "XDG_CACHE_HOME": cache_in(folder), "OMP_NUM_THREADS": "1"}
        env.pop("SHOAL_SECRET", None)
        if secret is not None:
            env["SHOAL_SECRET_FILE"] = str(secret)
        command = [*prefix, sys.executable, "-m", "shoal.cli", "train", *args]
        with self.out.open("wb") as file:
            self.process = subprocess.Popen(command, cwd=folder, env=env, stdout=file, stderr=file)

    @property
    def said(self) -> str:
        return self.out.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = 90.0) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while (found := re.search(text, self.said)) is None:
            assert time.monotonic() < deadline and self.process.poll() is None, f"no {text!r} in:\n{self.said}"
            time.sleep(0.05)
        return found

    def process_of(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def children(self) -> list[psutil.Process]:
        return self.process_of().children(recursive=True)


def records(folder: Path) -> RunRecords:
    return read_metrics(folder / "runs/job/metrics.jsonl")


def steps_done(folder: Path) -> int:
    with suppress(UserError):
        return max((each.step for each in records(folder).steps), default=0)
    return 0


def worlds(folder: Path) -> list[int]:
    """The numbers of ranks of the generations that have begun to train."""
    with suppress(UserError):
        return [each.world for each in records(folder).memberships]
    return []


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cli]]:
    started: list[Cli] = []

    def start(*args: str, **others) -> Cli:
        started.append(Cli(tmp_path, *args, **others))
        return started[-1]

    yield start
    for node in started:
        node.process.kill()
        node.process.wait()


def undisturbed(tmp_path: Path, steps: int) -> list[float]:
    """The losses of the same job on one rank."""
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    write_job(folder, steps, 0)
    node = Cli(folder, "job.toml")
    assert node.process.wait() == 0, node.said
    return [each.loss for each in records(folder).steps]


@pytest.mark.matrix
def test_nodes_join_drain_die_and_come_back_and_the_losses_are_those_of_an_undisturbed_run(cluster, tmp_path: Path):
    steps = 3000
    write_job(tmp_path, steps, 100)
    first = cluster("job.toml", "--nodes", "1:3")
    port = first.wait_for(r"--join 127.0.0.1:(\d+)")[1]
    secret = tmp_path / "runs/job" / nodes.SECRET
    join = ("--join", f"127.0.0.1:{port}", "--nproc", "1")
    until(lambda: steps_done(tmp_path) > 20)
    second = cluster(*join, secret=secret)
    first.wait_for("generation 2: 2 rank")
    until(lambda: worlds(tmp_path)[-1:] == [2])
    assert records(tmp_path).memberships[-1].lost == 0  # a joiner waits for a step boundary
    until(lambda: steps_done(tmp_path) > records(tmp_path).memberships[-1].step + 20)
    orphans = second.children()
    second.process.kill()
    first.wait_for("generation 3: 1 rank")
    until(lambda: not any(each.is_running() and each.status() != "zombie" for each in orphans), 5)
    third = cluster(*join, secret=secret)
    until(lambda: len(re.findall(r"shoal: generation \d: 2 rank", first.said)) > 1)
    generation = int(re.findall(r"generation (\d)", first.said)[-1])
    until(lambda: records(tmp_path).memberships[-1].generation == generation)
    third.process.send_signal(signal.SIGTERM)
    assert third.process.wait(30) == 143
    assert first.process.wait(200) == 0, first.said
    found = records(tmp_path)
    losses = [each.loss for each in found.steps]
    assert [each.step for each in found.steps] == list(range(1, steps + 1))
    assert losses == pytest.approx(undisturbed(tmp_path, steps), rel=1e-5)
    assert len(found.memberships) >= 5 and "2 ranks" in found.marks.values()
