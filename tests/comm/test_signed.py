"""Somebody who reaches the ranks' store or sockets, but does not know their secret, is neither heard nor let in."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.checkpoint.meeting import Meeting
from shoal.comm import hello
from shoal.comm.hello import Stranger
from shoal.comm.secret import find_secret, own_files
from shoal.comm.signed import SignedStore, derived, meet, root_of
from shoal.comm.sockets import Sockets
from shoal.comm.world import World
from shoal.errors import LaunchError, UserError
from tests.pool import run_ranks

SOON = timedelta(seconds=10)
SECRET = b"a secret of the ranks"


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (LaunchError, UserError) as error:
        return str(error)
    return ""


@pytest.mark.fast
def test_a_value_is_read_only_under_the_key_and_by_the_secret_with_which_it_was_written():
    bare = dist.HashStore()
    store = SignedStore(bare, derived(SECRET, "a run"))
    inner = dist.PrefixStore("a", dist.PrefixStore("b", store))
    inner.set("key", b"\xff value")
    assert inner.get("key") == b"\xff value" and inner.check(["key"]) and inner.add("count", 2) == 2
    assert b"value" in bare.get("b/a/key") and root_of(inner) is store

    store.set("other", "another value")
    moved = bare.get("other")
    SignedStore(bare, derived(SECRET, "another run")).set("b/a/key", "a value")
    of_another_run = bare.get("b/a/key")
    for forged in (b"", b"x", b"x" * 100, pickle.dumps(Trap("/nowhere")), moved, of_another_run):
        bare.set("b/a/key", forged)
        with pytest.raises(LaunchError, match=r"'b/a/key'.*was not written by a rank of this run.*SHOAL_SECRET"):
            inner.get("key")
    assert inner.delete_key("key") and not inner.check(["key"])


def together(*bodies: Callable[[], Any]) -> list[Any]:
    """What each gives, or its error."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        futures = [pool.submit(body) for body in bodies]
        return [future.exception(30) or future.result() for future in futures]


def met(bare: dist.Store, *secrets: bytes) -> list[Any]:
    size = len(secrets)
    return together(
        *(lambda rank=rank, secret=secret: meet(bare, rank, size, secret, SOON) for rank, secret in enumerate(secrets))
    )


@pytest.mark.fast
def test_ranks_that_meet_have_a_key_of_their_own_each_time():
    first, second = met(dist.HashStore(), SECRET, SECRET, SECRET), met(dist.HashStore(), SECRET, SECRET, SECRET)
    assert len({store.key for store in first}) == 1
    assert first[0].key != second[0].key


@pytest.mark.fast
def test_a_rank_with_another_secret_is_an_error_on_all_ranks():
    for each in met(dist.HashStore(), SECRET, b"another secret of ranks"):
        assert (
            isinstance(each, LaunchError)
            and "not signed with its secret" in str(each)
            and "export SHOAL_SECRET" in str(each)
        )


class Recorded(dist.Store):
    """A store in which every value of an earlier run is back as soon as anybody writes to its key."""

    def __init__(self, bare: dist.Store, earlier: dict[str, bytes]) -> None:
        super().__init__()
        self.bare, self.earlier = bare, earlier

    def set(self, key: str, value: bytes) -> None:
        self.bare.set(key, self.earlier.get(key, value))

    def get(self, key: str) -> bytes:
        return self.bare.get(key)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.bare.wait(keys, timeout)


@pytest.mark.fast
@pytest.mark.parametrize("again", [["session"], ["fresh/0", "session"], ["fresh/1"], ["fresh/0", "fresh/1", "session"]])
def test_what_an_earlier_run_has_said_is_no_use(again):
    bare = dist.HashStore()
    met(bare, SECRET, SECRET)
    found = met(Recorded(dist.HashStore(), {key: bare.get(key) for key in again}), SECRET, SECRET)
    errors = [each for each in found if isinstance(each, LaunchError)]
    assert errors and all("repeats what an earlier run has said" in str(each) for each in errors)


def read_what_a_stranger_wrote(world: World, trap: str) -> tuple[str, str]:
    """Rank 1 is somebody else's process: it has the bare store, and writes to keys that rank 0 is going to read."""
    store = root_of(world.store)
    assert isinstance(store, SignedStore) and world.store is not None
    if world.rank == 1:
        payload = pickle.dumps(Trap(trap))
        for key in ("generation0/topic/answer", "generation0/host/1"):
            store.bare.set(key, payload)
        store.bare.set("ready", "1")
        return "", ""
    store.bare.wait(["ready"])
    meeting = Meeting(world.store, "topic", 0, 2, lambda: "")
    return error_of(lambda: meeting.get("answer", 5)), error_of(lambda: world.group("pair", [0, 1]))


def test_a_pickle_in_the_store_is_not_run(tmp_path):
    said, grouped = run_ranks(read_what_a_stranger_wrote, 2, str(tmp_path / "ran"))[0]
    assert "was not written by a rank of this run" in said and "topic/answer" in said
    assert "was not written by a rank of this run" in grouped and "host/1" in grouped
    assert not (tmp_path / "ran").exists()


