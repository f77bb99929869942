"""Sessions: who is let in, what ends one and leaves the others, and messages that nobody should have sent."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from shoal.comm import hello
from shoal.comm.device_group import DeviceGroup
from shoal.comm.nccl import ERRORS, Nccl
from shoal.comm.sealed import HEAD, Seal, sealed
from shoal.comm.signed import derived
from shoal.device import CPU
from shoal.elastic.records import Malformed, encode, kinds
from shoal.errors import LaunchError, UserError
from shoal.server.sessions import Address, Listener, Session, SessionLost, call, key_of_token
from shoal.server.sessions.beside import Beside, fit, told
from shoal.server.sessions.carriers import MOST_BODY, hung_up
from shoal.server.sessions.listener import PENDING
from shoal.server.sessions.opening import Opens
from shoal.server.sessions.session import Form
from tests.server.common import TOKEN, together

pytestmark = pytest.mark.fast
KEY = key_of_token(TOKEN)


@dataclass(frozen=True)
class Echo:
    text: str


@dataclass(frozen=True)
class Silence:
    pass


KINDS = kinds((Echo, Silence))
BIG = torch.zeros(1 << 24, dtype=torch.uint8)


@contextmanager
def echoing(**more: Any) -> Iterator[tuple[Address, list[str]]]:
    """A listener whose sessions send back what they get, but Silence."""

    def serve(session: Session) -> None:
        while True:
            record = session.receive()
            tensors = session.tensors()
            if isinstance(record, Echo):
                session.send(record, *tensors)

    said: list[str] = []
    listener = Listener(Address("127.0.0.1", 0), KEY, KINDS, serve, say=said.append, **more)
    try:
        yield listener.address, said
    finally:
        listener.close()


def until(condition: object, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.005)


def received_by(session: Session) -> tuple[object, list[torch.Tensor]]:
    return session.receive(10.0), session.tensors()


@pytest.mark.parametrize("shared", [True, False])
def test_records_and_tensors_of_all_sizes_come_as_they_were_sent(shared):
    with echoing() as (address, _):
        session = call(address, KEY, KINDS, 10.0, shared)
        assert session.carrier == ("shared memory" if shared else "tcp")
        tensors = [
            torch.arange(3),
            torch.randn(0),
            torch.randn(3_000_001).bfloat16(),
            torch.randn(20_000, dtype=torch.float64),
        ]
        for text in ("", "é" * 1000, "x" * 8000):
            echo = Echo(text)
            _, received = together(lambda echo=echo: session.send(echo, *tensors), lambda: received_by(session))
            assert received[0] == echo
            assert all(torch.equal(a, b) for a, b in zip(tensors, received[1], strict=True))
        session.close()


@pytest.mark.parametrize("shared", [True, False])
def test_a_client_that_goes_ends_its_session_alone_and_later_ones_join(shared):
    with echoing() as (address, said):
        first, second = (call(address, KEY, KINDS, 10.0, shared) for _ in range(2))
        first.send(Echo("half"))
        first.close()
        until(lambda: any("has ended" in line for line in said))
        for session in (second, call(address, KEY, KINDS, 10.0, shared)):
            session.send(Echo("on"), torch.ones(4))
            assert session.receive(10.0) == Echo("on") and session.tensors()[0].sum() == 4
            session.close()


def does_not_send(session: Session) -> None:
    """Announces a tensor that never comes."""
    session._carrier.send(encode(Echo("half")) + b'\n[["uint8",1000]]', ())


def does_not_read(session: Session) -> None:
    """Asks for more than fits between the two, and reads none of it."""
    session._carrier.end_of_test = threading.Thread(target=session.send, args=(Echo(""), BIG), daemon=True)
    session._carrier.end_of_test.start()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("stops", [does_not_send, does_not_read])
def test_a_client_that_lives_but_has_stopped_is_given_up_and_named(shared, stops):
    """As SIGSTOP leaves it: its process is there, and does nothing more."""
    with echoing(seconds=0.3) as (address, said):
        stopped, other = (call(address, KEY, KINDS, 30.0, shared) for _ in range(2))
        stops(stopped)
        until(lambda: said)
        assert said[0].startswith("shoal: 127.0.0.1:") and said[0].endswith("has been silent for too long")
        other.send(Echo("on"), torch.ones(4))
        assert other.receive(10.0) == Echo("on") and other.tensors()[0].sum() == 4
        with pytest.raises(SessionLost, match="has ended"):
            stopped.receive(10.0)
            stopped.tensors()
        for session in (stopped, other):
            session.close()


@pytest.mark.parametrize("shared", [True, False])
def test_a_session_that_is_ended_from_another_thread_ends_at_both_ends_at_once(shared):
    with echoing() as (address, said):
        session = call(address, KEY, KINDS, 30.0, shared)
        session.send(Silence())
        began, ender = time.monotonic(), threading.Timer(0.05, session.end)
        ender.start()
        with pytest.raises(SessionLost, match="has ended"):
            session.receive(30.0)
        until(lambda: any("has ended" in line for line in said))
        assert time.monotonic() - began < 5.0
        session.close()


def of_garbage(draw: random.Random, session: Session) -> None:
    """What one with the token might write to shared memory."""
    body, carrier = encode(Echo("x")) + b"\n", session._carrier
    view = carrier._usable()
    counters = view.memory[:1024].view(torch.int64)
    kinds_of_garbage = [
        lambda: carrier.send(draw.randbytes(draw.randrange(100)), ()),
        lambda: carrier.send(body + b'[["float64", 99999999999999]]', ()),
        lambda: carrier.send(body + b"[" * 5000, ()),
        lambda: carrier.send(b'{"kind": "Unknown"}\n', ()),
        lambda: carrier.send(b"", [torch.full((8,), 1 << 40)]),  # bytes that stand where a length should
        lambda: carrier._c.shoal_pipe_send(view.address, b"x" * (1 << 17), 1 << 17, None, 0),  # longer than a body
        lambda: counters.copy_(torch.tensor([draw.randrange(-(1 << 62), 1 << 62) for _ in range(len(counters))])),
    ]
    draw.choice(kinds_of_garbage)()


@pytest.mark.parametrize("shared", [True, False])
def test_a_silent_server_is_named(shared):
    with echoing() as (address, _):
        session = call(address, KEY, KINDS, 0.5, shared)
        session.send(Silence())
        with pytest.raises(SessionLost, match=f"the server at {address}"):
            session.receive(0.5)


def test_another_token_is_refused_at_both_ends():
    with echoing() as (address, said):
        with pytest.raises(LaunchError, match=f"the server at {address} does not know this client's token"):
            call(address, key_of_token("another token of the tests"), KINDS, 5.0)
        until(lambda: said)
        with pytest.raises(UserError, match="a token of 5 characters"):
            key_of_token("short")


def test_what_is_read_must_be_what_was_declared():
    with echoing() as (address, _):
        session = call(address, KEY, KINDS, 10.0)
        session.send(Echo("x"), torch.ones(3))
        session.receive(10.0)
        with pytest.raises(Malformed):
            session.fill(torch.ones(4))
        session.skip()
        session.close()


def opened(address: Address) -> tuple[socket.socket, bytes]:
    """A connection that has proved itself, and its key."""
    end = socket.create_connection(address, 5.0)
    hello.call(end, KEY, 0, 0, 0, 5.0)
    mine = b"\1" * 16
    end.sendall(mine)
    return end, derived(KEY, "session", mine, hello.receive(end, 16, time.monotonic() + 5.0))


def bad_frames(draw: random.Random, key: bytes) -> bytes:
    """What one that knows the token might send: none of it is a message at this place."""
    seal = Seal(key, "client")
    opens = seal.put(encode(Opens("")))
    body = encode(Echo("x")) + b"\n"
    return draw.choice(
        [
            lambda: draw.randbytes(draw.randrange(1, 200)),
            lambda: HEAD.pack(MOST_BODY + draw.randrange(1, 1 << 31), 0, b""),
            lambda: sealed(encode(Opens("")), KEY, "client", 0),  # of another connection
            lambda: sealed(encode(Opens("")), key, "server", 0),  # of another direction
            lambda: opens[: draw.randrange(1, len(opens))],  # half of one
            lambda: bytes(byte ^ (index == draw.randrange(len(opens))) for index, byte in enumerate(opens)),
            lambda: opens + opens,  # comes again
            lambda: opens + sealed(body, key, "client", 7),  # out of order
            lambda: seal.put(body),  # before Opens
            lambda: opens + seal.put(draw.randbytes(draw.randrange(100))),  # no JSON
            lambda: opens + seal.put(b'{"kind": "Echo", "text": 3}\n'),
            lambda: opens + seal.put(b'{"kind": "Echo", "text": "", "more": 1}\n'),
            lambda: opens + seal.put(b'{"kind": "Unknown"}\n'),
            lambda: opens + seal.put(body + b'[["float32", -1]]'),
            lambda: opens + seal.put(body + b'[["float32", 1e3]]'),
            lambda: opens + seal.put(body + b'[["complex", 1]]'),
            lambda: opens + seal.put(body + b'[["float64", 99999999999999]]'),
            lambda: opens + seal.put(body + b"[" * 5000),
            lambda: opens + seal.put(body + b'[["float32", 1000]]') + b"x" * 17,  # and hangs up
        ]
    )()


def one_try(draw: random.Random, address: Address) -> None:
    if draw.random() < 0.2:
        session = call(address, KEY, KINDS, 10.0)
        of_garbage(draw, session)
        with pytest.raises((SessionLost, Malformed)):  # it is hung up on
            while session.receive(10.0):
                session.skip()
        session.close()
        return
    if draw.random() < 0.3:
        with socket.create_connection(address, 5.0) as end:
            end.sendall(draw.randbytes(draw.randrange(200)))
        return
    end, key = opened(address)
    with end, suppress(ConnectionError, TimeoutError):
        end.sendall(bad_frames(draw, key))
        end.settimeout(0.02)
        while end.recv(4096):
            pass


def fuzz(tries: int) -> None:
    draw = random.Random(0)
    with echoing() as (address, said):
        good = [call(address, KEY, KINDS, 30.0, shared) for shared in (True, False)]
        half_open = [socket.create_connection(address) for _ in range(3)]
        for number in range(tries):
            one_try(draw, address)
            session = good[number % 2]
            session.send(Echo(str(number)), torch.tensor([number]))
            assert session.receive(30.0) == Echo(str(number)) and session.tensors()[0].item() == number
        until(lambda: len(said) >= tries - 1)
        for end in half_open:
            end.close()
        for session in good:
            session.close()


def test_what_nobody_should_send_is_refused_and_a_running_server_not_disturbed():
    fuzz(60)


@pytest.mark.matrix
def test_what_nobody_should_send_in_two_thousand_tries():
    fuzz(2000)


def test_replayed_hellos_are_useless():
    """All that a client has said, sent again over another connection, opens nothing."""
    with echoing() as (address, said):
        recorded = []
        end, key = opened(address)
        recorded.append(Seal(key, "client").put(encode(Opens(""))))
        end.close()
        again, _ = opened(address)
        again.sendall(recorded[0])
        again.settimeout(5.0)
        assert again.recv(100) == b""  # hung up
        until(lambda: any("not signed, or comes again" in line for line in said))


def test_strangers_that_say_nothing_do_not_fill_the_door_for_ever(monkeypatch):
    monkeypatch.setattr("shoal.server.sessions.opening.HELLO_SECONDS", 0.5)
    with echoing() as (address, said):
        crowd = [socket.create_connection(address) for _ in range(PENDING + 1)]
        until(lambda: any("have not proved themselves" in line for line in said))
        until(lambda: sum("was refused" in line for line in said) == PENDING)
        session = call(address, KEY, KINDS, 5.0)
        session.send(Echo("x"))
        assert session.receive(5.0) == Echo("x")
        session.close()
        for end in crowd:
            end.close()


def test_a_message_that_stops_halfway_ends_its_session(monkeypatch):
    monkeypatch.setattr("shoal.server.sessions.carriers.BODY_SECONDS", 0.2)
    with echoing() as (address, said):
        end, key = opened(address)
        end.sendall(Seal(key, "client").put(encode(Opens("")))[:-3])
        until(lambda: any("was refused" in line for line in said))
        end.close()


class Group:
    """Stands in for a group of accelerators. `held`: its calls wait for that on the host."""

    def __init__(self) -> None:
        self.aborted, self.moved, self.held = 0, [], threading.Event()
        self.held.set()

    def recv(self, flat: torch.Tensor, src: int) -> None:
        self.held.wait()
        self.moved.append(flat.numel())

    send = recv

    def abort(self) -> None:
        self.aborted += 1


class End(NamedTuple):
    """An end whose device has done what `done` says, and what else it is asked for."""

    beside: Beside
    group: Group
    done: list[bool]
    gone: list[bool]


def end_of_two(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.1) -> End:
    group, done, gone = Group(), [True], [False]
    stand_ins = {
        "new_stream": lambda device: SimpleNamespace(wait_event=lambda event: None),
        "on_stream": lambda stream: nullcontext(),
        "record_event": lambda device: SimpleNamespace(query=lambda: done[0]),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(f"shoal.server.sessions.beside.{name}", stand_in)
    monkeypatch.setattr(DeviceGroup, "of_two", lambda *about: group)
    return End(Beside(dist.HashStore(), KEY, 0, CPU, seconds, lambda: gone[0]), group, done, gone)


def test_an_accelerator_waits_for_an_end_that_sends_nothing_no_longer_than_it_may(monkeypatch):
    """Devices do not notice that the other end is gone: the host looks at the clock."""
    end = end_of_two(monkeypatch)
    with echoing() as (address, _):
        session = call(address, KEY, KINDS, 5.0)
        session._beside = end.beside
        monkeypatch.setattr(session, "_carrier", SimpleNamespace(fill=end.beside.fill, close=session._carrier.close))
        session.forms = [Form(torch.float32, 3)] * 2
        session.fill(torch.empty(3))
        end.done[0] = False
        with pytest.raises(SessionLost, match=f"the server at {address} has been silent for too long"):
            session.fill(torch.empty(3))
        end.done[0] = True  # as a device tells of what was cut short
        with pytest.raises(ConnectionResetError):
            end.beside.fill(torch.empty(3))
        session.close()
    assert end.group.aborted == 1


def test_an_accelerator_does_not_wait_on_the_host_for_an_end_that_never_comes(monkeypatch):
    """The first calls of NCCL make connections, and return only when the other end has come."""
    end = end_of_two(monkeypatch)
    end.group.held.clear()
    with pytest.raises(TimeoutError):
        end.beside.send(torch.empty(3))
    assert not end.group.aborted  # in whose call a thread still is
    end.group.held.set()
    until(lambda: end.group.aborted == 1)


def test_an_accelerator_notices_that_the_other_end_has_hung_up(monkeypatch):
    end = end_of_two(monkeypatch, seconds=60.0)
    end.beside.fill(torch.empty(3))
    end.done[0], end.gone[0] = False, True
    began = time.monotonic()
    with pytest.raises(ConnectionResetError, match="hung up"):
        end.beside.fill(torch.empty(3))
    assert time.monotonic() - began < 30.0 and end.group.aborted == 1
    here, there = socket.socketpair()
    with here, there:
        assert not hung_up(here)
        there.sendall(b"x")
        assert not hung_up(here) and here.recv(1) == b"x"
        there.close()
        assert hung_up(here)


def test_what_has_been_cut_short_on_an_accelerator_does_not_count_as_come(monkeypatch):
    end = end_of_two(monkeypatch)
    monkeypatch.setattr(end.group, "abort", lambda: end.done.__setitem__(0, True))
    end.beside.fill(torch.empty(3))
    end.done[0] = False
    closing = threading.Timer(0.02, end.beside.end)
    closing.start()
    with pytest.raises(ConnectionResetError, match="has closed it"):
        end.beside.fill(torch.empty(3))
    closing.join()


def test_accelerators_meet_once_and_large_tensors_go_in_pieces(monkeypatch):
    monkeypatch.setattr("shoal.server.sessions.beside.PIECE_BYTES", 8)
    end = end_of_two(monkeypatch)
    end.beside.send(torch.empty(5))
    end.beside.fill(torch.empty(2, dtype=torch.float64))
    end.beside.fill(torch.empty(0))
    assert end.group.moved == [1, 1, 2, 2, 1, 1, 1]


def test_accelerators_that_do_not_meet_say_why(monkeypatch):
    end = end_of_two(monkeypatch)

    def fails(flat: torch.Tensor, other: int) -> None:
        raise RuntimeError("NCCL is out of order")

    monkeypatch.setattr(end.group, "send", fails)
    with pytest.raises(ConnectionAbortedError, match="have not met: NCCL is out of order"):
        end.beside.fill(torch.empty(3))
    assert end.group.aborted == 1


@pytest.mark.parametrize("before", [None, "1"])
def test_the_death_of_a_gpu_s_peer_does_not_end_this_process(monkeypatch, before):
    """Torch's watchdog would; it asks the environment for each group, and all others are left as they were."""
    seen = []
    monkeypatch.delenv(ERRORS, raising=False)
    if before is not None:
        monkeypatch.setenv(ERRORS, before)
    monkeypatch.setattr(DeviceGroup, "open", lambda *about: seen.append(os.environ[ERRORS]))
    Nccl.of_two(dist.HashStore(), 0, CPU, timedelta(seconds=1))
    assert seen == ["0"] and os.environ.get(ERRORS) == before


