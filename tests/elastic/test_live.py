"""Faults in real jobs: who is left goes on in its process and from its memory, and the losses are those of a run that
nothing disturbed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import pytest

from shoal.chaos.nodes import ranks_of
from shoal.chaos.verdict import batches_of, check_samples, read_dealt
from shoal.elastic.nodes import SECRET
from shoal.jobs.drill import VARIABLE as DRILL
from shoal.jobs.plans import kept
from shoal.jobs.read import load_job
from shoal.replace import replace_text
from shoal.report.jsonl import read_lines
from tests.cli.conftest import train_here
from tests.elastic.test_nodes import Cli, records, steps_done, until, write_job

STEPS, BATCH = 400, 24
PACE, LEFT = 0.05, 40
"""Seconds before each step while ranks are missed, and the steps at the end that wait until all have come."""


@dataclass
class Run:
    """A job in a folder of its own, and the nodes that train it."""

    folder: Path
    nodes: list[Cli]
    steps: int = STEPS

    def __post_init__(self) -> None:
        job = write_job(self.folder, self.steps, 0)
        text = job.read_text().replace("global_batch = 8", f"global_batch = {BATCH}")
        job.write_text(text.replace("layers = 1", "layers = 2"))

    def start(self, *sets: str, nodes: str = "1", ranks: int = 4) -> Run:
        assigned = [part for each in sets for part in ("--set", each)]
        self.nodes.append(Cli(self.folder, "job.toml", "--nodes", nodes, "--nproc", str(ranks), *assigned))
        return self

    def join(self, ranks: int) -> Cli:
        port = self.nodes[0].wait_for(r"--join 127.0.0.1:(\d+)")[1]
        secret = self.folder / "runs/job" / SECRET
        self.nodes.append(Cli(self.folder, "--join", f"127.0.0.1:{port}", "--nproc", str(ranks), secret=secret))
        return self.nodes[-1]

    def ranks(self, node: int = 0) -> list[psutil.Process]:
        """The processes of a node, in the order in which they started: that of their ranks in the first generation."""
        return ranks_of(self.nodes[node].process.pid)

    def slowly(self) -> None:
        """Slows the ranks down, so that the run is not over before another rank has come."""
        replace_text(self.folder / "drill/pace", f"{PACE} {self.steps - LEFT}")

    def fast(self) -> None:
        """Slows the ranks down no more."""
        (self.folder / "drill/pace").unlink()

    def trains(self, more: int = 20, world: int | None = None, seconds: float = 60) -> None:
        """Waits until so many more steps are done, by a world of that size, which is there in so many seconds."""
        if world is not None:
            until(lambda: self.worlds[-1:] == [world], seconds)
        before = steps_done(self.folder)
        until(lambda: steps_done(self.folder) >= before + more, seconds)

    @property
    def worlds(self) -> list[int]:
        with suppress(Exception):
            return [each.world for each in records(self.folder).memberships]
        return []

    def ends(self, node: int = 0) -> None:
        assert self.nodes[node].process.wait(240) == 0, self.nodes[node].said


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    made = Run(tmp_path, [], getattr(request, "param", STEPS))
    (tmp_path / "drill").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DRILL, str(tmp_path / "drill"))  # so that ranks tell which samples they train
        yield made
    for node in made.nodes:
        node.process.kill()
        node.process.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[float]]:
    """Returns the losses of the job of so many steps on one rank: this process, with a whole batch at a time."""

    @cache
    def losses(steps: int) -> list[float]:
        alone = Run(tmp_path_factory.mktemp("undisturbed"), [], steps)
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(DRILL, raising=False)
            patch.setenv("XDG_CACHE_HOME", str(alone.folder / "cache"))
            patch.chdir(alone.folder)
            train_here(Path("job.toml"), f"train.microbatch={BATCH}")
        return [each.loss for each in records(alone.folder).steps]

    return losses


def kill(*ranks: int) -> Callable[[Run], None]:
    def strike(run: Run) -> None:
        found = run.ranks()
        for rank in ranks:
            found[rank].kill()

    return strike


def stop(run: Run) -> None:
    run.ranks()[2].suspend()


def kill_in_a_save(run: Run) -> None:
    folder = run.folder / "runs/job/checkpoints"
    until(lambda: folder.is_dir() and any(each.suffix for each in folder.iterdir() if not each.name.isalnum()), 30)
    run.ranks()[1].kill()


def kill_again_while_they_go_on(run: Run) -> None:
    found = run.ranks()
    found[3].kill()
    run.nodes[0].wait_for("generation 2")
    found[1].kill()


def kill_the_new_one_while_it_joins(run: Run) -> None:
    run.ranks()[3].kill()
    run.nodes[0].wait_for("generation 3")
    run.ranks()[-1].kill()


def kill_while_no_file_is_replaced(run: Run) -> None:
    """As on a full disk, for what a generation writes of itself: rank 0 is another one then."""
    for name in ("run.lock.tmp", "resolved.toml.tmp"):
        (run.folder / "runs/job" / name).mkdir()
    run.ranks()[0].kill()


@dataclass
class Row:
    """Faults of a node with four ranks. `lost`: whether steps are trained again. `sets`, `steps`: of the job."""

    strike: Callable[[Run], None]
    sets: tuple[str, ...] = ()
    lost: bool = False
    survivors: int = 3
    steps: int = STEPS


ROWS = {
    "a rank": Row(kill(2)),
    "rank 0": Row(kill(0), steps=150),
    "rank 0, and no file is replaced": Row(kill_while_no_file_is_replaced),
    "a stopped rank": Row(stop),
    "two at once": Row(kill(1, 2), survivors=2),
    "another while they go on": Row(kill_again_while_they_go_on, survivors=2),
    "the new one while it joins": Row(kill_the_new_one_while_it_joins, steps=700),
    "in a save": Row(kill_in_a_save, ("run.save_every=10",)),
    "rank 0 in evaluations": Row(kill(0), ("run.eval_every=1",)),
    "tensor parallel": Row(kill(3), ("plan.tp=2",)),
    "stages": Row(kill(1), ("plan.pp=2",)),
    "its shard is gone": Row(kill(2), ("plan.zero=1", "run.save_every=25"), lost=True),
    "its shard is with its buddy": Row(kill(2), ("plan.zero=3", "plan.buddy=2")),
    "votes, and a buddy": Row(kill(1), ("plan.pp=2", "plan.buddy='auto'", "run.verify_every=5")),
    "others cannot go on": Row(kill(2), ("plan.exchange={name='hierarchical', ranks_per_host=2}",)),
    "all at once": Row(kill(0, 1, 2, 3), ("run.save_every=25",), lost=True, survivors=0),
}


def steps_written(folder: Path) -> list[int]:
    lines, _ = read_lines(folder / "runs/job/metrics.jsonl")
    return [line["step"] for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize(
    ("row", "run"),
    [
        pytest.param(row, row.steps, marks=[pytest.mark.matrix] * (name != "rank 0"), id=name)
        for name, row in ROWS.items()
    ],
    indirect=["run"],
)
def test_the_others_go_on_in_memory_and_a_new_process_joins_them(row: Row, run: Run, undisturbed):
    run.start(*row.sets)
    run.trains(60, world=4)
    before = run.ranks()
    row.strike(run)
    run.slowly()
    run.trains(20, world=4)
    run.fast()
    after = run.ranks()
    assert len(set(after) & set(before)) == row.survivors
    run.ends()
    found = records(run.folder)
    assert [each.step for each in found.steps] == list(range(1, run.steps + 1))
    assert [each.loss for each in found.steps] == pytest.approx(undisturbed(run.steps), rel=1e-5)
    assert any(each.lost for each in found.memberships) == row.lost
    dealt = read_dealt(run.folder / "drill")
    shared = check_samples(dealt, run.steps, batches_of(dealt))
    assert shared.passed, shared.text
    if not row.lost:
        assert steps_written(run.folder) == list(range(1, run.steps + 1))
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in {*before, *after})


def same(run: Run, undisturbed: Callable[[int], list[float]]) -> None:
    """The run is complete, in memory all along, and its losses are those of an undisturbed one."""
    found = records(run.folder)
    assert steps_written(run.folder) == list(range(1, run.steps + 1))
    assert [each.loss for each in found.steps] == pytest.approx(undisturbed(run.steps), rel=1e-5)
    assert not any(each.lost for each in found.memberships)


@pytest.mark.matrix
@pytest.mark.parametrize("run", [1500], indirect=True)
def test_a_plan_that_was_changed_while_it_trained_stays_when_a_rank_is_killed(run: Run, undisturbed):
    run.start()
    run.trains(20, world=4)
    asked = [sys.executable, "-m", "shoal.cli", "replan", "runs/job", "--set", "plan.tp=2"]
    done = subprocess.run(asked, cwd=run.folder, capture_output=True, text=True)
    assert done.returncode == 0 and "tp=2" in done.stdout.replace(" ", ""), done.stdout + done.stderr
    run.trains(10, world=4)
    run.ranks()[2].kill()
    until(lambda: run.worlds[-2:] == [3, 4], 60)
    resolved = load_job(run.folder / "runs/job/resolved.toml", [])[0]
    assert (resolved.plan.tp, resolved.plan.dp) == (2, 2)
    run.ends()
    assert any("3 ranks are no multiple of 2" in line for line in run.nodes[0].said.splitlines())
    same(run, undisturbed)
    assert kept(run.folder / "runs/job") == {}


@pytest.mark.matrix
def test_the_planner_is_asked_by_each_generation(run: Run, undisturbed):
    """Nodes join, and a rank is killed: each number of ranks has the plan that is found for it."""
    run.slowly()
    run.start("plan=auto", "plan.buddy='auto'", nodes="1:2", ranks=2)
    run.trains(10, world=2, seconds=300)  # the planner traces the model in each generation
    run.join(1)
    run.trains(20, world=3, seconds=300)
    before = run.ranks()
    before[1].kill()
    until(lambda: run.worlds[-3:] == [3, 2, 3], 300)
    run.trains(20, world=3)
    assert before[0] in run.ranks()
    job = load_job(run.folder / "runs/job/resolved.toml", [])[0]
    assert job.plan.size == 3 and job.plan.buddy == "auto"
    run.fast()
    run.ends()
    told = re.findall(r"^plan: .*", run.nodes[0].said, re.MULTILINE)
    assert len(told) == len(run.worlds) and told[-1].startswith("plan: dp = 3")
    same(run, undisturbed)


@pytest.mark.matrix
@pytest.mark.parametrize("coordinates", [True, False])
def test_the_ranks_of_a_node_that_is_killed_are_missed_and_no_more(coordinates: bool, run: Run, undisturbed):
    run.start(nodes="1:2", ranks=2)
    run.trains(10, world=2)
    other = run.join(2)
    run.trains(20, world=4)
    gone, left = (0, 1) if coordinates else (1, 0)
    before = run.ranks(left)
    run.nodes[gone].process.kill()
    run.trains(20, world=2)
    assert run.ranks(left) == before
    run.ends(left)
    assert other.process.poll() is not None or not coordinates
    same(run, undisturbed)


@pytest.mark.matrix
def test_a_node_whose_ranks_are_too_many_holds_the_others_for_a_moment_and_trains_once_another_has_come(
    run: Run, undisturbed
):
    run.slowly()
    run.start("plan.exchange={name='hierarchical', ranks_per_host=2}", nodes="1:3", ranks=2)
    run.trains(10, world=2)
    before = run.ranks()
    run.join(1).wait_for(r"3 rank\(s\) with those of .* could not go on")
    run.trains(20, world=2, seconds=60)
    assert run.ranks() == before
    run.join(1)
    run.trains(20, world=4)
    run.fast()
    run.ends()
    same(run, undisturbed)


@pytest.mark.matrix
def test_nodes_come_and_leave_between_two_steps(run: Run, undisturbed):
    run.start(nodes="1:3", ranks=1)
    run.trains(10, world=1)
    first = run.ranks()
    other = run.join(2)
    run.trains(20, world=3)
    for rank in (*first, *run.ranks(1)):
        rank.send_signal(signal.SIGTERM)  # a notice to all processes of a node is its supervisor's
    run.trains(20, world=3)
    other.process.send_signal(signal.SIGTERM)
    assert other.process.wait(30) == 143
    run.trains(20, world=1)
    assert run.ranks() == first
    run.nodes[0].process.send_signal(signal.SIGINT)
    assert run.nodes[0].process.wait(30) == 130
    saved = records(run.folder).checkpoints[-1].step
    assert saved == steps_done(run.folder) > 50
