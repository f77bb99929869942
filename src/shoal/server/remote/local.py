"""Owners as processes of this host."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from shoal.comm.secret import new_secret
from shoal.errors import LaunchError
from shoal.server.remote.owner import Owner

_START_SECONDS = 120.0
_END_SECONDS = 10.0


@contextmanager
def local_owners(factories: Sequence[Any], count: int, threads: int = 1) -> Iterator[tuple[list[str], str]]:
    """Starts `count` processes, each an `Owner` of `factories`; yields their addresses and their token. They end with
    the context, or with this process.

    factories: classes and functions that can be imported (a script needs `if __name__ == "__main__"`), or
        "package.module:name".
    threads: of torch in each process.

    Raises LaunchError where one does not start.
    """
    token = new_secret()
    with ExitStack() as stack:
        started = [stack.enter_context(_started(factories, token, threads)) for _ in range(count)]
        yield [_address(process, pipe) for process, pipe in started], token


@contextmanager
def _started(factories: Sequence[Any], token: str, threads: int) -> Iterator[tuple[BaseProcess, Connection]]:
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=_own, args=(list(factories), token, threads, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, pipe
    finally:
        pipe.close()
        process.join(_END_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


def _address(process: BaseProcess, pipe: Connection) -> str:
    """Returns the address of a process that has started."""
    if pipe in wait([pipe, process.sentinel], _START_SECONDS):
        try:
            return str(pipe.recv())
        except EOFError:
            process.join(_END_SECONDS)
    raise LaunchError(
        f"an owner on this host has not started (exit status {process.exitcode}): see what it has printed"
    )


def _own(factories: list[Any], token: str, threads: int, pipe: Connection) -> None:
    torch.set_num_threads(threads)
    with Owner(factories, token=token) as owner:
        pipe.send(owner.address)
        wait([pipe])  # it ends with the process at the other end
