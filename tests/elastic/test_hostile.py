"""What strangers, who has listened, and members that lie send to a supervisor's port: it is refused and said, and the
job goes on."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shoal.comm.sealed import sealed
from shoal.elastic.connection import MOST_BYTES, Connection, call
from shoal.elastic.door import PENDING, Door
from shoal.elastic.events import Limits
from shoal.elastic.messages import Admitted, Join
from shoal.elastic.nodes import SECRET
from tests.elastic.clock import in_a_loop
from tests.elastic.cluster import KEY, Member, close, generation, until
from tests.elastic.test_nodes import cluster as cluster
from tests.elastic.test_nodes import records, steps_done, undisturbed, worlds, write_job
from tests.elastic.test_nodes import until as wait_until


class Listener:
    """Passes on what goes between a member and `target`, and keeps what the member sent."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target, self.heard = target, b""

    async def __aenter__(self) -> Listener:
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.address = self._server.sockets[0].getsockname()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)

        async def forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter, keep: bool) -> None:
            with suppress(OSError):
                while data := await source.read(4096):
                    self.heard += data if keep else b""
                    sink.write(data)
            sink.close()

        await asyncio.gather(forward(reader, far_writer, True), forward(far_reader, writer, False))


async def send(address: tuple[str, int], data: bytes, seconds: float = 5.0) -> None:
    """Sends bytes and waits until the other side hangs up."""
    reader, writer = await asyncio.open_connection(*address)
    with suppress(OSError):
        writer.write(data)
        async with asyncio.timeout(seconds):
            while await reader.read(4096):
                pass
    writer.close()


def spoiled(data: bytes, noise: random.Random) -> bytes:
    """A conversation with something wrong in it."""
    at, other = noise.randrange(len(data)), noise.randrange(len(data))
    return noise.choice(
        [
            data,  # all of it again
            data[:at],
            data[at:],
            data[:at] + data[at : at + 64] + data[at:],
            data[:at] + bytes([data[at] ^ (1 << noise.randrange(8))]) + data[at + 1 :],
            data[:at] + noise.randbytes(16) + data[at:],
            data[min(at, other) : max(at, other) + 1],
            noise.randbytes(noise.randrange(1, 4096)),
            noise.randbytes(MOST_BYTES + 100),
        ]
    )


