"""What `collectives` calls, keeps and prints."""

from __future__ import annotations

from io import StringIO

import pytest
import torch
from rich.console import Console

from benchmarks import collectives, harness
from benchmarks.carriers import CARRIERS, OPERATIONS, Buffers, buffers, private
from benchmarks.collectives import KIB, MIB, SIZES, TARGETS, calls_a_turn, figure_key, figures, size_name, tables
from benchmarks.harness import Samples
from shoal.comm import Group
from shoal.comm.emulate import simulate

pytestmark = pytest.mark.fast


def case(operation: str, num_bytes: int) -> dict:
    """gloo takes 4 and 8 ms, shared memory half and a quarter of it in the same rounds."""
    samples = Samples({"gloo": [[4.0], [8.0]], "shm": [[2.0], [2.0]]}, {"gloo": 0.0, "shm": 0.0})
    return harness.result_of(
        samples, "gloo", {"gloo": "", "shm": ""}, operation=operation, ranks=2, bytes=num_bytes, steps=5
    )


@pytest.mark.parametrize(
    ("operation", "flat", "out"),
    [("all_reduce", 8, 8), ("reduce_scatter", 8, 2), ("all_gather", 2, 8), ("all_to_all", 8, 8), ("broadcast", 8, 8)],
)
def test_the_large_side_has_the_bytes_of_the_case(operation: str, flat: int, out: int) -> None:
    made = buffers(private, 4, operation, 32)
    assert (made.flat.numel(), made.out.numel()) == (flat, out)
    assert (made.flat is made.out) == (operation in ("all_reduce", "broadcast"))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_only_large_tensors_are_allocated_in_the_segment(operation: str) -> None:
    asked: list[int] = []

    def allocate(numel: int) -> torch.Tensor:
        asked.append(numel)
        return torch.zeros(numel)

    buffers(allocate, 4, operation, 32)
    assert set(asked) == {8}


def test_shoals_calls_fit_the_buffers_of_every_operation() -> None:
    from benchmarks.carriers import _through

    def both(group: Group) -> None:
        step = _through(group, private)
        for operation in OPERATIONS:
            step(operation, 64)

    simulate(2, both)


def test_a_step_keeps_its_tensors_while_the_case_stays() -> None:
    from benchmarks.carriers import _through

    made: list[int] = []

    def counting(numel: int) -> torch.Tensor:
        made.append(numel)
        return private(numel)

    def alone(group: Group) -> None:
        step = _through(group, counting)
        for num_bytes in (64, 64, 32, 32):
            step("all_reduce", num_bytes)

    simulate(1, alone)
    assert made == [16, 8]


def test_buffers_are_written_memory() -> None:
    assert Buffers(private(3), private(3)).flat.tolist() == [0.0, 0.0, 0.0]


def test_sizes_go_from_1_kib_to_64_mib_and_large_ones_are_called_less() -> None:
    assert [size_name(size) for size in (SIZES[0], SIZES[4], SIZES[-1])] == ["1 KiB", "256 KiB", "64 MiB"]
    assert [calls_a_turn(size) for size in (KIB, 4 * MIB, 64 * MIB)] == [100, 16, 5]


def test_every_target_is_measured_by_a_full_run() -> None:
    measured = {
        figure_key(operation, ranks, size, name)
        for name, carrier in CARRIERS.items()
        for operation in carrier.operations
        for ranks in (2, 4)
        for size in SIZES
    }
    assert {target.key for target in TARGETS} <= measured
    assert len(TARGETS) == 10


def test_ratios_are_of_the_same_round() -> None:
    found = figures([case("all_reduce", 4 * MIB)])
    assert found == {"all_reduce, 2 ranks, 4 MiB, gloo": 1.0, "all_reduce, 2 ranks, 4 MiB, shm": 3.0}  # of 2 and 4


def test_a_table_an_operation() -> None:
    made = tables([case("all_reduce", KIB), case("all_reduce", MIB), case("broadcast", KIB)])
    assert [table.row_count for table in made] == [2, 1]
    console = Console(file=StringIO(), width=160)
    console.print(made[0])
    printed = console.file.getvalue()
    assert "all_reduce, 2 ranks" in printed and "1 MiB" in printed and "2 (2..2)  3.0x" in printed


def test_a_turn_is_one_figure() -> None:
    class Ranks:
        def turn(self, steps: int, operation: str, num_bytes: int) -> list[float]:
            assert (steps, operation, num_bytes) == (3, "all_reduce", KIB)
            return [1.0, 9.0, 2.0]

        def cpu_seconds(self) -> float:
            return 0.5

    one = collectives.OfCase(Ranks(), "all_reduce", KIB)  # type: ignore[arg-type]
    assert one.turn(3) == [2.0] and one.cpu_seconds() == 0.5
