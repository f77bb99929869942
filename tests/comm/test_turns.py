"""Two threads of a rank on one group: collectives come one at a time and in the order of the calls, on every
carrier."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm import World
from shoal.comm.turns import Turns
from tests.comm.test_backend import process_group
from tests.pool import apart, disposable_ranks, run_ranks

MANY, FEW = 6_000_000, 1_000_000
"""Elements of the call that is under way, some tens of milliseconds, and of the one that another thread makes
meanwhile."""


def in_the_middle(transport: Any, first: Callable[[], object], second: Callable[[], object]) -> None:
    """Calls `first`, and `second` in another thread once `first` has come to the transport."""
    entered, original = threading.Event(), transport.all_reduce

    def all_reduce(flat: Tensor, op: str) -> None:
        entered.set()
        original(flat, op)

    errors: list[BaseException] = []

    def beside() -> None:
        try:
            assert entered.wait(20)
            second()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=beside)
    thread.start()
    transport.all_reduce = all_reduce
    try:
        first()
    finally:
        thread.join()
        transport.all_reduce = original
    if errors:
        raise errors[0]


def sums_of_torch(world: World, first_waits: bool, second_waits: bool, tries: int) -> list[tuple[float, ...]]:
    """Smallest and largest element of all that was summed, which must be 3, 30 and 300."""
    seen = []
    with process_group(world, "shm"):
        transport = dist.group.WORLD._transport  # type: ignore[union-attr]
        for _ in range(tries):
            one, two, three = (
                torch.full((n,), v * (world.rank + 1)) for n, v in ((MANY, 1.0), (FEW, 10.0), (FEW, 100.0))
            )
            works: list[Any] = []

            def reduce(tensor: Tensor, waits: bool, works: list[Any] = works) -> None:
                works.append(dist.all_reduce(tensor, async_op=not waits))

            in_the_middle(transport, lambda: reduce(one, first_waits), lambda: reduce(two, second_waits))  # noqa: B023
            reduce(three, True)
            for work in works:
                if work is not None:
                    work.wait()
            seen.append(tuple(float(end) for tensor in (one, two, three) for end in tensor.aminmax()))
    return seen


@pytest.mark.parametrize("second_waits", [False, True], ids=["then asynchronous", "then blocking"])
@pytest.mark.parametrize("first_waits", [False, True], ids=["asynchronous", "blocking"])
def test_a_call_of_another_thread_waits_for_the_one_under_way(first_waits, second_waits):
    for seen in run_ranks(sums_of_torch, 2, first_waits, second_waits, 3):
        assert set(seen) == {(3.0, 3.0, 30.0, 30.0, 300.0, 300.0)}


def failing(world: World, refused: bool) -> list[str]:
    """The first call fails: before anything is sent (`refused`), or because the ranks' calls do not fit each other."""
    said = []
    with process_group(world, "shm"):
        tensor, other = torch.ones(MANY + (0 if refused else world.rank)), torch.ones(FEW)

        def first() -> None:
            if refused:
                with pytest.raises(TypeError, match="uint16"):
                    dist.all_reduce(tensor.to(torch.uint16))
            else:
                with pytest.raises(RuntimeError, match="does not fit"):
                    dist.all_reduce(tensor)

        def second() -> None:
            try:
                dist.all_reduce(other, async_op=True).wait()
            except RuntimeError as error:
                said.append(str(error))

        in_the_middle(dist.group.WORLD._transport, first, second)  # type: ignore[union-attr]
        return [*said, str(other.unique().tolist())]


def test_a_call_that_fails_lets_the_next_one_in():
    assert run_ranks(failing, 2, True) == [["[2.0]"]] * 2
    for said, _ in run_ranks(failing, 2, False):
        assert "cannot be used any more" in said


