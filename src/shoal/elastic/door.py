"""Where a supervisor listens: to members if it coordinates, else to those that look for a coordinator."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from shoal.comm.address import family_of
from shoal.comm.hello import Stranger
from shoal.elastic.connection import SECONDS, Connection, answer
from shoal.elastic.messages import Join
from shoal.elastic.records import Malformed
from shoal.errors import LaunchError

PENDING = 32
"""Connections that are heard at the same time before they have proved themselves; further ones are hung up on."""

Welcome = Callable[[Connection, Join], Awaitable[None]]


class Door:
    """Listens on one address only, port 0 for a free one.

    welcome: gets each connection whose other end knows the secret and asks to join. It runs until the connection ends.
    say: gets a line for everybody else.

    Raises LaunchError where the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, key: bytes, welcome: Welcome, say: Callable[[str], None]) -> None:
        try:
            self._server = socket.create_server((host, port), family=family_of(host), backlog=1024)
        except OSError as error:
            raise LaunchError(f"the address {host}:{port} cannot be listened on: {error}. Choose another") from error
        self._server.setblocking(False)
        self.host, self.port = host, int(self._server.getsockname()[1])
        self._key, self._welcome, self._say = key, welcome, say
        self._threads = ThreadPoolExecutor(PENDING, thread_name_prefix="shoal-door")
        self._unproven = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Listens no more, so that connections are refused, and ends those that there are."""
        if (end := self._server.fileno()) >= 0:  # else it is closed
            asyncio.get_running_loop().remove_reader(end)  # it may have seen somebody come, and accepts nobody now
        self._server.close()
        tasks = [self._accepting, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                end, (host, *_) = await loop.sock_accept(self._server)
            except OSError as error:  # out of descriptors, or the other side was gone already
                self._say(f"a connection was not accepted: {error}")
                await asyncio.sleep(0.1)
                continue
            if self._unproven >= PENDING:
                self._say(f"{host} was hung up on: {PENDING} connections have not proved themselves yet")
                end.close()
                continue
            task = asyncio.create_task(self._hear(end, host))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _hear(self, end: socket.socket, host: str) -> None:
        self._unproven += 1
        try:
            connection = await answer(end, self._key, self._threads)
        except (Stranger, OSError) as error:
            why = "does not know the job's secret" if isinstance(error, Stranger) else f"hung up: {error}"
            self._say(f"{host} was refused: it {why}")
            return
        finally:
            self._unproven -= 1
        try:
            async with asyncio.timeout(SECONDS):
                join = await connection.receive()
            if not isinstance(join, Join):
                raise Malformed(f"{type(join).__name__} before Join")
            await self._welcome(connection, join)
        except Malformed as error:
            self._say(f"{host} was hung up on: it sent {error}")
        except (OSError, TimeoutError):
            return  # it has gone, which whoever welcomed it knows
        finally:
            connection.abort()
