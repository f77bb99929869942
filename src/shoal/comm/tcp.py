"""TCP connections between the ranks of a group, and one operation on them: send and receive at once.

The calling thread does all of it by `poll`. A library with a thread of its own (gloo) hands every message over twice,
and where a rank has one core its thread spins on a lock that the preempted caller holds until the next tick of the
scheduler: 4 ms for a message of a kilobyte, one core a rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from shoal.comm import hello
from shoal.comm.address import family_of
from shoal.comm.signed import SignedStore, derived, key_of, root_of
from shoal.comm.turns import Turns
from shoal.errors import LaunchError
from shoal.native import library

AT_ONCE = 32
"""The most ranks to which, and from which, one kernel call moves bytes: it takes 64 connections."""

SLICE_MS = 500
"""Milliseconds without a byte after which signals and the clock are checked."""

CHANNELS = ("collective", "message")
"""Kinds of connections: messages, which other threads may send while a collective is under way, have their own."""

MEETING_SECONDS = 600.0
"""How long ranks wait for each other's connections, unless operations give up sooner."""

_HELLO_SECONDS = 5.0
_ACCEPT_SECONDS = 0.002  # between looks whether all have been admitted
_DONE, _MOVED, _IDLE, _FAILED = range(4)


class Link(ctypes.Structure):
    """The work left on one connection; has the fields of `shoal_tcp_link` in native/tcp.c."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("out_left", ctypes.c_int64),
        ("into", ctypes.c_void_p),
        ("into_left", ctypes.c_int64),
        ("socket", ctypes.c_int32),
        ("error", ctypes.c_int32),
    ]


class Mesh:
    """The connections of `rank` with the other `size` - 1 ranks that share `store`; all of them make it at once.

    `address`: this host's, as the others reach it. Only ranks that know the secret are let in (see `hello`). After a
    failure, or `close`, all connections are shut, so that the others fail at once instead of waiting. Raises
    LaunchError where the ranks do not meet.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, address: str, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self._timeout = timeout.total_seconds()
        self._meeting_seconds = min(self._timeout, MEETING_SECONDS)
        self._peers: dict[tuple[int, str], socket.socket] = {}
        self._turns = {(peer, way): Turns() for peer in range(size) for way in ("out", "into")}
        self._ended = ""
        with _listen(address, backlog=2 * size) as server:
            if rank == 0:
                store.set("group", secrets.token_hex(16))
            store.set(f"address/{rank}", f"{address} {server.getsockname()[1]}")
            key = derived(key_of(store), "group", self._read(store, "group", 0))
            for peer in range(rank):
                host, port = self._read(store, f"address/{peer}", peer).split()
                for number, channel in enumerate(CHANNELS):
                    self._peers[peer, channel] = self._call_on(peer, host, int(port), key, number)
            self._welcome(server, key)
        for connection in self._peers.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection)
            connection.setblocking(False)

    def _read(self, store: dist.Store, key: str, peer: int) -> str:
        try:
            store.wait([key], timedelta(seconds=self._meeting_seconds))
        except dist.DistStoreError as error:
            raise LaunchError(f"rank {peer} of the group did not come within {self._meeting_seconds:.0f} s") from error
        return store.get(key).decode()

    def _call_on(self, peer: int, host: str, port: int, key: bytes, channel: int) -> socket.socket:
        try:
            connection = socket.create_connection((host, port), self._meeting_seconds)
            hello.call(connection, key, self.rank, peer, channel, self._meeting_seconds)
        except hello.Stranger as error:
            raise LaunchError(
                f"rank {self.rank} of the group found a stranger at {host}, port {port}, where rank {peer} should be: "
                "it does not know the ranks' secret"
            ) from error
        except OSError as error:
            raise LaunchError(
                f"rank {self.rank} of the group cannot reach rank {peer} at {host}, port {port}: {error}. Ranks must "
                "reach each other on all ports of the network through which they reach the store"
            ) from error
        return connection

    def _welcome(self, server: socket.socket, key: bytes) -> None:
        """Waits for the connections of the ranks after this one.

        Each is heard in a thread of its own, so that a stranger who says nothing keeps nobody waiting.
        """
        deadline = time.monotonic() + self._meeting_seconds
        server.settimeout(_ACCEPT_SECONDS)
        while len(self._peers) < (self.size - 1) * len(CHANNELS):
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                threading.Thread(target=self._admit, args=(connection, key), name="shoal-welcome", daemon=True).start()
            if time.monotonic() > deadline:
                missing = [
                    peer
                    for peer in range(self.size)
                    if peer > self.rank and not {(peer, each) for each in CHANNELS} <= self._peers.keys()
                ]
                raise LaunchError(
                    f"rank {', '.join(map(str, missing))} did not connect within {self._meeting_seconds:.0f} s"
                )

    def _admit(self, connection: socket.socket, key: bytes) -> None:
        """Authenticates the other end of a connection; hangs up on strangers."""
        try:
            peer, channel = hello.answer(connection, key, self.rank, _HELLO_SECONDS)
        except (hello.Stranger, OSError):  # it does not know the secret, or has said too little, or nothing in time
            connection.close()
            return
        if self.rank < peer < self.size and channel < len(CHANNELS):
            self._peers[peer, CHANNELS[channel]] = connection
        else:
            connection.close()

    def swap(self, out: Mapping[int, Tensor], into: Mapping[int, Tensor], channel: str = CHANNELS[0]) -> None:
        """Sends `out[peer]` to each peer and fills `into[peer]` from it, all at the same time. Contiguous CPU tensors.

        Returns when `into` is full and `out` may be written again. Raises RuntimeError that names the peer which is
        gone or late.
        """
        with contextlib.ExitStack() as stack:
            if channel != CHANNELS[0]:  # collectives come one at a time, messages from any thread
                for held in [*((peer, "out") for peer in out), *((peer, "into") for peer in into)]:
                    stack.enter_context(self._turns[held])
            # To the ranks after this one and from those before it, nearest first, so that sends and receives match.
            targets = sorted(out, key=lambda peer: (peer - self.rank) % self.size)
            sources = sorted(into, key=lambda peer: (self.rank - peer) % self.size)
            for start in range(0, max(len(targets), len(sources)), AT_ONCE):
                some = slice(start, start + AT_ONCE)
                self._swap(
                    {peer: out[peer] for peer in targets[some]}, {peer: into[peer] for peer in sources[some]}, channel
                )

    def _swap(self, out: Mapping[int, Tensor], into: Mapping[int, Tensor], channel: str) -> None:
        peers, open_ = list({**out, **into}), self._peers
        if self._ended or not open_:
            raise RuntimeError(self._ended)
        connections = [open_[peer, channel] for peer in peers]
        links = (Link * len(peers))()
        for link, peer, connection in zip(links, peers, connections, strict=True):
            link.socket = connection.fileno()
            if peer in out:
                link.out, link.out_left = out[peer].data_ptr(), out[peer].nbytes
            if peer in into:
                link.into, link.into_left = into[peer].data_ptr(), into[peer].nbytes
        try:
            self._move(links, peers)
        except BaseException as error:  # also an interrupt: bytes under way would be taken for the next operation's
            self.close(self._ended or str(error) or "an operation was interrupted")
            raise

    def _move(self, links: ctypes.Array[Link], peers: list[int]) -> None:
        kernels = library()
        moved_at = time.monotonic()
        while (said := kernels.shoal_tcp_swap(links, len(links), SLICE_MS) if kernels else swap_here(links)) != _DONE:
            if said == _MOVED:
                moved_at = time.monotonic()
            late = time.monotonic() - moved_at > self._timeout
            if said == _FAILED or late or self._ended:
                raise RuntimeError(self._ended or _why(links, peers, self._timeout))

    def close(self, why: str = "the group has been closed") -> None:
        """Shuts all connections; from now on operations raise RuntimeError with `why`."""
        self._ended = self._ended or why
        connections, self._peers = self._peers, {}
        for connection in connections.values():  # an operation in another thread holds its own, and fails
            with contextlib.suppress(OSError):  # the other side may have gone first
                connection.shutdown(socket.SHUT_RDWR)