def gloo(world: World) -> list[float]:
    """What torch's C++ does with a store, as NCCL's does: it reads and writes through the signed one."""
    pg = dist.ProcessGroupGloo(dist.PrefixStore("pg", world.store), world.rank, world.size, SOON)
    flat = torch.ones(3)
    pg.allreduce([flat]).wait()
    return flat.tolist()


def test_torchs_own_groups_find_each_other_through_signed_values():
    assert run_ranks(gloo, 2) == [[2.0, 2.0, 2.0]] * 2


KEY = b"the key of a group"


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


@pytest.mark.fast
def test_two_ranks_make_sure_of_each_other():
    caller, answerer = pair()
    answers = together(lambda: hello.call(caller, KEY, 3, 1, 0, 5.0), lambda: hello.answer(answerer, KEY, 1, 5.0))
    assert answers == [None, (3, 0)]


@pytest.mark.fast
def test_who_does_not_know_the_key_is_a_stranger_on_either_side():
    for callers, answerers, called in ((KEY, b"another", 1), (b"another", KEY, 1), (KEY, KEY, 2)):
        caller, answerer = pair()

        def answer(end: socket.socket = answerer, key: bytes = answerers) -> Any:
            try:
                return hello.answer(end, key, 1, 5.0)
            finally:
                end.close()

        def call(end: socket.socket = caller, key: bytes = callers, called: int = called) -> Any:
            try:
                return hello.call(end, key, 3, called, 0, 5.0)
            finally:
                end.close()

        said = together(call, answer)
        assert isinstance(said[0], Stranger) and isinstance(said[1], (Stranger, OSError))


class Heard:
    """A socket that keeps what was sent through it."""

    def __init__(self, inner: socket.socket) -> None:
        self.inner, self.sent = inner, list[bytes]()

    def sendall(self, data: bytes) -> None:
        self.sent.append(data)
        self.inner.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.fast
def test_a_hello_that_was_overheard_opens_no_second_door():
    caller, answerer = pair()
    heard = Heard(caller)
    together(lambda: hello.call(heard, KEY, 3, 1, 0, 5.0), lambda: hello.answer(answerer, KEY, 1, 5.0))
    again, answerer = pair()
    for data in heard.sent:
        again.sendall(data)
    with pytest.raises(Stranger):
        hello.answer(answerer, KEY, 1, 5.0)


@pytest.mark.fast
def test_a_stranger_who_says_a_byte_now_and_then_is_not_waited_for():
    slow, answerer = pair()
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.1):
            slow.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(OSError):
        hello.answer(answerer, KEY, 1, 0.5)
    ended.set()
    thread.join()


def find_a_stranger(world: World) -> str:
    """Rank 1 calls where, by an address in the signed store, rank 0 should be, and somebody else listens."""
    store = dist.PrefixStore("impostor", world.store)
    if world.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            store.set("group", "00")
            store.set("address/0", f"127.0.0.1 {server.getsockname()[1]}")
            connection, _ = server.accept()
            connection.sendall(b"y" * 48)
            connection.recv(100)
        return ""
    return error_of(lambda: Sockets(store, 1, 2, True, SOON))


def test_a_rank_does_not_talk_to_a_stranger_in_another_ranks_place():
    said = run_ranks(find_a_stranger, 2)[1]
    assert "found a stranger at 127.0.0.1" in said and "does not know the ranks' secret" in said


@pytest.mark.fast
def test_the_secret_is_that_of_the_environment_or_of_a_file_that_is_the_users_alone(tmp_path):
    assert find_secret({"SHOAL_SECRET": "x" * 16, "SHOAL_SECRET_FILE": "/none"}) == b"x" * 16
    with pytest.raises(UserError, match=r"SHOAL_SECRET holds a secret of 5 characters.*openssl rand"):
        find_secret({"SHOAL_SECRET": "short"})
    file = tmp_path / "secret"
    file.write_text("y" * 32 + "\n")
    for mode in (0o644, 0o620, 0o604):
        file.chmod(mode)
        with pytest.raises(UserError, match=rf"not this user's alone.*its mode is {mode:o}.*chmod 600"):
            find_secret({"SHOAL_SECRET_FILE": str(file)})
    file.chmod(0o600)
    assert find_secret({"SHOAL_SECRET_FILE": str(file)}) == b"y" * 32
    (tmp_path / "link").symlink_to(file)
    for path in (tmp_path / "link", tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            find_secret({"SHOAL_SECRET_FILE": str(path)})


@pytest.mark.fast
def test_ranks_that_come_at_once_make_one_secret(tmp_path):
    environ = {"HOME": str(tmp_path)}
    found = together(*([lambda: find_secret(environ)] * 8))
    assert len(set(found)) == 1 and len(found[0]) == 64
    file = own_files(environ)[0]
    assert file == tmp_path / ".config/shoal/secret" and file.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in file.parent.iterdir()] == ["secret"]


@pytest.mark.fast
def test_a_user_without_a_home_has_a_secret_in_the_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environ = {"HOME": "/proc/none"}
    assert find_secret(environ) == find_secret(environ)
    file = Path(tmp_path) / f"shoal-user-{os.geteuid()}" / "secret"
    assert file.is_file() and file.parent.stat().st_mode & 0o777 == 0o700
