"""What is known of this machine is measured by one process at a time, and once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shoal.device import CPU
from shoal.locked import locked
from shoal.planner import kept, measure
from shoal.planner.kept import folder, in_turn
from shoal.planner.measure import Rates, rates

pytestmark = pytest.mark.fast


def test_processes_that_ask_at_once_measure_once(cache_of_its_own, monkeypatch):
    """Locks of threads are those of processes: each belongs to what was opened."""
    calls, at_once = list[float](), threading.Barrier(3)

    def measured(*_: object) -> Rates:
        calls.append(time.monotonic())
        time.sleep(0.1)
        return Rates({"fp64": 1.0}, ((1.0, 1.0),), 1.0, 1.0, 1.0, 1.0, 0.0, 0.1, time.time())

    def ask(_: int) -> Rates:
        at_once.wait()
        return rates(CPU, torch.float64)

    monkeypatch.setattr(measure, "_measured", measured)
    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(ask, range(3))
    assert len(calls) == 1 and all(each == first for each in others)


def test_nobody_waits_for_ever_nor_where_nothing_can_be_written(cache_of_its_own, monkeypatch, tmp_path):
    monkeypatch.setattr(kept, "PATIENCE", 0.1)
    with in_turn(lambda: None):
        (place,) = folder().glob("measures-*")
    with locked(place):
        began = time.monotonic()
        with in_turn(lambda: None) as known:
            assert known is None and 0.1 <= time.monotonic() - began < 5
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with in_turn(lambda: None) as known:
        assert known is None
    with pytest.raises(OSError, match="of the caller"), in_turn(lambda: 1):
        raise OSError("of the caller")