def keep_alive(connection: socket.socket) -> None:
    """Has the kernel check whether the other host is still there, which it knows within a minute and a half.

    TCP_USER_TIMEOUT would also end connections whose other side lives but does not read.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if (option := getattr(socket, name, None)) is not None:  # Linux has them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def swap_here(links: ctypes.Array[Link]) -> int:
    """Does what `shoal_tcp_swap` does, where there is no compiler."""
    poll, moved = select.poll(), False
    waiting = {link.socket: link for link in links if _events(link)}
    for number, link in waiting.items():
        poll.register(number, _events(link))
    while waiting:
        ready = poll.poll(SLICE_MS)
        if not ready:
            return _MOVED if moved else _IDLE
        for number, _ in ready:
            link = waiting[number]
            try:
                moved |= _push_and_pull(link)
            except OSError as error:
                link.error = error.errno or -1
                return _FAILED
            if events := _events(link):
                poll.modify(number, events)
            else:
                poll.unregister(number)
                del waiting[number]
    return _DONE


def _events(link: Link) -> int:
    """Returns the poll events to wait for; 0 when nothing is left to do."""
    return (select.POLLOUT if link.out_left else 0) | (select.POLLIN if link.into_left else 0)


def _push_and_pull(link: Link) -> bool:
    """Moves what can move now; returns whether anything did. Raises OSError where the connection is gone."""
    with socket.socket(fileno=os.dup(link.socket)) as connection:
        sent = received = 0
        if link.out_left:
            with contextlib.suppress(BlockingIOError):
                sent = connection.send(_bytes_at(link.out, link.out_left))
                link.out, link.out_left = link.out + sent, link.out_left - sent
        if link.into_left:
            with contextlib.suppress(BlockingIOError):
                received = connection.recv_into(_bytes_at(link.into, link.into_left))
                if received == 0:
                    raise ConnectionResetError
                link.into, link.into_left = link.into + received, link.into_left - received
        return bool(sent or received)


def _bytes_at(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")


def _why(links: ctypes.Array[Link], peers: list[int], timeout: float) -> str:
    for link, peer in zip(links, peers, strict=True):
        if link.error:
            cause = "" if link.error < 0 else f": {os.strerror(link.error)}"
            return f"rank {peer} of the group has closed its connection{cause}"
    late = [str(peer) for link, peer in zip(links, peers, strict=True) if link.out_left or link.into_left]
    return f"nothing came from or went to rank {', '.join(late)} of the group for {timeout:.0f} s"


def _listen(address: str, backlog: int | None = None) -> socket.socket:
    """Opens a server on a free port of `address`, IPv4 or IPv6."""
    return socket.create_server((address, 0), family=family_of(address), backlog=backlog)


def address_towards(store: dist.Store) -> str:
    """Returns this host's address on the route to a TCP store's host; else that of its name, or loopback."""
    store = root_of(store)
    if isinstance(store, SignedStore):
        store = root_of(store.bare)
    if isinstance(store, dist.TCPStore):
        family, kind, protocol, _, server = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(server)  # sends nothing: asks for the route
            address: str = probe.getsockname()[0]
        if not ipaddress.ip_address(address).is_loopback:
            return address
    with contextlib.suppress(OSError):
        named = str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
        with _listen(named):
            return named
    return "127.0.0.1"
