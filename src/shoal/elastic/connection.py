"""Connections between a supervisor and the coordinator: messages as sealed frames over TCP (see comm/sealed.py), whose
bodies are the JSON of a record.

Both ends first prove that they know the job's secret (comm/hello.py), then each gives a random number; the key of the
connection follows from the secret and both. A frame is at most MOST_BYTES long, and must come within SECONDS once it
has begun.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from concurrent.futures import Executor
from typing import Any

from shoal.comm import hello
from shoal.comm.address import family_of
from shoal.comm.sealed import HEAD, Seal
from shoal.comm.signed import derived
from shoal.elastic.messages import FROM_MEMBER, TO_MEMBER
from shoal.elastic.records import Malformed, decode, encode

MOST_BYTES, MOST_UNSENT = 1 << 16, 1 << 24
SECONDS = 2.0


class Connection:
    """One end of a connection between two supervisors. `calls`: this end has opened it, as a member."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, calls: bool) -> None:
        self._reader, self._writer = reader, writer
        own, other = ("member", "coordinator") if calls else ("coordinator", "member")
        self._out, self._in = Seal(key, own), Seal(key, other)
        self._kinds = TO_MEMBER if calls else FROM_MEMBER

    @property
    def own_host(self) -> str:
        """The address of this end."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def peer(self) -> str:
        """The address of the other end, for messages."""
        name = self._writer.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if name else "a peer that hung up"

    def send(self, message: Any) -> None:
        """Sends a message without waiting. A peer that reads nothing for long is cut off."""
        if self._writer.is_closing():
            return
        body = encode(message)
        assert len(body) <= MOST_BYTES, f"a message of {len(body):,} bytes"
        self._writer.write(self._out.put(body))
        if self._writer.transport.get_write_buffer_size() > MOST_UNSENT:
            self._writer.transport.abort()

    async def receive(self) -> Any:
        """Returns the next message. Raises Malformed for what is none, OSError where the connection has ended."""
        try:
            first = await self._reader.readexactly(1)
            async with asyncio.timeout(SECONDS):
                size, number, proof = HEAD.unpack(first + await self._reader.readexactly(HEAD.size - 1))
                if size > MOST_BYTES:
                    raise Malformed(f"a frame of {size:,} bytes; the most is {MOST_BYTES:,}")
                body = await self._reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the other side hung up") from error
        except TimeoutError as error:
            raise Malformed(f"a frame that was not complete after {SECONDS:.0f} s") from error
        if not self._in.holds(number, proof, body):
            raise Malformed("a frame that is not signed, or comes again")
        return decode(body, self._kinds)

    async def close(self, seconds: float = SECONDS) -> None:
        """Sends what is unsent, within `seconds`, and hangs up."""
        self._writer.close()
        try:
            async with asyncio.timeout(seconds):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self._writer.transport.abort()

    def abort(self) -> None:
        """Hangs up at once."""
        self._writer.transport.abort()


async def call(host: str, port: int, key: bytes, seconds: float = SECONDS) -> Connection:
    """Connects to a supervisor. Raises hello.Stranger where it does not know the secret, ConnectionRefusedError where
    nothing listens, another OSError where it cannot be reached within `seconds`."""
    loop = asyncio.get_running_loop()
    end = socket.socket(family_of(host), socket.SOCK_STREAM)
    end.setblocking(False)
    try:
        async with asyncio.timeout(seconds):
            await loop.sock_connect(end, (host, port))
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setblocking(True)
        await asyncio.to_thread(hello.call, end, key, 0, 0, 0, seconds)
        return await _open(end, key, calls=True)
    except BaseException:
        end.close()
        raise


async def answer(end: socket.socket, key: bytes, threads: Executor) -> Connection:
    """Takes a connection that somebody has opened. Raises hello.Stranger or OSError where it is not a member's."""
    try:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setblocking(True)
        await asyncio.get_running_loop().run_in_executor(threads, hello.answer, end, key, 0, SECONDS)
        return await _open(end, key, calls=False)
    except BaseException:
        end.close()
        raise


async def _open(end: socket.socket, key: bytes, *, calls: bool) -> Connection:
    end.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=end, limit=2 * MOST_BYTES)
    mine = secrets.token_bytes(16)
    writer.write(mine)
    try:
        async with asyncio.timeout(SECONDS):
            theirs = await reader.readexactly(16)
    except BaseException as error:
        writer.transport.abort()  # else the loop believes that the descriptor is in use, also by who has it next
        if isinstance(error, asyncio.IncompleteReadError | TimeoutError):
            raise ConnectionResetError("the other side hung up") from error
        raise
    numbers = (mine, theirs) if calls else (theirs, mine)
    return Connection(reader, writer, derived(key, "connection", *numbers), calls=calls)
