"""What one sees of memory: levels by role over a step, and bytes moved beside those planned."""

from __future__ import annotations

import time
from collections import defaultdict

import pytest

from shoal import Engine, Plan
from shoal.models import causal_lm
from tests.exchange import teacher
from tests.parity.cases import text
from tests.test_memory import EXCHANGE, gpt, smallest


def make(memory) -> Engine:
    plan = Plan(memory=memory, exchange=EXCHANGE)
    return Engine(gpt, causal_lm, teacher.ADAMW, plan, global_batch=12, microbatch=4, dropout="fused", clip=0.5)


@pytest.mark.parametrize("tight", [False, True])
def test_levels_stay_below_the_budget_and_reach_what_the_tier_says(tight):
    budget = smallest() if tight else None
    engine = make({"device": budget} if budget else {})
    for batch in engine.batches(text(), steps=3):
        if batch.step == 2:
            engine.parts.tier.most, engine.parts.tier.most_in_all = {}, 0
            engine.ledger.step, engine.ledger.recording = 2, True
            engine.parts.tier.note(time.time())
        engine.step(batch)
    engine.close()
    held, most, together = defaultdict(int), defaultdict(int), 0
    for level in engine.ledger.take_levels():
        assert (level.tier, level.step) == ("plan.memory.device", 2)
        held[level.role] = level.nbytes
        most[level.role] = max(most[level.role], level.nbytes)
        together = max(together, sum(held.values()))
        assert budget is None or sum(held.values()) <= budget
    assert dict(most) == engine.parts.tier.most and together == engine.parts.tier.most_in_all
    assert set(most) == {"weights in use", "activations", "gradients on loan"}
    assert not any(held.values())


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_moves_is_what_was_planned(share):
    least, most = smallest(), 10**6
    engine = make({"device": int(least + share * (most - least))})
    executor = engine.parts.gather.executor
    for batch in engine.batches(text(), steps=3):
        before = executor.bytes_in
        engine.step(batch)
        if batch.step == 0:
            assert executor.followed is None, "there is no plan yet"
        elif executor.followed is not None:
            assert executor.bytes_in - before == executor.followed.fetched()
    engine.close()
    others = executor.followed.fetched_otherwise()
    assert executor.followed.fetched() <= others["least recently used goes"] <= others["each goes after its use"]
