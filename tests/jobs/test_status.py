"""The state of a run by what its directory says and who has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from shoal.jobs.lock import NAME, Holder, holder_of, holders
from shoal.jobs.status import RankWatch, rank_in, status_of
from shoal.report.metrics import EndRecord, Record, assemble
from tests.report.synthetic import run_record, step_record

pytestmark = pytest.mark.fast

RUN = replace(run_record(), time=100.0)
STEP = replace(step_record(1), time=110.0, seconds=1.0)
SLOW = replace(STEP, seconds=60.0)
HOLDER = Holder("here", 7, 0.0, taken=99_000_000_000)
LATER = replace(HOLDER, taken=130_000_000_000)
DONE, FAILED = EndRecord(reason="all done", seconds=1.0), EndRecord(reason="failed: step 3: nan", seconds=1.0)


@pytest.mark.parametrize(
    ("records", "holder", "now", "word", "detail"),
    [
        ([], None, 0, "empty", ""),
        ([], HOLDER, 0, "starting", "process 7 on here"),
        ([RUN], HOLDER, 101, "trains", ""),
        ([RUN, STEP], HOLDER, 120, "trains", ""),
        ([RUN, STEP], HOLDER, 150, "silent", "no news for 40.0 s"),
        ([RUN, SLOW], HOLDER, 600, "trains", ""),
        ([RUN, SLOW], HOLDER, 800, "silent", "no news for 11 min 30 s"),
        ([RUN], HOLDER, 200, "silent", "no news for 1 min 40 s"),
        ([replace(RUN, time=None)], HOLDER, 1e9, "trains", ""),
        ([RUN, STEP, DONE], LATER, 150, "starting", "process 7 on here"),
        ([RUN, STEP], LATER, 150, "starting", "process 7 on here"),
        ([RUN, STEP, DONE], None, 150, "ended", "all done"),
        ([RUN, STEP, FAILED], None, 150, "failed", "step 3: nan"),
        ([RUN, STEP], None, 150, "killed", "no process has the directory, and nothing was said"),
    ],
)
def test_the_state(records: list[Record], holder: Holder | None, now: float, word: str, detail: str) -> None:
    status = status_of(assemble(records), holder, now)
    assert (status.word, status.detail) == (word, detail)
    assert status.goes_on == (word in ("starting", "trains", "silent"))


@pytest.mark.parametrize(
    ("environ", "rank"),
    [({}, None), ({"RANK": "3"}, 3), ({"RANK": "", "SLURM_PROCID": "2"}, 2), ({"RANK": "x"}, None)],
)
def test_the_rank_of_a_process(environ: dict[str, str], rank: int | None) -> None:
    assert rank_in(environ) == rank


LEFT = replace(HOLDER, job="a job")


@pytest.mark.parametrize(
    ("records", "now", "word"),
    [
        ([RUN, STEP], 120, "starting"),
        ([RUN, STEP], 141, "killed"),
        ([RUN, SLOW], 600, "starting"),
        ([], 100, "starting"),
        ([], 130, "empty"),
        ([RUN, STEP, DONE], 120, "ended"),
    ],
)
def test_where_nodes_come_and_go_others_may_go_on_once_rank_0_has_ended(records, now: float, word: str) -> None:
    assert status_of(assemble(records), None, now, LEFT).word == word


def test_who_has_left_a_run(tmp_path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for job, found in (("", False), ("a job", True)):
        holder = Holder(Holder.here().host, ended.pid, 1.0, 7, job)
        (tmp_path / NAME).write_text(json.dumps(asdict(holder)))
        assert holders(tmp_path) == (None, holder if found else None)
    mine = replace(Holder.here(), job="a job")
    (tmp_path / NAME).write_text(json.dumps(asdict(mine)))
    assert holders(tmp_path) == (mine, None) and holder_of(tmp_path) == mine


@pytest.mark.skipif(not os.path.exists("/proc/self/comm"), reason="the kernel does not let a process change its name")
def test_ranks_that_come_and_go_are_known_by_their_names(tmp_path, monkeypatch) -> None:
    """Their environment has no rank: it changes with the generation."""
    program = "import sys; from shoal.elastic.control import call_this; call_this(sys.argv[1]); print(flush=1); input()"
    names = ("shoal-rank0", "shoal-rank12", "shoal-waits")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    ranks = [subprocess.Popen([sys.executable, "-c", program, name], **pipes) for name in names]
    try:
        for each in ranks:
            each.stdout.readline()
        first = Holder(Holder.here().host, ranks[0].pid, 0.0, 7)
        monkeypatch.setattr("shoal.jobs.status.holder_of", lambda run_dir: first)
        found = {each.rank: each.pid for each in RankWatch(tmp_path).read()}
        assert (found[0], found[12]) == (ranks[0].pid, ranks[1].pid) and ranks[2].pid not in found.values()
    finally:
        for each in ranks:
            each.communicate()


def test_the_process_that_has_a_run_is_a_rank(tmp_path, monkeypatch):
    assert RankWatch(tmp_path).read() == []
    mine = replace(Holder.here(), taken=1)
    monkeypatch.setattr("shoal.jobs.status.holder_of", lambda run_dir: mine)
    found = RankWatch(tmp_path).read()
    assert os.getpid() in [each.pid for each in found] and all(each.memory > 0 for each in found)
    monkeypatch.setattr("shoal.jobs.status.holder_of", lambda run_dir: replace(mine, host="elsewhere"))
    assert RankWatch(tmp_path).read() == []
