"""What ranks that cannot go on from memory say of the step at which they begin again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import CheckpointError
from shoal.jobs import live

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("step", "said"),
    [(6, "went on from the newest checkpoint"), (0, "began anew, as no step is saved")],
)
def test_a_checkpoint_is_named_only_where_there_is_one(step: int, said: str, monkeypatch: Any) -> None:
    def too_little(*_: Any) -> None:
        raise CheckpointError("a part is gone")

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
    assert found[0] == step and said in found[1]