def test_a_tensor_for_an_accelerator_that_a_session_has_not_is_refused():
    with echoing() as (address, said):
        session = call(address, KEY, KINDS, 5.0)
        session._carrier.send(encode(Echo("x")) + b'\n[["float32",3,true]]', ())
        until(lambda: any("which this session has not" in line for line in said))
        session.close()


def test_accelerators_that_cannot_meet_end_their_session_alone(monkeypatch):
    """Torch may know a kind of device and have no group for it."""

    def cannot(*_: object) -> None:
        raise UserError("torch.distributed has no process group for these devices")

    monkeypatch.setattr("shoal.server.sessions.opening.fit", lambda one, other: True)
    monkeypatch.setattr("shoal.server.sessions.opening.Beside", cannot)
    with echoing(device=CPU) as (address, said):
        with pytest.raises(UserError, match="no process group"):
            call(address, KEY, KINDS, 5.0, device=CPU)
        until(lambda: any("was refused: UserError" in line for line in said))


def test_accelerators_have_a_group_where_they_are_of_one_kind_and_not_the_same():
    assert fit("cuda GPU-1", "cuda GPU-2") and not fit("cuda GPU-1", "cuda GPU-1")
    assert not fit("cuda GPU-1", "xpu GPU-2") and not fit("", "cuda GPU-2") and told(CPU) == told(None) == ""
