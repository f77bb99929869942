"""Ranks for tests: standing ones for ordinary multi-process tests, disposable ones for those that kill.

    def add(world, value):                       # top level, so that it can be pickled
        return float(world.everyone.all_reduce(torch.tensor(value)))

    assert run_ranks(add, 2, 1.0) == [2.0, 2.0]

Rank processes are forked from a server that has imported torch, shoal and the models of tests/parity
(tests/preloaded.py), so a start costs a fraction of a second. A call on `size` ranks uses the first `size` standing
ones, so what a rank has imported and warmed up serves calls of every size. The store's server lives here, in the test's
own process.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch._dynamo
import torch.distributed as dist

from shoal.comm.world import Seat, World
from shoal.launch.store import serve_on

TIMEOUT = 240.0  # seconds a call may take, on cores that have other work too
GRACE = 5.0  # seconds that the other ranks have to end once one has failed; a collective's autopsy takes 2
LARGE = 2**30  # bytes; what a rank has imported and compiled stays, and in 12,000 tests ten of them took 16 GiB
_PR_SET_PDEATHSIG = 1

_context = multiprocessing.get_context("forkserver")
preload = _context.set_forkserver_preload
preload(["tests.preloaded"])
around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
"""Makes of a function what ranks call instead: tests/covered.py measures it there."""
_call_numbers = itertools.count()
_standing: dict[int, Rank] = {}
_references: dict[bytes, list[Any]] = {}
_numbers: WeakKeyDictionary[World, Iterator[int]] = WeakKeyDictionary()


class RankError(AssertionError):
    """What went wrong in the ranks: the first failing rank's traceback, then a line for each of the others."""


