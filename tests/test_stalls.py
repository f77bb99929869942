"""What the trainer waited for, by cause: whatever is made slow shows up under its own name, and under no other."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import pytest

from shoal import Engine, Plan
from shoal.chunks.chunk import Chunk
from shoal.comm.ledger import Span
from shoal.exchange.reducer import Reducer
from shoal.models import causal_lm
from shoal.optim.fused.host_adam import HostAdam
from shoal.optim.tiers.disk import Stored
from tests.exchange import teacher
from tests.parity.cases import text
from tests.test_memory import EXCHANGE, gpt

pytestmark = pytest.mark.alone

SLOW = 0.03


def slowed(quick):
    """The same method, SLOW seconds later."""

    def slow(self, *rest):
        time.sleep(SLOW)
        return quick(self, *rest)

    return slow


def waits(memory, before) -> list[Span]:
    """Those of the fourth step, since updates of the third may go on in it; `before` is called when the third
    begins."""
    plan = Plan(memory=memory, exchange=EXCHANGE)
    engine = Engine(gpt, causal_lm, teacher.ADAMW, plan, global_batch=12, microbatch=4, dropout="fused")
    for batch in engine.batches(text(), steps=4):
        if batch.step == 2:
            before()
        engine.ledger.recording = batch.step == 3
        engine.step(batch)
    engine.close()
    return [span for span in engine.ledger.take() if span.phase == "wait"]


@pytest.mark.parametrize(
    ("owner", "method", "memory", "causes"),
    [
        (Chunk, "fill", {}, {"weights"}),
        (HostAdam, "step", {"update": "deferred"}, {"update"}),
        (Reducer, "_exchange_lent", {}, {"gradients on loan", "exchange"}),
        (Reducer, "_exchange", None, {"exchange"}),
        (Stored, "_read", {"disk": ...}, {"disk"}),
        (Stored, "_write", {"disk": ...}, {"disk"}),
    ],
    ids=["weights", "update", "gradients", "exchange", "read", "write"],
)
def test_what_is_slow_is_named(monkeypatch, tmp_path, owner, method, memory, causes):
    memory = {**memory, "disk": str(tmp_path)} if memory and "disk" in memory else memory
    seconds: Counter[str] = Counter()
    for span in waits(memory, lambda: monkeypatch.setattr(owner, method, slowed(getattr(owner, method)))):
        seconds[span.name] += span.seconds
    named = sum(seconds[cause] for cause in causes)
    assert all(seconds[cause] > 0.8 * SLOW for cause in causes)
    assert seconds.total() - named < 0.3 * named


def test_a_wait_of_the_lane_for_an_update_is_none_of_the_trainer(monkeypatch):
    """The lane waits for it as well, to bring the new weights: the trainer's own waits come one after the other."""
    seen = waits({"update": "deferred"}, lambda: monkeypatch.setattr(HostAdam, "step", slowed(HostAdam.step)))
    seen.sort(key=lambda span: span.start)
    assert len(seen) > 1
    for one, other in pairwise(seen):
        assert one.start + one.seconds <= other.start + 1e-3


def test_nothing_is_kept_while_nothing_records():
    engine = Engine(gpt, causal_lm, teacher.ADAMW, Plan(memory={}, exchange=EXCHANGE), global_batch=12, microbatch=4)
    for batch in engine.batches(text(), steps=2):
        engine.step(batch)
    engine.close()
    assert engine.ledger.take() == [] and engine.ledger.take_levels() == []