def chained(world: World) -> float:
    """What a future calls when its work is done makes a call and waits for it, as DDP's PowerSGD hook does; another one
    is queued by then."""
    with process_group(world, "shm"):
        one, two, three = torch.ones(MANY), torch.ones(3), torch.ones(3)

        def again(_: Any) -> Tensor:
            return dist.all_reduce(two, async_op=True).get_future().wait()[0]

        future = dist.all_reduce(one, async_op=True).get_future().then(again)
        result = float(future.wait().sum())
        dist.all_reduce(three, async_op=True).wait()
        return result + float(three.sum())


def test_what_follows_a_work_may_wait_for_another_one():
    with disposable_ranks(chained, 2) as ranks:
        assert [rank.result(30) for rank in ranks] == [12.0] * 2


def sums_of_a_group(world: World, on_sockets: bool, tries: int) -> list[tuple[float, ...]]:
    world = apart(world) if on_sockets else world
    group = world.everyone
    seen = []
    for _ in range(tries):
        one, two = torch.full((MANY,), world.rank + 1.0), torch.full((FEW,), 10.0 * (world.rank + 1))
        in_the_middle(group.transports["cpu"], lambda: group.all_reduce(one), lambda: group.all_reduce(two))  # noqa: B023
        seen.append(tuple(float(end) for tensor in (one, two) for end in tensor.aminmax()))
    return seen


@pytest.mark.parametrize("on_sockets", [False, True], ids=["shared memory", "sockets"])
def test_threads_share_a_group(on_sockets):
    for seen in run_ranks(sums_of_a_group, 2, on_sockets, 3):
        assert set(seen) == {(3.0, 3.0, 30.0, 30.0)}


def objects_and_sums(world: World) -> list[Any]:
    """An operation of several collectives is not interrupted by another thread's."""
    group, got = world.everyone, []
    word = "x" * 3_000_000 * (world.rank + 1)
    in_the_middle(
        group.transports["cpu"],
        lambda: got.append(float(group.all_reduce(torch.ones(MANY))[0])),
        lambda: got.append([len(text) for text in group.all_gather_object(word)]),
    )
    return [*got, len(group.broadcast_object(word, 1))]


def test_objects_travel_in_one_turn():
    assert run_ranks(objects_and_sums, 2) == [[2.0, [3_000_000, 6_000_000], 6_000_000]] * 2


def messages_from_threads(world: World, on_sockets: bool) -> list[float]:
    """Four threads send whole letters to the same rank: none is torn."""
    world = apart(world) if on_sockets else world
    group, numel = world.everyone, 500_000
    if world.rank == 0:
        threads = [threading.Thread(target=group.send, args=(torch.full((numel,), float(n)), 1)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return []
    letters = [group.recv(torch.empty(numel), 0) for _ in range(4)]
    return sorted(float(letter[0]) for letter in letters if letter.eq(letter[0]).all())


@pytest.mark.parametrize("on_sockets", [False, True], ids=["shared memory", "sockets"])
def test_threads_send_to_one_rank(on_sockets):
    assert run_ranks(messages_from_threads, 2, on_sockets)[1] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.fast
def test_turns_come_in_the_order_of_asking_and_may_be_taken_again():
    turns, came = Turns(), []
    first = turns.ask()
    turns.take(first)
    places = [turns.ask() for _ in range(3)]

    def wait(number: int) -> None:
        turns.take(places[number])
        came.append(number)
        with turns:
            came.append(number)
        turns.leave()

    threads = [threading.Thread(target=wait, args=(number,)) for number in (2, 1, 0)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert came == []
    turns.leave()
    for thread in threads:
        thread.join()
    assert came == [0, 0, 1, 1, 2, 2]


@pytest.mark.fast
def test_who_is_interrupted_gives_its_turn_up():
    turns, held = Turns(), threading.Event()

    def hold() -> None:
        with turns:
            held.set()
            time.sleep(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt), turns:
            pass
    finally:
        signal.signal(signal.SIGALRM, before)
    thread.join()
    with turns:  # free again
        pass


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
