"""A node whose ranks only pretend, as a process:

    python -m tests.elastic.pretend lead HOST | join HOST PORT OWN_HOST | etcd URL NAME

Prints a line of JSON for all that happens: where it listens, which generation its ranks run, that they have ended. The
variable FANOUT: how many members one takes below it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from shoal.elastic import relay
from shoal.elastic.events import Limits
from shoal.elastic.messages import Start
from tests.elastic.cluster import JOB, Member, Pretended


def say(**what: Any) -> None:
    print(json.dumps({"time": time.time(), **what}), flush=True)


class Telling(Pretended):
    """Ranks that say when they start and end."""

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        say(runs=start.generation, nodes=start.nodes, first=start.first, size=start.size)

    def end(self, *how: Any, **about: Any) -> None:
        if self.ended is None:
            say(runs=0)
        super().end(*how, **about)


class Node(Member):
    def start(self, start: Start) -> Pretended:
        self.starts.append(Telling(start))
        return self.starts[-1]


async def main(what: str, host: str, *rest: str) -> int:
    relay.FANOUT = int(os.environ.get("FANOUT", relay.FANOUT))
    node = Node(rest[0] if what == "etcd" else f"node-{(rest[1] if rest else host).rpartition('.')[2]}")
    if what == "etcd":
        node.by_etcd(host)
    elif what == "lead":
        node.at.lead(host, JOB, Limits(minimum=1, maximum=8, settle=1.0))
    else:
        node.at.listen(rest[1])
        node.at.follow([(host, int(rest[0]))])
    say(port=node.at.address[1])
    try:
        return await node.supervisor.run()
    finally:
        say(said=node.said)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
