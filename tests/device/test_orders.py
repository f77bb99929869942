"""What no row of the engine comes to: orders of work (`orders.py`), with which each wait, event, `record_stream` and
pinned allocation that is removed is reported (`make mutate-device`), and branches (`branches.py`)."""

from __future__ import annotations

from functools import cache, partial

import pytest

from tests.device import branches, orders, uses
from tests.device.simulator import simulate_ranks, why_not

simulated = pytest.mark.skipif(bool(why_not()), reason=why_not())
CASES = {
    orders: {
        "products_while_tokens_travel": 2,
        "a_gradient_that_is_copied_to_travel": 2,
        "given_up_before_it_is_asked_for": 1,
        "spans": 1,
        "recorded": 1,
        "saved_aside": 1,
        "around_the_ring": 2,
        "moved_at_once": 2,
        "cut_short_with_weights_under_way": 1,
        "first_bucket_stays": 2,
        "a_message_that_cannot_be_sent": 1,
        "hosts_that_agree_late": 2,
    },
    branches: {
        "exchanged_with_error_feedback": 2,
        "batch_statistics": 2,
        "buffers_of_replicas": 2,
        "goes_on_after_an_error": 1,
        "a_job": 1,
        "stages_by_time": 1,
        "transports": 2,
        "hook_of_ddp": 2,
    },
}
ROWS = {name: (getattr(file, name), size) for file, sizes in CASES.items() for name, size in sizes.items()}
IN_THE_BACKGROUND = (
    {"name": "delayed"},
    {"name": "async_average", "interval_ms": 0.0, "bound": 1},
    {"name": "streaming_diloco", "every": 2, "fragments": 1, "overlap": 1},
)
ROWS |= {f"{each['name']}-saved": (partial(orders.saved_under_way, each), 2) for each in IN_THE_BACKGROUND}
GIVEN_UP = {each["name"]: {"dp": 2, "exchange": each} for each in IN_THE_BACKGROUND}
GIVEN_UP |= {"zero2": {"dp": 2, "zero": 2}, "pp": {"pp": 2}}
ROWS |= {f"{name}-given-up": (partial(orders.given_up, plan), 2) for name, plan in GIVEN_UP.items()}
SMALL_CHUNKS = {"allreduce": {"zero": 2}, "topk": {}}
ROWS |= {
    f"cut-short-{name}": (
        partial(orders.cut_short, {"dp": 2, "exchange": {"name": name, "chunk_bytes": 1024}, **more}),
        2,
    )
    for name, more in SMALL_CHUNKS.items()
}
ROWS |= {f"weight-{each}": (partial(orders.a_weight_that_travels, each), 2) for each in ("1f1b", "2bw")}
THREADS = {"dp": {"dp": 2}, "zero3": {"dp": 2, "zero": 3}, "pp": {"pp": 2}, "2bw": {"pp": 2, "schedule": "2bw"}}
THREADS |= {"async": {"dp": 2, "exchange": {"name": "async_average", "interval_ms": 0.0, "bound": 1}}}
ROWS |= {f"threads-{name}": (partial(orders.ranks_that_are_threads, plan), 1) for name, plan in THREADS.items()}
ALIKE = ("pp-given-up", "weight-1f1b", "threads-dp", "threads-2bw", "threads-async", "cut-short-topk")
ALIKE += ("delayed-saved", "delayed-given-up", "streaming_diloco-given-up")
"""Rows of mechanisms that others have too: for the matrix."""
WAITS = {
    "answers": (1, (6,)),  # three products, before and after
    "rate_of_a_link": (1, (10,)),  # five copies
    "rate_between_ranks": (2, range(2, 7)),  # sums, of which slow ranks make fewer
    "stages_by_time": (1, (5 * 6 * 3,)),  # kinds of parts, times, before, between and after forward and backward
}
"""Programs that take the device's time: how many ranks, and how often the host waits for all of the device."""


@cache
def on_the_cpu(name: str) -> list[list[float]]:
    use, size = ROWS[name]
    return [run.result for run in simulate_ranks(uses.used, size, "cpu", use)]


@simulated
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix if name in ALIKE else ()) for name in ROWS]
)
def test_it_is_as_on_the_cpu_and_nothing_is_unordered(name):
    use, size = ROWS[name]
    runs = simulate_ranks(uses.used, size, "cuda", use)
    assert [run.trace.defects for run in runs] == [[]] * len(runs)
    for run, reference in zip(runs, on_the_cpu(name), strict=True):
        assert run.result == pytest.approx(reference, rel=1e-4)


@simulated
@pytest.mark.parametrize("name", WAITS)
def test_who_takes_the_time_waits_for_the_device(name):
    size, times = WAITS[name]
    for run in simulate_ranks(uses.used, size, "cuda", getattr(branches, name)):
        assert run.trace.defects == []
        assert sum(number for wait, number in run.trace.waits.items() if wait.what == "device") in times


@simulated
@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_gradients_on_loan_are_bounded_however_far_the_host_is_ahead(mode):
    """Their memory is taken again before the host has seen that the lane is done with it: the allocator takes little
    more of the device than what is in tensors at a time. A third more, mostly, where only `record_stream` keeps it."""
    for rank, run in enumerate(simulate_ranks(uses.used, 2, "cuda", orders.reserved, mode=mode)):
        assert run.result[0] < 1.2 * run.trace.peak[rank]


@simulated
def test_ranks_that_meet_have_done_their_work():
    for run in simulate_ranks(uses.used, 2, "cuda", branches.transports):
        assert sum(number for wait, number in run.trace.waits.items() if wait.what == "stream") == 1


@simulated
def test_the_room_of_devices_answers():
    (run,) = simulate_ranks(uses.used, 1, "cuda", branches.answers)
    assert run.result == {
        "own": ["cuda:0", "cuda:0", "cuda"],
        "name": "simulated",
        "memory": True,
        "capability": (9, 0),
        "attention": ["memory-efficient attention"] * 2,
        "flash": True,
        "peak": True,
        "allocator": "torch's own settings",
        "refused": ["there is no cuda", 'device = "sim'],
    }


@simulated
def test_a_peak_goes_on_where_what_is_asked_for_begins_anew():
    (run,) = simulate_ranks(uses.used, 1, "cuda", branches.peaks)
    assert run.result == [True] * 4


@simulated
def test_a_device_is_measured_and_nothing_of_that_stays():
    (run,) = simulate_ranks(uses.used, 1, "cuda", branches.measured)
    assert run.trace.defects == []
    assert run.result == {"formats": ["bf16", "fp16", "fp32"], "rates": True, "on cores": False, "peak": True}