@pytest.mark.fast
@in_a_loop
async def test_what_a_member_has_said_in_whatever_form_is_of_no_use_to_who_has_recorded_it() -> None:
    a = Member("a").lead(Limits(settle=0.05))
    await until(lambda: generation(a))
    b = Member("b")
    async with Listener(a.at.address) as listener:
        b.at.follow([listener.address])
        b.task = asyncio.create_task(b.supervisor.run())
        await until(lambda: generation(a, b))
        number, members = generation(a, b), dict(a.at._coordinator.machine.roster.members)
        noise = random.Random(5)
        conversation = listener.heard
        assert b'"Join"' in conversation
        for _ in range(2):
            storm = [send(a.at.address, spoiled(conversation, noise)) for _ in range(PENDING // 2)]
            storm += [send(b.at.address, spoiled(conversation, noise)) for _ in range(PENDING // 2)]
            await asyncio.gather(*storm)
        assert generation(a, b) == number and a.at._coordinator.machine.roster.members == members
        for member in (a, b):
            await until(lambda member=member: sum("refused" in line for line in member.said) >= 2 * PENDING // 2)
            assert not any("gone" in line for line in member.said)
        await close(a, b)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KINDS = ["Join", "Beat", "Report", "Paces", "Drain", "Ask", "Held", "Admitted", "Start", "Over", "Entry", "Nothing"]
FIELDS = [
    "parts",
    "now",
    "best",
    "name",
    "incarnation",
    "ranks",
    "host",
    "port",
    "running",
    "newest",
    "number",
    "generation",
    "code",
    "lines",
]
BODIES = st.binary(max_size=60) | st.builds(
    lambda kind, fields: json.dumps({"kind": kind, **fields}).encode(),
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8),
)


def bodies(count: int, seed: int) -> list[bytes]:
    """JSON that might be messages, and bytes that are none; the same in each run."""
    found: list[bytes] = []

    @hypothesis.seed(seed)
    @settings(max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(BODIES)
    def draw(body: bytes) -> None:
        found.append(body)

    draw()
    return found


def signed(connection: Connection, body: bytes, number: int, sender: str) -> bytes:
    return sealed(body, connection._out.key, sender, number)


@pytest.mark.fast
@in_a_loop
async def test_signed_messages_of_whatever_form_end_their_connection_and_nothing_else() -> None:
    a = Member("a").lead(Limits(maximum=2, settle=0.05))
    b = Member("b").join(a)
    await until(lambda: generation(a, b))
    number = generation(a, b)

    async def offend(body: bytes, first: list[Any]) -> None:
        connection = await call(*a.at.address, KEY)
        for each in first:
            connection.send(each)
        connection._writer.write(signed(connection, body, len(first), "member"))
        connection._writer.write_eof()  # a message that is a right one by chance is its last
        with pytest.raises(OSError):
            while True:
                await connection.receive()

    for at, body in enumerate(bodies(60, 7)):
        await offend(body, [Join("x", f"id{at}", 1, "127.0.0.1", 9, 0, False, 0)] if at % 2 else [])
    await until(lambda: sum("hung up on" in line for line in a.said) >= 30)
    assert generation(a, b) == number and not a.task.done()
    await close(a, b)


@pytest.mark.fast
@in_a_loop
async def test_a_coordinator_that_talks_nonsense_is_hung_up_on_and_its_member_ends_no_differently() -> None:
    said: list[str] = []
    wrong = bodies(12, 3)

    async def welcome(connection: Connection, join: Join) -> None:
        connection.send(Admitted("b", 0, ["train.py"], "/", "/", "", "", 1, 8))
        connection._writer.write(signed(connection, wrong.pop() if wrong else b"{}", 1, "coordinator"))
        with pytest.raises(OSError):
            while True:
                await connection.receive()

    door = Door("127.0.0.1", 0, KEY, welcome, said.append)
    b = Member("b")
    b.at.follow([(door.host, door.port)])
    b.task = asyncio.create_task(b.supervisor.run())
    await until(lambda: not wrong or b.task.done(), 20)
    assert not b.task.done() and not b.starts
    assert sum("the coordinator was hung up on: it sent" in line for line in b.said) >= 11
    await close(b)
    await door.close()


@pytest.mark.fast
@in_a_loop
async def test_who_comes_at_the_moment_in_which_a_node_ends_is_refused_and_nothing_else() -> None:
    """The loop had seen the connection, and printed two tracebacks of a socket that was closed."""
    loop, failed = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, about: failed.append(about))
    door = Door("127.0.0.1", 0, KEY, lambda *_: pytest.fail("welcome"), print)
    await asyncio.sleep(0)  # it listens
    with socket.create_connection((door.host, door.port)):
        await asyncio.sleep(0)  # the loop has seen it
        await door.close()
        await asyncio.sleep(0)
    assert failed == []


def addresses(process: psutil.Process) -> set[str]:
    """Where a process, and all that it has started, listens."""
    found = set()
    for each in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            connections = each.net_connections("inet") if hasattr(each, "net_connections") else each.connections("inet")
            found |= {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.matrix
def test_a_training_is_not_disturbed_and_all_ports_are_bound_to_loopback(cluster, tmp_path: Path) -> None:
    steps = 1500
    write_job(tmp_path, steps, 100)
    first = cluster("job.toml", "--nodes", "1:2")
    port = int(first.wait_for(r"--join 127.0.0.1:(\d+)")[1])
    second = cluster("--join", f"127.0.0.1:{port}", "--nproc", "1", secret=tmp_path / "runs/job" / SECRET)
    wait_until(lambda: worlds(tmp_path)[-1:] == [2])
    wait_until(lambda: steps_done(tmp_path) > records(tmp_path).memberships[-1].step + 10)
    for node in (first, second):
        assert addresses(psutil.Process(node.process.pid)) == {"127.0.0.1"}
    ending, sent, noise = threading.Event(), [0], random.Random(11)

    def storm() -> None:
        held: list[socket.socket] = []  # half-open ones, which say nothing
        while not ending.is_set():
            with suppress(OSError):
                end = socket.create_connection(("127.0.0.1", port), 1)
                end.sendall(noise.randbytes(noise.choice([0, 1, 44, 100, 5000, MOST_BYTES + 1])))
                held.append(end)
                sent[0] += 1
            for old in held[:-20]:
                old.close()
            del held[:-20]
            ending.wait(0.01)

    thread = threading.Thread(target=storm, daemon=True)
    thread.start()
    began = len(records(tmp_path).memberships)
    codes = [first.process.wait(200), second.process.wait(200)]
    ending.set()
    thread.join()
    assert codes == [0, 0] and sent[0] > 100, first.said
    found = records(tmp_path)
    assert len(found.memberships) == began and "was refused" in first.said
    assert [each.loss for each in found.steps] == pytest.approx(undisturbed(tmp_path, steps), rel=1e-5)
