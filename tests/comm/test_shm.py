"""The shared-memory transport: every operation bit by bit, failures that name the rank, nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import struct
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.comm import Group, World, shm, shm_segment
from shoal.comm.alike import gather_alike, meet_alike
from shoal.comm.emulate import Throttled
from shoal.comm.shm import Shared
from shoal.comm.transport import Unlike
from shoal.errors import LaunchError
from tests.comm.operations import every_operation, expected
from tests.pool import disposable_ranks, next_number, run_ranks


def open_shared(world: World, seconds: float = 30.0) -> Shared | None:
    """Opens once more in the same world; all ranks count alike."""
    assert world.store is not None
    store = dist.PrefixStore(f"test{next_number(world)}", world.store)
    return Shared.open(store, world.rank, world.size, timedelta(seconds=seconds))


def make_shared(world: World, seconds: float = 30.0) -> Shared:
    shared = open_shared(world, seconds)
    assert shared is not None
    return shared


def wrong_operations(world: World, dtypes: list[torch.dtype], numels: list[int]) -> list[str]:
    group = Group.of(make_shared(world), name="test")
    wrong = []
    for dtype in dtypes:
        for numel in numels:
            got, want = every_operation(group, dtype, numel), expected(world.rank, world.size, dtype, numel)
            assert got.keys() == want.keys()
            wrong += [f"{name} {dtype} {numel}" for name in got if not torch.equal(got[name], want[name])]
    group.close()
    return wrong


FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.fast
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_operation_gives_the_bits_of_the_rank_order(size):
    # 0 and 1: less than a rank's share; 9001: over one meeting for all_reduce in the wider dtypes
    assert run_ranks(wrong_operations, size, FLOATS + INTEGERS, [0, 1, 7, 9001]) == [[]] * size


@pytest.mark.parametrize(("size", "lengths"), [(2, [2_200_003]), (3, [2**18 - 1, 2**18, 600_001])])
def test_tensors_of_several_slots(size, lengths):
    """The longest is filled past the caches, by each rank as by one of two."""
    assert run_ranks(wrong_operations, size, [torch.float32], lengths) == [[]] * size


def reduce_bools_and_complex(world: World) -> list:
    shared = make_shared(world)
    results = []
    for op in ("sum", "max", "min", "product"):
        flat = torch.tensor([True, world.rank == 0, False])
        shared.all_reduce(flat, op)
        results.append(flat.tolist())
    flat = torch.tensor([1 + 2j, 3j]) * (world.rank + 1)
    shared.all_reduce(flat, "avg")
    results.append(flat.tolist())
    with pytest.raises(TypeError, match=r"product of torch\.complex64"):
        shared.all_reduce(flat, "product")
    with pytest.raises(ValueError, match="average of"):
        shared.all_reduce(torch.ones(2, dtype=torch.int32), "avg")
    shared.close()
    return results


def test_bools_and_complex_numbers():
    some, all_ = [True, True, False], [True, False, False]
    for result in run_ranks(reduce_bools_and_complex, 2):
        assert result == [some, some, all_, all_, [1.5 + 3j, 4.5j]]


def gather_with_numbers(world: World, is_slow: bool) -> list:
    shared = make_shared(world)
    group = Group.of(Throttled(shared, 1e12) if is_slow else shared, name="test")
    mine = torch.full((3,), float(world.rank))
    said: list = []
    for unlike in (lambda: gather_alike(group, torch.empty(6), mine, 5 + world.rank, "w", "which"),
                   lambda: gather_alike(group, torch.empty(2 + 2 * world.rank), torch.empty(1 + world.rank),
                                        8 - world.rank, "w", "which"),
                   lambda: (meet_alike(group, 3, "which") if world.rank
                            else gather_alike(group, torch.empty(6), mine, 4, "w", "which"))):  # fmt: skip
        with pytest.raises(Unlike) as failure:
            unlike()
        said.append(failure.value.numbers)
    meet_alike(group, 3, "which")
    out = torch.empty(6)
    gather_alike(group, out, mine, 7, "w", "which")
    said.append(out.tolist())
    said.append(group.ledger.total(purpose="which").calls)
    try:
        gather_alike(group, out, mine, 7, "w", "which") if world.rank else group.all_gather(out, mine)
    except LaunchError as error:
        said.append("does not fit" in str(error))
    group.close()
    return said


@pytest.mark.parametrize("is_slow", [False, True])
def test_gathers_whose_ranks_have_other_numbers_are_refused_and_the_group_goes_on(is_slow):
    for said in run_ranks(gather_with_numbers, 2, is_slow):
        assert said[:3] == [[5, 6], [8, 7], [4, 3]]
        assert said[3] == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
        assert said[4] == 5, "each is booked as it is asked"
        assert said[5] is True, "one of them has no number"


def in_allocated_memory(world: World) -> dict[str, bool]:
    """The same operations on allocated and on private tensors; every element in rank order, so the bits must be those
    of `expected`."""
    shared = make_shared(world)
    rank, size, cut = world.rank, world.size, 100_000
    whole = shared.allocate(size * cut + 64, torch.float32)
    assert whole is not None and not whole.any()
    flat, small = whole[64:], whole[:64]
    draws = [torch.randn(size * cut, generator=torch.Generator().manual_seed(other)) for other in range(size)]
    total = draws[0].clone()
    for draw in draws[1:]:
        total += draw
    mine = slice(rank * cut, (rank + 1) * cut)
    same = {}

    meetings = _meetings(shared)
    shared.all_reduce(flat.copy_(draws[rank]), "avg")
    same["all_reduce"] = torch.equal(flat, total / size) and _meetings(shared) == meetings + 2
    shared.all_reduce(small.fill_(rank), "max")
    same["small"] = small.eq(size - 1).all().item()

    shared.barrier()  # before the others' tensors change
    meetings = _meetings(shared)
    out = torch.empty(cut)
    shared.reduce_scatter(out, flat.copy_(draws[rank]), "sum")
    same["reduce_scatter"] = torch.equal(out, total[mine]) and _meetings(shared) == meetings + 2
    shared.reduce_scatter(flat[mine], flat, "sum")
    same["reduce_scatter into its own cut"] = torch.equal(flat[mine], total[mine])
    shared.barrier()
    shared.reduce_scatter(flat[:cut], flat.copy_(draws[rank]), "sum")
    same["reduce_scatter into rank 0's cut"] = torch.equal(flat[:cut], total[mine])

    shared.barrier()
    meetings = _meetings(shared)
    flat.zero_()[mine] = draws[rank][mine]
    shared.all_gather(flat, flat[mine])
    gathered = torch.cat([draw[other * cut : (other + 1) * cut] for other, draw in enumerate(draws)])
    same["all_gather in place"] = torch.equal(flat, gathered) and _meetings(shared) == meetings + 2
    shared.barrier()
    flat[:cut] = draws[rank][mine]
    out = torch.empty(size * cut)
    shared.all_gather(out, flat[:cut])
    same["all_gather from there"] = torch.equal(out, gathered)
    shared.all_gather(flat, draws[rank][mine])
    same["all_gather to there"] = torch.equal(flat, gathered)

    for name, tensor in {
        "one is private": flat if rank else draws[0].clone(),
        "other places": whole[rank : rank + size * cut],
    }.items():
        shared.barrier()
        shared.all_reduce(tensor.copy_(draws[rank]), "sum")
        same[f"all_reduce, {name}"] = torch.equal(tensor, total)
        shared.reduce_scatter(out[:cut], tensor.copy_(draws[rank]), "sum")
        same[f"reduce_scatter, {name}"] = torch.equal(out[:cut], total[mine])
        tensor[mine] = draws[rank][mine]
        shared.all_gather(tensor, tensor[mine])
        same[f"all_gather, {name}"] = torch.equal(tensor, gathered)

    shared.barrier()
    mappings = _mappings()
    del whole, flat, small, tensor
    same["gone with its tensors"] = _mappings() == mappings - 1
    shared.close()
    return same


def _meetings(shared: Shared) -> int:
    """How many meetings this rank has been to: the only thing seen from outside that tells copying from not copying."""
    assert shared._view is not None
    return struct.unpack_from("q", shared._view.state, 40)[0]


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:shoal")


@pytest.mark.fast
@pytest.mark.parametrize("size", [2, 3])
def test_allocated_tensors_give_the_same_bits_without_copies(size):
    for result in run_ranks(in_allocated_memory, size):
        assert [name for name, right in result.items() if not right] == []


def no_room(world: World, for_allocation: bool) -> tuple[bool, list[str]]:
    shared = make_shared(world) if for_allocation else None
    fallocate, os.posix_fallocate = os.posix_fallocate, _no_space
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            had = open_shared(world) if shared is None else shared.allocate(1000, torch.float32)
            return had is None, [str(warning.message) for warning in caught]
    finally:
        os.posix_fallocate = fallocate


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.fast
@pytest.mark.parametrize("for_allocation", [False, True])
def test_no_room_is_said_once_and_all_do_without(for_allocation):
    (without, (message,)), other = run_ranks(no_room, 2, for_allocation)
    assert without and other == (True, [])
    assert "shared memory cannot be used: rank 0 cannot have" in message and "No space left" in message


def no_kernels(world: World) -> tuple[bool, list[str]]:
    kernels, shm.library = shm.library, lambda: None
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return open_shared(world) is None, [str(warning.message) for warning in caught]
    finally:
        shm.library = kernels


@pytest.mark.fast
def test_ranks_without_kernels_are_told_where_to_look():
    """There may be a compiler that does not compile them."""
    said = "shared memory cannot be used: rank 0 does not have the native kernels (`shoal doctor` says more)"
    assert run_ranks(no_kernels, 2) == [(True, [said]), (True, [])]


def one_cannot_map(world: World) -> bool:
    if world.rank == 1:
        shm_segment.process_table = lambda: "elsewhere"
    return open_shared(world) is None


def test_if_one_rank_cannot_all_do_without():
    with disposable_ranks(one_cannot_map, 3) as ranks:
        assert [rank.result() for rank in ranks] == [True] * 3


def traces(world: World) -> tuple[list[str], int, list[str]]:
    gc.collect()  # an engine that a test before this one left open
    before = _mappings()
    shared = make_shared(world)
    shared.barrier()
    links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    modes = [oct(link.stat().st_mode & 0o777) for link in links if link.exists() and "memfd:shoal" in os.readlink(link)]
    mappings = _mappings() - before
    shared.close()
    return [name for name in os.listdir("/dev/shm") if "shoal" in name], mappings, modes


@pytest.mark.fast
@pytest.mark.alone
def test_the_memory_has_no_name_and_is_the_users_own():
    for names, mappings, modes in run_ranks(traces, 2):
        assert names == [] and mappings == 1 and set(modes) == {"0o600"}


def open_and_close(world: World, times: int) -> list[tuple[int, int, int]]:
    marks = []
    for _ in range(times):
        shared = make_shared(world)
        chunk = shared.allocate(1000, torch.float32)
        assert chunk is not None
        shared.all_reduce(chunk, "sum")
        shared.close()
        del shared, chunk
        marks.append((len(os.listdir("/proc/self/fd")), _mappings(), threading.active_count()))
    return marks


@pytest.mark.alone
def test_opening_and_closing_leaves_nothing():
    for marks in run_ranks(open_and_close, 2, 300):
        assert len(set(marks)) == 1, f"first {marks[0]}, last {marks[-1]} (descriptors, mappings, threads)"


def all_reduce_until_it_fails(world: World, ready: Path) -> tuple[str, float]:
    return _error_of(lambda shared: shared.all_reduce(torch.ones(200_000), "sum"), world, ready)


def exchange_until_it_fails(world: World, ready: Path) -> tuple[str, float]:
    def turn(shared: Shared) -> None:
        left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
        shared.exchange(torch.empty(1000), left, torch.ones(1000), right)

    return _error_of(turn, world, ready)


def _error_of(turn, world: World, ready: Path) -> tuple[str, float]:
    shared = make_shared(world)
    shared.barrier()
    ready.touch()
    started = 0.0
    try:
        while True:
            started = time.monotonic()
            turn(shared)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match="cannot be used any more"):
            shared.barrier()
        return str(error), time.monotonic() - started


@pytest.mark.parametrize("run", [all_reduce_until_it_fails, exchange_until_it_fails])
@pytest.mark.alone
def test_a_killed_rank_is_named_at_once_by_all_others(run, tmp_path):
    with disposable_ranks(run, 4, tmp_path / "ready") as ranks:
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(ranks[1].pid, signal.SIGKILL)
        for survivor in (ranks[0], ranks[2], ranks[3]):
            message, seconds = survivor.result()
            assert "rank 1" in message and seconds < 5


def come_late(world: World) -> str:
    shared = make_shared(world, seconds=0.5)
    if world.rank == 1:
        time.sleep(1.5)
    with pytest.raises(RuntimeError) as failure:
        shared.all_reduce(torch.ones(100_000), "sum")
        shared.barrier()
    return str(failure.value)


@pytest.mark.alone
def test_a_late_rank_is_named_and_learns_that_the_others_gave_up():
    first, late = run_ranks(come_late, 2)
    assert first == "waited for the group's rank 1 until the timeout of 0.5 s was over"
    assert late == "the group's rank 0 has failed: it waited in vain for rank 1"


def leave_early(world: World) -> str:
    shared = make_shared(world)
    shared.barrier()
    if world.rank == 0:
        shared.close()
        with pytest.raises(RuntimeError, match="has been closed"):
            shared.barrier()
        return ""
    with pytest.raises(RuntimeError) as failure:
        shared.broadcast(torch.ones(3), 0)
    return str(failure.value)


def test_a_rank_that_closed_is_named():
    assert run_ranks(leave_early, 2)[1] == "the group's rank 0 has closed the group"


def call_otherwise(world: World, what: str) -> str:
    shared = make_shared(world)
    one = world.rank == 1
    calls = {
        "size": lambda: shared.all_reduce(torch.ones(8 if one else 4), "sum"),
        "op": lambda: shared.all_reduce(torch.ones(4), "sum" if one else "max"),
        "operation": lambda: shared.broadcast(torch.ones(4), 0) if one else shared.all_reduce(torch.ones(4), "sum"),
        "message": lambda: shared.recv(torch.ones(8), 0, 1) if one else shared.send(torch.ones(4), 1, 2),
    }
    try:
        calls[what]()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.fast
@pytest.mark.parametrize("what", ["size", "op", "operation"])
def test_calls_that_do_not_fit_are_refused_by_all(what):
    zero, one = run_ranks(call_otherwise, 2, what)
    assert (
        "does not fit what the group's rank 1 called" in zero and "does not fit what the group's rank 0 called" in one
    )


def test_a_message_that_does_not_fit_is_refused():
    expected_message = (
        "recv does not fit what the group's rank 0 called: a message of 16 bytes with tag 2 came, 32 bytes with tag 1 "
        "were"
    )
    assert run_ranks(call_otherwise, 2, "message")[1].startswith(expected_message)


def wait_and_measure(world: World) -> float:
    shared = make_shared(world)
    shared.barrier()
    if world.rank == 0:
        time.sleep(1.0)
    used = time.process_time()
    shared.barrier()
    return time.process_time() - used


@pytest.mark.alone
def test_a_waiting_rank_sleeps():
    assert run_ranks(wait_and_measure, 2)[1] < 0.3  # of a core, for a second


def keep_waiting(world: World) -> float:
    shared = make_shared(world)
    shared.barrier()
    started = time.monotonic()
    for _ in range(30):
        if world.rank == 0:
            time.sleep(0.01)
        shared.barrier()
    return time.monotonic() - started


@pytest.mark.alone
def test_a_sleeping_rank_is_woken():
    assert run_ranks(keep_waiting, 2)[0] < 1.5  # 30 x 0.01 s of sleep; 3 s if each looked again only after 0.1 s


def wait_and_be_interrupted(world: World) -> bool:
    shared = make_shared(world)
    if world.rank == 0:
        time.sleep(1.0)
        return True
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        shared.barrier()
    except KeyboardInterrupt:
        return True
    return False


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_waiting_rank_can_be_interrupted():
    with disposable_ranks(wait_and_be_interrupted, 2) as ranks:
        assert ranks[1].result() is True


def send_across(world: World) -> bool:
    """Both send more than fits before either receives: in two threads, beside a collective."""
    shared, other = make_shared(world), 1 - world.rank
    sender = threading.Thread(target=shared.send, args=(torch.full((1_000_000,), float(world.rank)), other, 3))
    sender.start()
    flat, got = torch.ones(1000), torch.empty(1_000_000)
    shared.all_to_all(torch.empty(4), torch.ones(4), [2, 2], [2, 2])
    shared.all_reduce(flat, "sum")
    shared.recv(got, other, 3)
    sender.join()
    return flat.eq(2).all().item() and got.eq(other).all().item()


def test_messages_on_their_way_do_not_stand_in_the_way_of_collectives():
    assert run_ranks(send_across, 2) == [True, True]
