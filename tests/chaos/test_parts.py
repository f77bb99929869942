"""The parts of `shoal chaos` by themselves: schedules, connections that are shut, and what the verdict notices."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from shoal.chaos import verdict
from shoal.chaos.faults import KINDS, LASTING, Fault, drawn, read_schedule
from shoal.chaos.inject import shut_connections
from shoal.chaos.nodes import coordinator
from shoal.chaos.perform import Setting, perform, settle
from shoal.chaos.steps import Steps
from shoal.chaos.verdict import batches_of, check_losses, check_samples, read_dealt
from shoal.elastic.events import Joined, TookOver
from shoal.elastic.journal import Journal
from shoal.errors import UserError
from shoal.jobs import drill
from shoal.jobs.drill import Dealt
from shoal.report.metrics import StepRecord

pytestmark = pytest.mark.fast


def test_a_seed_draws_each_fault_once_in_an_order_of_its_own():
    schedule = drawn(list(KINDS), 1000, 3)
    assert schedule == drawn(list(KINDS), 1000, 3) != drawn(list(KINDS), 1000, 4)
    assert sorted(fault.kind for fault in schedule.faults) == sorted(KINDS)
    steps = [fault.step for fault in schedule.faults]
    assert steps == sorted(steps) and steps[0] > 0 and steps[-1] < 1000 and len(set(steps)) == len(steps)


@pytest.mark.parametrize(
    "text, message",
    [
        ("seed = 1", "a table .*fault"),
        ("[[fault]]\nkind = 'kill'", "a kind and a step"),
        ("[[fault]]\nkind = 'kil'\nstep = 1", 'Did you mean "kill"'),
        ("[[fault]]\nkind = 'kill'\nstep = -1", "0 or more"),
        ("[[fault]]\nkind = 'kill'\nstep = 'x'", "expected int"),
        ("[[fault]]\nkind = 'kill'\nstep = 1\nnod = 2", 'Did you mean "node"'),
        ("sed = 1", 'Did you mean "seed"'),
        ("[[fault", "is not TOML"),
    ],
)
def test_a_schedule_that_is_none_is_refused(text, message, tmp_path):
    (tmp_path / "faults.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_schedule(tmp_path / "faults.toml")


def test_a_schedule_comes_in_the_order_of_its_steps(tmp_path):
    path = tmp_path / "faults.toml"
    path.write_text("seed = 7\n[[fault]]\nkind='stop'\nstep=9\n[[fault]]\nkind='slow'\nstep=2\nnode=1\nseconds=2.5")
    schedule = read_schedule(path)
    assert schedule.faults == (Fault("slow", 2, 1, None, 2.5), Fault("stop", 9)) and schedule.seed == 7
    path.write_text("[[fault]]\nkind='slow'\nstep=2\n[[fault]]\nkind='disk'\nstep=9")
    assert [fault.seconds for fault in read_schedule(path).faults] == [LASTING["slow"], LASTING["disk"]]
    with pytest.raises(UserError, match="unknown fault"):
        drawn(["kill", "flood"], 100, 0)
    with pytest.raises(UserError, match="2 faults in 4 steps"):
        drawn(["kill", "stop"], 4, 0)


def test_what_a_schedule_needs_of_the_job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("[model]\nname = 'gpt'\n[train]\nsteps = 100")
    setting = Setting(path, (), 1, 2, 1, tmp_path / "out")
    settled, _ = settle(setting, drawn(["kill", "weight"], 100, 0))
    assert set(settled.assignments) == {"run.save_every=8", "run.verify_every=5", "run.trackers=[]"}
    with pytest.raises(UserError, match=r"coordinator: .* its only node"):
        settle(replace(setting, size=1), drawn(["kill", "coordinator"], 100, 0))
    with pytest.raises(UserError, match=r"give train\.steps"):
        settle(replace(setting, assignments=("train.seconds=9",), job=_without_steps(path)), drawn(["kill"], 100, 0))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("[model]\nname = 'gpt'\n[train]\nsteps = 100")
    with pytest.raises(UserError, match=r"job.toml.* cannot be written: .*Give another --dir"):
        perform(Setting(path, (), 1, 2, 1, path), drawn(["kill"], 100, 0), lambda text: None)


def _without_steps(path: Path) -> Path:
    path.write_text("[model]\nname = 'gpt'\n[train]\nepochs = 1")
    return path


PEER = """
import socket, sys
end = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
print("got", end.recv(1), flush=True)
"""


def test_the_connections_of_another_process_are_shut():
    with socket.create_server(("127.0.0.1", 0)) as door:
        command = [sys.executable, "-c", PEER, str(door.getsockname()[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
            end, _ = door.accept()
            assert peer.stdout is not None and peer.stdout.readline() == "ready\n"
            assert shut_connections(psutil.Process(peer.pid)) == 1
            assert peer.stdout.readline() == "got b''\n" and end.recv(1) == b""
            end.close()


def test_who_coordinates_is_in_the_newest_journal(tmp_path):
    assert coordinator(tmp_path) is None
    (tmp_path / "membership").mkdir()
    journal = Journal(tmp_path / "membership" / "host-a-12.journal", [])
    assert coordinator(tmp_path) is None
    journal.append([Joined(1.0, "a", "x", 1, "127.0.0.1", 10), Joined(1.0, "b", "y", 1, "127.0.0.1", 11)])
    assert coordinator(tmp_path) == (12, "127.0.0.1:10")
    time.sleep(0.02)  # file systems count time in ticks
    later = Journal(tmp_path / "membership" / "host-a-34.journal", journal.lines)
    later.append([TookOver(2.0, "b", "a", True, 1)])
    assert coordinator(tmp_path) == (34, "127.0.0.1:11")


def step(number: int, loss: float) -> StepRecord:
    return StepRecord(
        step=number, epoch=0, loss=loss, grad_norm=1.0, lr=1.0, tokens=1, seconds=1.0, tokens_per_second=1.0, mfu=None,
        memory_bytes=1, time=0.0,
    )  # fmt: skip


def test_losses_that_differ_and_steps_that_are_missing_are_noticed():
    reference = [step(1, 2.0), step(2, 1.0)]

    def passed(found: list[StepRecord]) -> list[bool]:
        return [each.passed for each in check_losses(found, reference, 1e-5)]

    assert passed(reference) == [True, True]
    assert "bit by bit" in check_losses(reference, reference, 1e-5)[1].text
    assert passed([step(1, 2.0), step(2, 1.000009)]) == [True, True]
    assert passed([step(1, 2.0), step(2, 1.00002)]) == [True, False]
    assert passed([step(1, 2.0)]) == [False, True] and passed([step(2, 2.0), step(2, 1.0)]) == [False, True]
    assert passed([]) == [False, False] and passed([step(1, 2.0), step(2, float("nan"))]) == [True, False]


def dealt(generation: int, number: int, replica: int, ids: list[int]) -> Dealt:
    return Dealt(generation, number, replica, 0.0, ids, [1, 2, 3])


@pytest.mark.parametrize(
    "told, good",
    [
        ([dealt(1, 0, 0, [1, 2]), dealt(1, 0, 1, [3])], True),
        ([dealt(1, 0, 0, [1, 2]), dealt(2, 0, 0, [1, 2, 3])], True),  # the first attempt was not committed
        ([dealt(1, 0, 0, [1, 2]), dealt(1, 0, 0, [1, 2]), dealt(1, 0, 1, [3])], True),  # two ranks of one replica
        ([dealt(1, 0, 0, [1, 2]), dealt(1, 0, 0, [1, 3]), dealt(1, 0, 1, [3])], False),
        ([dealt(1, 0, 0, [1, 2]), dealt(1, 0, 1, [2, 3])], False),
        ([dealt(1, 0, 0, [1, 2])], False),
        ([dealt(1, 0, 0, [1, 2]), dealt(1, 0, 1, [3]), dealt(2, 0, 0, [1])], False),
        ([], False),
    ],
)
def test_a_sample_that_is_missing_or_comes_twice_is_noticed(told, good, tmp_path):
    lines = [json.dumps(asdict(each)) for each in told]
    (tmp_path / "samples-1-0").write_text("\n".join([*lines, '{"generation": 9, "st']))  # a killed process's last line
    assert read_dealt(tmp_path) == told
    assert check_samples(told, 1, {0: [1, 2, 3]}).passed == good
    assert batches_of(told) == ({0: [1, 2, 3]} if told else {})


def test_a_step_waits_until_the_next_fault_has_happened_and_longer_the_longer_that_takes(tmp_path, monkeypatch):
    now, path, waits = [0.0], tmp_path / "pace", dict[int, float]()

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= 1000:
            path.write_text("0.0 inf")

    monkeypatch.setattr(drill.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(drill.time, "sleep", sleep)
    for step in (0, 99, 100, 120, 500):
        path.write_text("0.25 100.0")
        before = now[0]
        drill._wait(path, step)
        waits[step] = now[0] - before
    assert waits == pytest.approx({0: 0.25, 99: 0.25, 100: 1.0, 120: 2.0, 500: drill.LONGEST})
    now[0] = 998.0
    path.write_text("0.25 100.0")
    drill._wait(path, 500)
    assert now[0] == pytest.approx(1000.0, abs=0.11)  # it is released at once
    path.unlink()
    drill._wait(path, 500)


def test_steps_that_are_slow_by_themselves_wait_for_a_fault_too(tmp_path):
    for pace, usual, total, last in ((0.0, 0.25, 1000, 120.0), (0.05, 0.05, 1000, 150.0), (0.05, 0.05, 140, 110.0)):
        Steps(tmp_path, total, pace, usual).until(Fault("kill", 100))
        assert (tmp_path / "pace").read_text() == f"{pace} {last}"


def test_what_a_run_leaves_in_shared_memory_is_named_and_semaphores_of_any_program_are_not(tmp_path, monkeypatch):
    shared, temporary = tmp_path / "shm", tmp_path / "tmp"
    shared.mkdir(), temporary.mkdir()
    monkeypatch.setattr(verdict, "_SHARED", shared)
    monkeypatch.setattr(verdict, "_PATIENCE", 0.0)
    files, cluster = verdict.Files(), SimpleNamespace(mark="of this run", temporary=temporary)
    (shared / "sem.mp-abcd1234").touch()  # torch.compile in another program has such
    assert files.check(cluster).passed
    (shared / "shoal-group").touch()
    found = files.check(cluster)
    assert not found.passed and found.text == f"left: ['{shared}/shoal-group']"
