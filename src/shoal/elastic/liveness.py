"""How long silence lasts until somebody counts as gone, and what proves that a process has ended."""

from __future__ import annotations

import asyncio

BEAT = 0.25
"""Seconds between the beats of a member."""
LEASE = 4 * BEAT
"""Seconds after the last answered beat at which a supervisor has its ranks leave by itself."""
LEAVING, ALONE = 4 * BEAT, 0.6 * BEAT
"""Seconds that they have for that before they are killed: where ranks of other nodes are in the generation, without
which they can commit nothing; and where this node trains alone, since others may go on without it after SILENCE."""
SILENCE = LEASE + BEAT
"""Seconds without a word after which a member is gone: its ranks commit nothing more."""
RELAY_BEAT, RELAY_LEASE = BEAT / 4, 2.5 * BEAT
"""Seconds between two beats of a member that has others below it, since what it knows grows old on the way down;
seconds after the last answered beat at which a member below a relay looks for another way to the coordinator."""


async def refuses(host: str, port: int) -> bool:
    """Whether a port refuses connections, which proves that the process that listened there has ended."""
    try:
        async with asyncio.timeout(LEASE):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
