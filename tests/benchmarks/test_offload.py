"""The rules that `offload` compares, on a model of next to nothing, and what it makes of its samples."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given

from benchmarks import offload, workload
from benchmarks.executors import RULES, fetch_and_release
from benchmarks.targets import judge
from benchmarks.workload import Case
from shoal.chunks.movement import fetched, fetched_and_released
from shoal.models import GPTConfig
from tests.chunks.test_movement import traces

CASE = Case("tiny", sequence=16, batch=2, steps=1)
CHUNK = "16KiB"


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(workload, "MODEL", GPTConfig(61, 16, 6, 32, 4))
    torch.set_num_threads(1)


def run(memory, rule: str = "planned", rate: float | None = None, steps: int = 4) -> tuple[list[float], dict, float]:
    """Losses, the counts of the last step, and its seconds."""
    step, losses = offload.train(CASE, memory, rule, rate), []
    engine = offload._running
    engine.module.register_forward_hook(
        lambda module, args, output: losses.append(float(output.detach().float().sum()))
    )
    try:
        for _ in range(steps):
            began = time.perf_counter()
            step()
        return losses, offload.moves() if memory is not None else {}, time.perf_counter() - began
    finally:
        engine.close()


@pytest.mark.parametrize("share", [75, 50, 30])
def test_each_rule_moves_the_bytes_that_its_formula_says_and_computes_the_same(share):
    plain, _, _ = run(None)
    _, free, _ = run({"chunk": CHUNK})
    assert free["moved"] == free["weights"]
    device = free["others"] + free["weights"] * share // 100
    moved = {}
    for rule in RULES:
        outputs, counts, _ = run({"chunk": CHUNK, "device": device}, rule)
        assert outputs == plain
        assert counts["most"] <= device
        assert counts["moved"] == counts[rule]
        moved[rule] = counts["moved"]
        if rule == "planned":
            assert counts["moved"] == counts["plan"]
    assert free["weights"] < moved["planned"] <= moved["on demand"] <= moved["fetch and release"]


@given(traces())
def test_fetch_and_release_keeps_within_the_room(case):
    trace, sizes, room = case
    here: set[int] = set()
    ticks = fetch_and_release(trace, sizes, room)
    for tick, used, bytes_now in zip(ticks, trace, room, strict=True):
        assert set(tick.release) <= here
        here = (here - set(tick.release)) | set(tick.fetch)
        assert used <= here and sum(sizes[block] for block in here) <= bytes_now
    assert fetched(ticks, sizes) <= fetched_and_released(trace, sizes)


def test_fetch_and_release_by_hand():
    """There and back over three blocks with room for two: the next is fetched while one is in use; nothing is kept but
    at the turning point."""
    trace = tuple(frozenset({block}) for block in (0, 1, 2, 1, 0))
    ticks = fetch_and_release(trace, [4, 4, 4], [8] * 5)
    assert [tick.fetch for tick in ticks] == [(0, 1), (2,), (1,), (0,), ()]
    assert [tick.release for tick in ticks] == [(), (0,), (1,), (2,), (1,)]
    assert [tick.fetch for tick in fetch_and_release(trace, [4, 4, 4], [8, 7, 8, 8, 8])] == [
        (0, 1),
        (),
        (2, 1),
        (0,),
        (),
    ]


def test_a_throttled_link_takes_its_time():
    memory = {"chunk": CHUNK}
    _, counts, _ = run(memory)
    _, _, seconds = run(memory, rate=counts["weights"] / 0.3, steps=2)
    assert seconds >= 0.3


def test_state_on_the_device_makes_the_plan_differ_most_from_recency():
    trace = tuple(frozenset({block}) for block in (0, 1, 2, 3, 3, 2, 1, 0))
    longer, sizes = offload.with_state(trace, [10] * 4, 2)
    assert sizes == [10] * 4 + [20] * 4 and len(longer) == 2 * (8 + 4)
    assert longer[8:12] == tuple(frozenset({block, 4 + block}) for block in range(4))
    rows = offload.state_by_share(trace, [10] * 4, [75, 50])
    ratios = [row["on demand"] / row["planned"] for row in rows]
    assert ratios[0] > ratios[1] > 1
    assert rows[0]["fetch and release"] == 4 * 10 * 3 + 4 * 20 - 10 - 10, (
        "all but what is in use on either side of a border"
    )


def row(ms: float, moved: int) -> dict:
    return {"samples_ms": [[ms, ms], [ms + 1, ms + 1]], "moved": moved, "plan": moved}


def test_figures_are_of_the_slowest_link():
    def budget(rate: float, factor: float) -> dict:
        rows = {"planned": row(10, 100), "on demand": row(10 * factor, 150), "fetch and release": row(9, 200)}
        return {"case": f"budget, {rate}", "share": 50, "rate": rate, "contenders": rows}

    update = {"case": "update", "contenders": {"at once": row(12, 0), "deferred": row(10, 0)}}
    state = [{"share": 75, "planned": 10, "on demand": 30}]
    found = offload.figures([budget(0.5, 2), budget(1, 1), update], state)
    assert found["50 on demand time"] == pytest.approx(2, rel=0.1) and found["50 on demand bytes"] == 1.5
    assert found["executed"] == 1 and found["75 state"] == 3 and 1.1 < found["deferred"] <= 1.2
    judged = {each["key"]: each["reached"] for each in judge(offload.TARGETS, found)}
    assert judged["50 fetch and release time"] is False and judged["50 fetch and release bytes"] and judged["75 state"]
    assert judged["25 on demand time"] is None, "not measured"


def test_pages_are_read_and_written(tmp_path):
    step = offload.train(CASE, {"chunk": CHUNK, "disk": str(tmp_path)})
    for _ in range(3):
        step()
    found = offload.pages()
    offload._running.close()
    assert found["update_ms"] > 0 and 0 < found["read_mb_s"] < found["written_mb_s"]
