"""The ranks meet at their store: connecting, the roll call, and which ranks share a host."""

from __future__ import annotations

import atexit
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist

from shoal.comm.address import family_of
from shoal.comm.awaiting import AwaitingStore
from shoal.comm.secret import find_secret
from shoal.comm.signed import SignedStore, meet
from shoal.errors import LaunchError
from shoal.launch.failure import first_line
from shoal.launch.identity import Identity

_RETRY_SECONDS = 0.2
PARTING_SECONDS = 10.0
"""How long a rank 0 that serves the store waits at exit for the others, which may still need it, e.g. to end a save."""
_met: list[tuple[dist.Store, int, int]] = []
"""For runs whose rank 0 serves the store: this process's connection, its rank, and the number of ranks."""
_LOOPBACK = ("127.0.0.1", "localhost")
"""Addresses that only ranks of this host can use; its host name may resolve to another interface."""


def serve_on(host: str, port: int = 0) -> dist.TCPStore:
    """Starts a store's server on `port` (0: a free one) of the address `host` only; torch's default is every
    interface."""
    listener = socket.create_server((host, port), family=family_of(host))
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect(identity: Identity, timeout: float = 300.0, secret: bytes | None = None) -> SignedStore | None:
    """Returns the store of `identity`'s ranks, once all of them have come; None for a single process.

    The keys have a prefix with the generation.

    timeout: seconds to wait.
    secret: shared by all ranks; by default see `comm.secret`.

    Raises LaunchError with host, port, rank, the time waited and the missing ranks, if the address cannot be reached,
    the port is taken, a rank comes twice, a rank does not come in time, or one does not know the secret.
    """
    if not identity.store_url:
        return None
    secret = find_secret() if secret is None else secret
    started = time.monotonic()
    bare = _file_store(identity) if identity.store_url.startswith("file:") else _tcp_store(identity, timeout)
    plain = dist.PrefixStore(f"shoal/gen{identity.generation}", bare)
    left = max(1.0, timeout - (time.monotonic() - started))
    _roll_call(plain, identity, left)
    try:
        store = meet(plain, identity.rank, identity.size, secret, timedelta(seconds=left))
    except RuntimeError as error:
        raise LaunchError(_incomplete(plain, identity, left, error)) from error
    store.set(f"host/{identity.rank}", socket.gethostname())
    if identity.rank0_serves:
        _met.append((plain, identity.rank, identity.size))
    return store


def connect_placed(identity: Identity, secret: bytes, check: Callable[[], None], timeout: float = 300.0) -> SignedStore:
    """Returns the store of ranks that their supervisors have placed, so that nobody calls the roll. `check` is called
    twice a second while this rank waits for others, and ends the wait by raising."""
    bare = AwaitingStore(_tcp_store(identity, timeout), check)
    return meet(bare, identity.rank, identity.size, secret, timedelta(seconds=timeout))


@atexit.register
def _part() -> None:
    """Tells the stores that this process no longer needs them. A rank 0 that serves a store waits until no rank needs
    it, at most `PARTING_SECONDS`, and not after an error."""
    deadline = time.monotonic() + PARTING_SECONDS
    with suppress(RuntimeError):  # rank 0 is gone
        for store, _, _ in _met:
            store.add("parted", 1)
        for store, rank, size in _met:
            while (
                rank == 0
                and store.add("parted", 0) < size
                and not hasattr(sys, "last_value")
                and time.monotonic() < deadline
            ):
                time.sleep(0.02)


def locate(identity: Identity, store: dist.Store | None) -> Identity:
    """Returns `identity` with its local rank and size, from the ranks' host names where the launcher gave none."""
    if identity.local_rank is not None and identity.local_size is not None:
        return identity
    assert store is not None, "a single process knows its local rank"
    hosts = [store.get(f"host/{rank}") for rank in range(identity.size)]
    here = [rank for rank, host in enumerate(hosts) if host == hosts[identity.rank]]
    return replace(identity, local_rank=here.index(identity.rank), local_size=len(here))


