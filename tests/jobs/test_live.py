"""What ranks know and say from one generation to the next."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.elastic.events import END, HALT, NOW
from shoal.errors import CheckpointError, UserError
from shoal.jobs import live
from shoal.jobs.record import Recorder
from shoal.jobs.stop import Halted
from shoal.training.result import StepResult
from tests.report.synthetic import step_record

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("step", "said", "evaluated", "late"),
    [
        (6, "went on from the newest checkpoint", 4, 4),
        (6, "went on from the newest checkpoint", 6, None),
        (0, "began anew, as no step is saved", 0, None),
    ],
)
def test_a_checkpoint_is_named_only_where_there_is_one(
    step: int, said: str, evaluated: int, late: int | None, monkeypatch: Any
) -> None:
    def too_little(*_: Any) -> None:
        raise CheckpointError("what ranks hold is not enough. Make an engine") from CheckpointError("a part is gone")

    engine = SimpleNamespace(step_index=step, close=lambda: None)
    begun = SimpleNamespace(engine=engine, attempt=lambda cost, record, evaluated, **_: (record, evaluated))
    for name in ("placed", "at_size", "planned"):
        monkeypatch.setattr(live, name, lambda *_, **__: None)
    monkeypatch.setattr(live, "begin", lambda *_: begun)
    monkeypatch.setattr(live, "record_of", lambda place, step, *why: (step, *why))
    monkeypatch.setattr(live, "on_disk", lambda _: [step, 9, evaluated])
    own = live.LiveRank.__new__(live.LiveRank)
    opened = SimpleNamespace(job=SimpleNamespace(run=SimpleNamespace(dir="")), data=SimpleNamespace(validation=[1]))
    vars(own).update(_engine=None, _attempt=None, _cost=None, _opened=opened, _path="", _assignments=[], _waited=[])
    own._go_on = too_little  # type: ignore[method-assign, assignment]
    place: Any = SimpleNamespace(live=True, step=6, generation=2, size=2, failed=True)
    world: Any = SimpleNamespace(rank=0, everyone=SimpleNamespace(broadcast_object=lambda said: said))
    found: Any = own._begin(place, world)
    assert found == ((step, f"the ranks {said}: a part is gone"), late)


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


@pytest.mark.parametrize(("told", "waits"), [(HALT, True), (NOW, True), (END, False), ("", False)])
def test_ranks_that_cannot_go_on_wait_for_others(told: str, waits: bool, monkeypatch: Any) -> None:
    """As where a budget of memory does not do for fewer: who was killed has a new process in half a second."""
    monkeypatch.setattr(live, "PATIENCE", 0.01)
    own, refusal = live.LiveRank.__new__(live.LiveRank), UserError("no plan fits")
    control = SimpleNamespace(leave_by=lambda hurry: hurry(told) if told else None)
    attempt: Any = SimpleNamespace()
    begun = iter([refusal, attempt])

    def begins(*_: Any) -> Any:
        if isinstance(found := next(begun), UserError):
            raise found
        return found

    vars(own).update(_control=control, _waited=[], _begun=begins, _trained=2, _unable={1})
    with pytest.raises(Halted if waits else UserError) as error:
        own._begin(SimpleNamespace(step=6, size=1, events=["a rank was killed"]), SimpleNamespace())  # type: ignore[arg-type]
    assert error.value is refusal or error.value.how == told
    assert own._waited == ["a rank was killed", "1 rank(s) could not go on, and waited for others: no plan fits"]
    assert own._begin(SimpleNamespace(step=6, size=2), SimpleNamespace()) is attempt and not own._waited  # type: ignore[arg-type]


def test_what_no_generation_could_train_with_is_refused_at_once() -> None:
    own = live.LiveRank.__new__(live.LiveRank)

    def refused(*_: Any) -> Any:
        raise UserError("no such model")

    vars(own).update(_begun=refused)
    with pytest.raises(UserError, match="no such model"):
        own._begin(SimpleNamespace(step=-1, live=False), SimpleNamespace())  # type: ignore[arg-type]


def test_ranks_that_are_too_many_leave_the_generation_to_fewer_at_once_but_not_again_and_again(monkeypatch):
    """A node that joins holds those that train without it for a moment, also before their first step is done."""
    monkeypatch.setattr(live, "PATIENCE", 0.01)
    own, refusal = live.LiveRank.__new__(live.LiveRank), UserError("no plan fits")
    control, fits = SimpleNamespace(leave_by=lambda hurry: None), {2}

    def begins(place: Any, world: Any) -> Any:
        if place.size not in fits:
            raise refusal
        return place

    def begin(size: int) -> Any:
        return own._begin(SimpleNamespace(step=0, live=True, size=size, events=[]), SimpleNamespace())  # type: ignore[arg-type]

    vars(own).update(_control=control, _waited=[], _begun=begins, _trained=0, _unable=set(), _why_unable="")
    for _ in range(2):
        assert begin(2).size == 2
        with pytest.raises(Halted) as halted:
            begin(3)
        assert halted.value.how == HALT and own._why_unable == "3 rank(s) cannot go on, as 2 did before: no plan fits"
    with pytest.raises(UserError, match="no plan fits"):
        begin(3)  # nobody could be left out, so they wait as they would for others
    fits.add(3)
    assert begin(3).size == 3
    with pytest.raises(Halted):
        begin(1)  # one of another node may be left out, also where there are fewer than before
