"""The simulated accelerator itself: programs with one defect each are reported in every mode, right ones never."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tests.device import programs
from tests.device.simulator import LAZY_EAGER_AND_SEEDS, Wait, build, simulate, simulate_ranks, why_not
from tests.parity.covering import thinned

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

every_mode = pytest.mark.parametrize("mode", LAZY_EAGER_AND_SEEDS)
either_device = pytest.mark.parametrize("device", ["cuda", "sim"])
SHORT = {("cuda", mode) for mode in LAZY_EAGER_AND_SEEDS[:3]} | {("sim", "lazy")}
each_way = pytest.mark.parametrize(
    ("device", "mode"), thinned(list(product(["cuda", "sim"], LAZY_EAGER_AND_SEEDS)), SHORT)
)
"""The modes are the same code on both devices."""
WRONG = {
    "prefetch without a wait": (programs.prefetch, (False,), 12000.0, "race"),
    "no record_stream": (programs.copy_aside, (False,), 7000.0, "freed"),
    "an unfinished copy is read by an operation": (programs.read_back, (False, "operation"), 3000.0, "host"),
    "an unfinished copy is read by item": (programs.read_back, (False, "item"), 3000.0, "host"),
    "an unfinished copy is read by numpy": (programs.read_back, (False, "numpy"), 3000.0, "host"),
    "a buffer is written while it is read": (programs.reuse_of_a_buffer, (False,), 3000.0, "host"),
}
RIGHT = {
    "prefetch": (programs.prefetch, (True,), 12000.0),
    "record_stream": (programs.copy_aside, (True,), 7000.0),
    **{f"a copy is read by {reader}": (programs.read_back, (True, reader), 3000.0) for reader in programs.READERS},
    "a buffer is written again": (programs.reuse_of_a_buffer, (True,), 3000.0),
    "halves of a matrix": (programs.strided_halves, (), 3000.0),
}


@each_way
@pytest.mark.parametrize("name", WRONG)
def test_a_defect_is_reported_whatever_the_schedule(name, device, mode):
    program, args, right, kind = WRONG[name]
    run = simulate(program, *args, mode=mode, name=device)
    assert run.trace.kinds() == {kind}, run.trace
    if mode == "lazy":
        assert run.result != right, "the most hostile schedule gives wrong numbers too"
    if mode == "eager":
        assert run.result == right, "the friendliest one hides the defect"


@each_way
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_not_reported(name, device, mode):
    program, args, right = RIGHT[name]
    run = simulate(program, *args, mode=mode, name=device)
    assert run.result == right and run.trace.defects == []


def test_a_report_names_both_accesses_and_the_memory():
    (race,) = simulate(programs.prefetch, False).trace.defects
    assert race.first.startswith("copy host to device writes on stream 1 at ") and "programs.py:" in race.first
    assert race.second.startswith("aten::mul.out reads on stream 0 at ") and "programs.py:" in race.second
    assert race.memory.startswith("4096 bytes allocated at ") and "programs.py:" in race.memory


@either_device
def test_a_copy_that_cannot_but_wait_is_reported(device):
    for pinned, kinds in ((True, set()), (False, {"pageable"})):
        run = simulate(programs.without_pinning, pinned, name=device)
        assert run.result == 3000.0 and run.trace.kinds() == kinds


@either_device
@pytest.mark.parametrize("up", [False, True])
def test_a_copy_that_casts_on_the_host_is_reported(up, device):
    for first, kinds in ((True, set()), (False, {"pageable"})):
        run = simulate(programs.cast_on_the_way, up, first, name=device)
        assert run.result == 3000.0 and run.trace.kinds() == kinds


@either_device
@pytest.mark.parametrize(("size", "ends"), [(1 << 20, "fits"), ((1 << 20) + 1, "out of memory")])
def test_memory_ends_at_the_capacity(size, ends, device):
    run = simulate(programs.beyond_capacity, size, capacity=1 << 20, name=device)
    assert run.result == ends and run.trace.peak == [size if ends == "fits" else 0]


def test_waits_of_the_host_and_bytes_are_counted():
    trace = simulate(programs.prefetch, True).trace
    assert {wait.what: times for wait, times in trace.waits.items()} == {"item": 4}
    assert all("programs.py:" in wait.where for wait in trace.waits)
    assert trace.copied == {"host to device": 4 * 4 * programs.SIZE}
    assert simulate(programs.read_back, False, "item").trace.waits == Counter[Wait]()
    assert simulate(programs.read_back, True, "item").trace.waits.total() == 1


@every_mode
def test_a_loop_of_torch_trains_as_on_the_cpu(mode):
    losses, weights = programs.train("cpu")
    run = simulate(programs.train, None, mode=mode)
    assert run.trace.defects == [] and run.result[0] == pytest.approx(losses, rel=1e-6)
    for ours, theirs in zip(run.result[1], weights, strict=True):
        torch.testing.assert_close(ours, theirs)


@either_device
def test_what_is_random_is_the_seeds(device):
    run = simulate(programs.draws, name=device)
    assert run.result["again"] and run.result["own"] and run.result["kind"] and 0.4 < run.result["kept"] < 0.6


@either_device
def test_the_host_waits_for_shapes_that_depend_on_data(device):
    run = simulate(programs.shapes_from_data, name=device)
    assert run.result == ([1, 2], True, 3.0) and run.trace.defects == []
    assert {"aten::nonzero", "aten::equal", "item"} <= {wait.what for wait in run.trace.waits}


@either_device
def test_attention_has_the_cpus_gradient(device):
    assert simulate(programs.attention, name=device).result < 1e-4


@every_mode
def test_a_host_that_asks_again_and_again_gets_an_answer(mode):
    assert simulate(programs.a_polling_host, mode=mode).result > 0


@every_mode
def test_devices_of_one_process_wait_for_each_other(mode):
    run = simulate(programs.two_devices, devices=2, mode=mode)
    assert run.result == (2000.0, 1) and run.trace.defects == [] and len(run.trace.peak) == 2


def test_an_error_of_the_program_is_raised():
    with pytest.raises(AssertionError, match="invalid device ordinal"):
        simulate(programs.two_devices)
    assert "invalid device ordinal" in simulate(programs.two_devices, fails=True).error


# ---- several ranks ----


@each_way
def test_a_sum_over_ranks_that_is_not_waited_for_is_reported(device, mode):
    for wait, kinds in ((True, set()), (False, {"race"})):
        runs = simulate_ranks(programs.reduced_beside, 2, wait, mode=mode, name=device)
        assert [run.trace.kinds() for run in runs] == [kinds, kinds]
        assert not wait or [run.result for run in runs] == [3000.0, 3000.0]


def test_what_a_sum_on_another_stream_works_on_may_be_given_up_only_if_it_was_recorded():
    for record, kinds in ((True, set()), (False, {"freed"})):
        runs = simulate_ranks(programs.sent_and_given_up, 2, record)
        assert [run.trace.kinds() for run in runs] == [kinds, kinds]


@each_way
def test_every_collective_does_what_it_says(device, mode):
    runs = simulate_ranks(programs.collectives, 2, mode=mode, name=device)
    both = {
        "sum": [1, 2],
        "max": [1, 1],
        "min": [0, 1],
        "avg": [0.5, 1],
        "broadcast": [1],
        "all_gather": [0, 1],
        "all_gather_into_tensor": [0, 0, 1, -1],
        "together": [1, 2],
        "objects": [{"rank": 0}, {"rank": 1}],
    }
    each = [
        {"reduce": [1], "reduce_scatter": [1], "reduce_scatter_tensor": [1], "gather": [0, 1], "scatter": [0]}
        | {"all_to_all": [0, 10], "uneven": [0, 0], "around": [1]},
        {"reduce": [3], "reduce_scatter": [3], "reduce_scatter_tensor": [3], "gather": [], "scatter": [10]}
        | {"all_to_all": [1, 11], "uneven": [1, 2, 1, 2], "around": [0]},
    ]
    assert [run.result for run in runs] == [both | own for own in each]
    assert [run.trace.defects for run in runs] == [[], []]


@every_mode
@pytest.mark.parametrize("how", ["size", "order", "absence"])
def test_calls_that_do_not_go_together_are_named(how, mode):
    first, second = simulate_ranks(programs.calls_that_differ, 2, how, mode=mode, fails=True)
    report = first.trace.defects[0]
    assert report.kind == "mismatch" and report.first == "all_reduce(float32[1000], SUM) on rank 0"
    assert "NCCL would hang" in first.error and (how == "absence") == (not second.error)
    assert (
        report.second
        == {
            "size": "all_reduce(float32[1001], SUM) on rank 1",
            "order": "broadcast(float32[1000], 0) on rank 1",
            "absence": "rank 1 made no call in this group and has ended",
        }[how]
    )


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_two_sends_that_meet_would_hang(mode):
    runs = simulate_ranks(programs.sends, 2, True, mode=mode, fails=True, patience=1.0)
    assert any(run.trace.kinds() == {"mismatch"} for run in runs)
    runs = simulate_ranks(programs.sends, 2, False, mode=mode)
    assert [run.result for run in runs] == [3.0, 3.0] and not any(run.trace.defects for run in runs)


@every_mode
def test_torchs_own_data_parallel_has_the_mean_gradient(mode):
    runs = simulate_ranks(programs.ddp, 2, mode=mode)
    assert not any(run.trace.defects for run in runs)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    for rank in range(2):
        torch.manual_seed(rank)
        (F.mse_loss(model(torch.randn(6, 8)), torch.zeros(6, 4)) / 2).backward()
    for run in runs:
        for found, parameter in zip(run.result, model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad)


# ---- how it is built ----


def test_without_a_compiler_tests_are_skipped_by_name(monkeypatch):
    assert why_not() == ""
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert why_not() == "no C++ compiler (g++) to build the simulated accelerator"


def test_it_is_compiled_once(monkeypatch):
    found = build.library()
    monkeypatch.setattr(build, "_run", lambda command, target: pytest.fail(f"compiles again: {target}"))
    assert build.library() == found
