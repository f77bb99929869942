"""The state of a run by what its directory says and who has it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from shoal.jobs.lock import Holder
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


def test_the_process_that_has_a_run_is_a_rank(tmp_path, monkeypatch):
    assert RankWatch(tmp_path).read() == []
    mine = replace(Holder.here(), taken=1)
    monkeypatch.setattr("shoal.jobs.status.holder_of", lambda run_dir: mine)
    found = RankWatch(tmp_path).read()
    assert os.getpid() in [each.pid for each in found] and all(each.memory > 0 for each in found)
    monkeypatch.setattr("shoal.jobs.status.holder_of", lambda run_dir: replace(mine, host="elsewhere"))
    assert RankWatch(tmp_path).read() == []