def rank_list(ranks: list[int]) -> str:
    """Formats ascending ranks for a message: [0, 2, 3, 4] -> "0, 2-4"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _file_store(identity: Identity) -> dist.Store:
    path = Path(urlsplit(identity.store_url).path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return dist.FileStore(str(path), identity.size)
    except (OSError, RuntimeError) as error:
        raise LaunchError(
            f"rank {identity.rank}: the store file {path} cannot be opened: {first_line(error)}. "
            "Name a file in a folder that every rank can write."
        ) from error


def _tcp_store(identity: Identity, timeout: float) -> dist.Store:
    address = urlsplit(identity.store_url)
    host, port = address.hostname or "", address.port or 0
    if identity.rank0_serves and identity.rank == 0:
        timeout -= _await_name(identity, host, timeout)
        try:
            if host in _LOOPBACK:
                return serve_on("127.0.0.1", port)
            return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        except (OSError, RuntimeError) as error:
            raise LaunchError(
                f"rank 0 on {socket.gethostname()}: port {port} cannot be opened for the store ({first_line(error)}). "
                "Another process or an earlier run may still hold it: end that one, or choose another MASTER_PORT on "
                "every rank."
            ) from error
    _await_listener(identity, host, port, timeout)
    return _client(identity, host, port, timeout)


def _await_name(identity: Identity, host: str, timeout: float) -> float:
    """Waits until the name of rank 0's own host can be resolved, as that of a new pod is not at once; returns the
    seconds. torch would go on trying for twice the time, and print a C++ stack trace."""
    began = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(host, None)
            return time.monotonic() - began
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS >= began + timeout:
                raise LaunchError(
                    f"rank 0 on {socket.gethostname()}: {host} is no name of this host ({error}; waited {timeout:.0f} "
                    f"s; from {identity.source}). Set MASTER_ADDR on every rank to a name or address of it that all "
                    "of them can reach."
                ) from error
        time.sleep(_RETRY_SECONDS)


def _await_listener(identity: Identity, host: str, port: int, timeout: float) -> None:
    """Waits until something listens. torch's client would wait too, but prints a C++ stack trace at each attempt."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS >= deadline:
                raise LaunchError(_unreachable(identity, host, port, timeout, error)) from error
        time.sleep(_RETRY_SECONDS)


def _client(identity: Identity, host: str, port: int, timeout: float) -> dist.Store:
    """Makes a TCPStore client in a thread: torch's constructor ignores its time-out if the listener never answers."""
    made: list[dist.Store | RuntimeError] = []

    def make() -> None:
        try:
            made.append(
                dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))
            )
        except RuntimeError as error:
            made.append(error)

    thread = threading.Thread(target=make, name="store client", daemon=True)
    thread.start()
    thread.join(timeout)
    if made and isinstance(made[0], dist.Store):
        return made[0]
    cause = first_line(made[0]) if made and isinstance(made[0], RuntimeError) else "no answer"
    raise LaunchError(
        f"rank {identity.rank} on {socket.gethostname()}: {host}:{port} listens but is no store of this run ({cause}, "
        f"waited {timeout:.0f} s). Another program may hold the port: choose another MASTER_PORT on every rank."
    )


def _unreachable(identity: Identity, host: str, port: int, timeout: float, error: OSError) -> str:
    server = "rank 0" if identity.rank0_serves else "the launcher"
    return (
        f"rank {identity.rank} of {identity.size} on {socket.gethostname()} did not reach the store at {host}:{port} "
        f"within {timeout:.0f} s (last: {error}; from {identity.source}). Check that {server} runs there, that the "
        "address is the one other hosts see, and that no firewall closes the port."
    )


def _roll_call(store: dist.Store, identity: Identity, timeout: float) -> None:
    """Waits until every rank has come. The last one sets the key "complete", so that each waits for one key only."""
    rank, size = identity.rank, identity.size
    try:
        if store.add(f"arrived/{rank}", 1) > 1:
            raise LaunchError(
                f"rank {rank} came twice to {identity.store_url}: two processes have this rank, or the store still "
                "holds an earlier run. Give each process its own rank, and a new "
                f"{'file' if identity.store_url.startswith('file:') else 'port'} to each run."
            )
        if store.add("arrived", 1) == size:
            store.set("complete", "1")
        store.wait(["complete"], timedelta(seconds=timeout))
    except RuntimeError as error:
        raise LaunchError(_incomplete(store, identity, timeout, error)) from error


def _incomplete(store: dist.Store, identity: Identity, timeout: float, error: RuntimeError) -> str:
    who = f"rank {identity.rank} of {identity.size} on {socket.gethostname()}"
    waited = f"{who} waited {timeout:.0f} s at {identity.store_url}"
    try:
        missing = rank_list([rank for rank in range(identity.size) if not store.check([f"arrived/{rank}"])])
    except RuntimeError:
        ended = "Rank 0 or the launcher may have ended: see its output."
        return f"{waited} and lost the store: {first_line(error)}. {ended}"
    if not missing:
        cause = f"one of them did not go on: {first_line(error)}"
        return f"{waited}; all have come, and {cause}. See the output of the others."
    return f"{waited}; missing: rank {missing}. See the output of those ranks, or whether they were started at all."