def run_ranks(fn: Callable[..., Any], size: int, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Calls `fn(world, *args)` on `size` standing ranks; returns their results in rank order.

    The world is fresh: its keys stand under a prefix of this call. Ranks that hold more than `LARGE` are ended before
    and started anew. Raises RankError if a rank raises, dies or does not return in `timeout` seconds; if one did not
    answer, those of the call are killed and the next one starts new ones.
    """
    _end([rank for rank in _standing.values() if rank.holds > LARGE])
    pool = [_standing.get(rank) or _standing.setdefault(rank, Rank(rank)) for rank in range(size)]
    try:
        _submit(pool, fn, args)
        answers = _collect(pool, timeout)
    except BaseException:
        _end(pool)
        raise
    silent = [rank for rank in pool if rank.rank not in answers]
    if silent or any(rank.pipe_ended for rank in pool):
        _end(pool)
    failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failed)}
    if silent or failures:
        raise RankError(_describe(failures, silent, timeout))
    return [answers[rank] for rank in range(size)]


def reference(fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """`run_ranks` for what several rows are compared with: the same call is made once. Its results are not to be
    changed."""
    call = pickle.dumps((fn, size, args))
    if call not in _references:
        _references[call] = run_ranks(fn, size, *args)
    return _references[call]


@contextmanager
def disposable_ranks(fn: Callable[..., Any], size: int, *args: Any) -> Iterator[list[Rank]]:
    """Fresh ranks running `fn(world, *args)`, for tests that kill, stop or abandon them; those left at the end are
    killed."""
    ranks = [Rank(rank) for rank in range(size)]
    try:
        _submit(ranks, fn, args)
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()


def end_ranks() -> None:
    """Ends the standing ranks."""
    _end(list(_standing.values()))


class Failed:
    """An exception of a rank as text, with the second at which it was raised."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.time = time.monotonic()  # one clock for all processes of a host

    @property
    def last_line(self) -> str:
        return self.text.strip().splitlines()[-1]


class Rank:
    """One rank's process and the pipe to it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pipe_ended = False
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, rank, _server().port), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def holds(self) -> int:
        """Bytes of its memory that are of no file."""
        try:
            _, resident, of_files, *_ = Path(f"/proc/{self.pid}/statm").read_text().split()
        except (OSError, ValueError):  # it has ended
            return 0
        return (int(resident) - int(of_files)) * os.sysconf("SC_PAGE_SIZE")

    @property
    def exitcode(self) -> int | None:
        """None while it runs, -signal if one killed it."""
        return self.process.exitcode

    def join(self, timeout: float = TIMEOUT) -> None:
        """Waits until the process has ended."""
        self.process.join(timeout)

    def result(self, timeout: float = TIMEOUT) -> Any:
        """What `fn` returned. Raises RankError if it raised, died or took longer than `timeout` seconds."""
        answers = _collect([self], timeout)
        if self.rank not in answers:
            raise RankError(_describe({}, [self], timeout))
        if isinstance(answers[self.rank], Failed):
            raise RankError(_describe(answers, [], timeout))
        return answers[self.rank]

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@cache
def _server() -> dist.TCPStore:
    return serve_on("127.0.0.1")


def _submit(ranks: list[Rank], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    call = pickle.dumps((around(fn) if around else fn, args))
    message = pickle.dumps((next(_call_numbers), len(ranks), sys.path, call))
    for rank in ranks:
        rank.pipe.send_bytes(message)


def _collect(ranks: list[Rank], timeout: float) -> dict[int, Any]:
    """Answers by rank until all have come, or `timeout` is over, or the grace after a failure is."""
    answers: dict[int, Any] = {}
    waiting = {rank.pipe: rank for rank in ranks}
    deadline = time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            rank = waiting.pop(pipe)  # type: ignore[arg-type]
            try:
                answers[rank.rank] = pickle.loads(rank.pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                rank.pipe_ended = True
                rank.process.join()
                answers[rank.rank] = Failed(f"its process ended: {_ending(rank.process.exitcode)}")
            if isinstance(answers[rank.rank], Failed):
                deadline = min(deadline, time.monotonic() + GRACE)
    return answers


def _ending(exitcode: int | None) -> str:
    assert exitcode is not None
    return f"killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"exit code {exitcode}"


def _describe(failures: dict[int, Failed], silent: list[Rank], timeout: float) -> str:
    lines = []
    for place, (rank, failed) in enumerate(sorted(failures.items(), key=lambda item: item[1].time)):
        lines.append(f"rank {rank} failed: {failed.text if place == 0 else failed.last_line}")
    if silent:
        when = f"within {GRACE:.0f} s after that failure" if failures else f"within {timeout:.0f} s"
        lines.append(f"did not return {when}: rank {', '.join(str(rank.rank) for rank in silent)}")
    return "\n".join(lines)


def _end(pool: list[Rank]) -> None:
    for rank in pool:
        _standing.pop(rank.rank).kill()


def _serve(pipe: Connection, rank: int, port: int) -> None:
    """The rank's process: answers calls until the pipe closes; dies with its parent, the server that has forked it, and
    that ends with the test's process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _let_the_server_end()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    imported = _freeze()
    while True:
        try:
            number, size, path, call = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        sys.path[:] = path  # a test's module may lie in a folder that the test run has only now come to
        answer = _answer(call, rank, size, dist.PrefixStore(f"call{number}", store))
        torch._dynamo.reset()  # or, past the limit of recompilations, what is compiled would run as it is written
        gc.collect()  # closes the call's connections, so that the ranks that wait for a failed one notice it
        if len(sys.modules) > imported:
            imported = _freeze()
        try:
            message = pickle.dumps(answer)
        except Exception:
            message = pickle.dumps(Failed(f"the result cannot be pickled\n{traceback.format_exc()}"))
        pipe.send_bytes(message)


def _let_the_server_end() -> None:
    """Closes this process's end of the pipe by which the server sees that its clients live: a rank in the middle of a
    call would keep it, and itself, long after the test's process has ended."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = server._forkserver_address = server._forkserver_pid = None


def _freeze() -> int:
    """Takes all objects of now out of later collections, which else cost 0.2 s a call and rank; counts the modules."""
    gc.freeze()
    return len(sys.modules)


def _answer(call: bytes, rank: int, size: int, store: dist.Store) -> Any:
    try:
        fn, args = pickle.loads(call)
        return fn(make_world(rank, size, store), *args)
    except BaseException:  # SystemExit too: a rank that leaves must not take the pool with it
        return Failed(traceback.format_exc())


def apart(world: World) -> World:
    """The same ranks as if each were on a host of its own: they share no memory and talk over sockets."""
    store = dist.PrefixStore("apart", world.store) if world.store is not None else None
    seat = Seat(host_id=f"host {world.rank}")
    return World(world.rank, world.size, seat=seat, store=store, device="cpu", timeout=world.timeout)


def next_number(world: World) -> int:
    """Counts the calls with this world. A process may not count for itself: it serves calls of more and fewer ranks."""
    return next(_numbers.setdefault(world, itertools.count()))


def make_world(rank: int, size: int, store: dist.Store | None) -> World:
    """The world of a test's rank: all on this host, on the CPU, giving up on a hung collective after a minute."""
    return World(rank, size, seat=Seat(rank, size), store=store, device="cpu", timeout=timedelta(minutes=1))
