"""Jobs on this host, as processes of their own: they outlive the command, and their directory knows what became of
them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from shoal.errors import UserError
from shoal.jobs.cluster.backend import NAME, State, Submitted, backend, find, jobs_in, submit
from shoal.jobs.cluster.request import Request
from shoal.jobs.cluster.table import Cluster

pytestmark = pytest.mark.fast
SECONDS = 20.0


@pytest.fixture
def start(commands: Callable[[str, str], None], tmp_path: Path) -> Iterator[Callable[..., Submitted]]:
    """Submits a job whose `shoal` is a shell script; what is left at the end is killed."""
    started: list[Submitted] = []

    def begin(script: str, name: str = "run", cluster: Cluster = Cluster()) -> Submitted:  # noqa: B008  # frozen
        commands("shoal", script)
        (tmp_path / "job.toml").write_text("[train]\n")
        request = Request(name, cluster, 1, tmp_path / name, tmp_path, tmp_path / "job.toml")
        started.append(submit(request, "local"))
        return started[-1]

    yield begin
    for job in started:
        with suppress(psutil.NoSuchProcess):
            keeper = psutil.Process(int(job.number))
            for process in [*keeper.children(recursive=True), keeper]:
                process.kill()
            keeper.wait()


def until(job: Submitted, seen: Callable[[State], bool]) -> State:
    deadline = time.monotonic() + SECONDS
    while not seen(state := backend("local").state(job)):
        assert time.monotonic() < deadline, state
        time.sleep(0.02)
    return state


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (0, State("ended", "exit code 0")),
        (5, State("failed", "exit code 5")),
        (143, State("stopped", "exit code 143")),
    ],
)
def test_the_end_of_a_job(start, code: int, state: State) -> None:
    job = start(f'echo "trains $@"; exit {code}')
    assert until(job, lambda state: not state.goes_on) == state
    assert backend("local").log(job) == f"trains train {job.run_dir}/job.toml --nproc 1\n"
    (event,) = backend("local").events(job)
    assert event.text == f"the job {state.word}: {state.detail}" and event.bad == (code == 5)


def test_a_job_is_stopped_and_saves_first(start) -> None:
    job = start('trap "sleep 0.2; echo saved; exit 143" TERM; echo began; while :; do sleep 0.01; done')
    while "began" not in backend("local").log(job):
        time.sleep(0.02)
    assert backend("local").state(job) == State("runs") and backend("local").events(job) == []
    with pytest.raises(UserError, match=f"has the job {job.number} of local, which runs: stop it by"):
        start("exit 0")
    backend("local").stop(job)
    assert until(job, lambda state: not state.goes_on).word == "stopped"
    assert backend("local").log(job) == "began\nsaved\n"
    again = start("echo again")
    assert until(again, lambda state: not state.goes_on).word == "ended"
    assert backend("local").log(again) == "began\nsaved\nagain\n" and find(again.run_dir) == again


@pytest.mark.parametrize("phase", ["setup", "finish"])
def test_a_job_is_stopped_with_the_command_that_stands_beside_its_ranks(start, phase: str) -> None:
    """The command went on by itself."""
    job = start("exit 0", cluster=Cluster(**{phase: ["echo began; sleep 1000"]}))
    while "began" not in backend("local").log(job):
        time.sleep(0.02)
    (child,) = psutil.Process(int(job.number)).children()
    deadline = time.monotonic() + SECONDS
    while not (found := [each for each in child.children(recursive=True) if each.name() == "sleep"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)  # the shell says so before it starts the next command
    (command,) = found
    backend("local").stop(job)
    assert until(job, lambda state: not state.goes_on).word == "stopped"
    command.wait(SECONDS)


def test_a_job_that_was_killed(start) -> None:
    job = start("exec sleep 100")
    keeper, deadline = psutil.Process(int(job.number)), time.monotonic() + 60
    while not any(each.name() == "sleep" for each in keeper.children(recursive=True)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    keeper.suspend()  # else it may write down first that what it keeps was killed
    for process in [*keeper.children(recursive=True), keeper]:
        process.kill()
    assert until(job, lambda state: not state.goes_on) == State("lost", "its process was killed")
    backend("local").stop(job)  # nobody is there to be asked


def test_another_host_is_asked_there(start) -> None:
    job = start("exit 0")
    elsewhere = replace(job, about={**job.about, "host": "elsewhere"})
    assert backend("local").state(elsewhere) == State("unknown", "it is on elsewhere: ask there")
    with pytest.raises(UserError, match=f"runs on elsewhere, and this is {socket.gethostname()}"):
        backend("local").stop(elsewhere)


def test_directories_of_jobs(start, tmp_path: Path) -> None:
    first, second = start("exit 0", "b"), start("exit 0", "a")
    record = json.loads((tmp_path / "b" / NAME).read_text())
    first = replace(first, time=record["time"] - 1)  # times are whole seconds
    (tmp_path / "b" / NAME).write_text(json.dumps({**record, "time": first.time}))
    assert jobs_in([tmp_path]) == jobs_in([tmp_path / "a", tmp_path / "b"]) == [first, second]
    assert jobs_in([tmp_path / "nowhere"]) == []
    with pytest.raises(UserError, match=r"no job was submitted there.*`shoal top"):
        find(tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        find(tmp_path / "nowhere")
    for damaged in ("{", "[]", json.dumps({"backend": "local"})):
        (tmp_path / NAME).write_text(damaged)
        with pytest.raises(UserError, match="cannot be read"):
            find(tmp_path)


def test_an_unknown_backend() -> None:
    with pytest.raises(UserError, match=r'--on slrum: there is no such backend.*Did you mean "slurm"'):
        backend("slrum")
