"""Another way of a member to the coordinator, which it looks for while the one that it has goes on.

The coordinator asks for it where the tree of relays has become uneven (see peers.py), and ends the old way once the
member has come by the new one. Until then nothing has changed, whatever becomes of the search, so ranks run on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from shoal.elastic.connection import Connection
from shoal.elastic.liveness import BEAT
from shoal.elastic.messages import Admitted
from shoal.elastic.tunnel import Passage

Joined = tuple[Connection | Passage, Admitted]
"""The way to the coordinator, and what it says of the job."""


class Detour:
    """A second way.

    find: asks at a host and port to be a member; None where that is not to be.
    free: whether this member may leave its place, below which nobody depends on it.
    """

    def __init__(self, find: Callable[[str, int], Awaitable[Joined | None]], free: Callable[[], bool]) -> None:
        self._find, self._free = find, free
        self._search: asyncio.Task[Joined | None] | None = None

    @property
    def sought(self) -> bool:
        """Whether there is one, or will be. Nobody may come below this member then, who could be on that way."""
        return self._search is not None

    def seek(self, host: str, port: int) -> None:
        """Begins to look for one."""
        if self._search is None and self._free():
            self._search = asyncio.create_task(self._seek(host, port))

    async def _seek(self, host: str, port: int) -> Joined | None:
        found = await self._find(host, port)
        if found is None:
            self._search = None
        return found

    async def take(self) -> Joined | None:
        """Returns it, for the old way has ended: perhaps because of it, so that an answer may still be under way."""
        search, self._search = self._search, None
        if search is None:
            return None
        await asyncio.wait([search], timeout=BEAT)
        if not search.done():
            search.cancel()
            return None
        return search.result()
