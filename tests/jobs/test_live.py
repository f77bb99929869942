"""What ranks know and say from one generation to the next."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.errors import CheckpointError
from shoal.jobs import live
from shoal.jobs.record import Recorder
from shoal.training.result import StepResult
from tests.report.synthetic import step_record

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("step", "said"),
    [(6, "went on from the newest checkpoint"), (0, "began anew, as no step is saved")],
)
def test_a_checkpoint_is_named_only_where_there_is_one(step: int, said: str, monkeypatch: Any) -> None:
    def too_little(*_: Any) -> None:
        raise CheckpointError("what ranks hold is not enough. Make an engine") from CheckpointError("a part is gone")

    engine = SimpleNamespace(step_index=step, close=lambda: None)
    begun = SimpleNamespace(engine=engine, attempt=lambda cost, record, **_: record)
    for name in ("placed", "at_size", "planned"):
        monkeypatch.setattr(live, name, lambda *_, **__: None)
    monkeypatch.setattr(live, "begin", lambda *_: begun)
    monkeypatch.setattr(live, "record_of", lambda place, step, *why: (step, *why))
    own = live.LiveRank.__new__(live.LiveRank)
    vars(own).update(
        _engine=None, _attempt=None, _cost=None, _opened=None, _path="", _assignments=[], _go_on=too_little
    )
    place: Any = SimpleNamespace(live=True)
    found: Any = own._begin(place, SimpleNamespace())  # type: ignore[arg-type]
    assert found == (step, f"the ranks {said}: a part is gone")


def test_a_record_that_the_first_rank_had_no_time_to_write_is_known_to_the_next_generation(tmp_path: Path) -> None:
    """Two generations may end right after one another: the step that was committed before the first of these ends is in
    no loop of a rank."""
    made = StepResult(6, 0, (0.1,), 0.0, torch.tensor([3.0, 2.0], dtype=torch.float64), torch.tensor(1.0))
    before, after = (
        Recorder(tmp_path, [], active=False, device=torch.device("cpu"), total=None, flops_per_sample=None)
        for _ in range(2)
    )
    before.step(made, 2)
    assert before.late(StepResult(7, 0, (0.1,), 0.0, made._totals, made._norm), 2).step == 8
    assert {each.step for each in before.recent()} == {7, 8}, "where the next generation ends before it has begun"
    after.missing([step_record(7), step_record(8)])
    after.step(StepResult(8, 0, (0.1,), 0.0, made._totals, made._norm), 2)
    assert {each.step for each in after.recent()} == {7, 8, 9}, "where it ends before its first rank has written them"
