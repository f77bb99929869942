"""A store whose waits look at the ranks that are waited for."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from shoal.comm import awaiting
from shoal.comm.awaiting import AwaitingStore


def test_a_rank_may_come_after_several_looks_at_a_file(tmp_path, monkeypatch):
    """A FileStore raises another error than other stores where a value has not come in time, which it counts in whole
    seconds."""
    monkeypatch.setattr(awaiting, "LOOK_SECONDS", 0.05)
    bare = dist.FileStore(str(tmp_path / "store"), 1)
    looks = []
    store = AwaitingStore(bare, lambda: looks.append(1))
    threading.Timer(1.3, bare.set, ("key", "here")).start()
    assert store.get("key") == b"here" and looks
    with pytest.raises(RuntimeError):
        store.wait(["never"], timedelta(seconds=0.1))
