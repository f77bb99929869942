"""Nodes as actors of Ray, which this process, the driver, has placed and starts again.

A node needs a Ray node of its own with the resources that it reserves there, so each has a bundle in a placement group.
The least number of nodes is one group, which Ray places as a whole or not at all: two jobs do not keep each other
waiting with half of what they need. Each further node is a group of its own that shuns the Ray nodes which the job has.
One group waits for room at a time, and an autoscaler sees what it waits for.

    no room --Ray places a bundle--> placed --an actor starts a supervisor--> begins --it is a member--> trains
       ^---------the Ray node is lost-----------+          ^----the actor is lost, or the supervisor ended---+

The first supervisor founds the job, the others join those that are members. Who coordinates, who trains and what
follows from a loss is decided there, not here. If this process ends, Ray ends its actors, and with them the job.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shoal.comm.secret import FILE_VARIABLE, VARIABLE, new_secret
from shoal.elastic.backoff import Backoff
from shoal.elastic.nodes import say
from shoal.elastic.ray_actor import Ended, Host, Order
from shoal.errors import LaunchError
from shoal.launch.environment import MARKS
from shoal.launch.failure import first_line
from shoal.launch.ray import FORWARDED, machines, ray_package, start_actor

NODE_ID = "ray.io/node-id"
"""The label by which Ray knows a node of its own."""
LOOK, PATIENCE, GRACE = 1.0, 20.0, 60.0
"""Seconds between two looks at the placement; for room, after which what is missing is said; for the other nodes to
end once one has said that the job is over."""
WINDOW, LONGEST = 600.0, 300.0
"""Seconds in which the failures on a Ray node are counted, and for which it is left alone at most; see Backoff."""
SHORT, TRIES = 60.0, 3
"""The job ends where all its nodes were lost so often in a row, within so many seconds after it was founded."""


@dataclass(frozen=True)
class Wanted:
    """The nodes of a job.

    command: see ray_actor.Order; how often the job was founded is added.
    least, most: numbers of nodes. ranks: of each.
    resources: what each reserves of a Ray node, such as {"CPU": 4.0, "GPU": 1.0}.
    """

    command: list[str]
    least: int
    most: int
    ranks: int
    resources: dict[str, float]


@dataclass(eq=False)
class Bundle:
    """A place for a node, the number `index` of a placement group that shuns the Ray nodes `without`.

    node: the Ray node that has it, "" while none has room.
    actor, future: the node there, None for none; what its actor will tell next.
    founds: whether it founded the job. address: where its supervisor listens, once it is a member.
    """

    group: Any
    index: int
    without: frozenset[str] = frozenset()
    node: str = ""
    actor: Any = None
    future: Any = None
    founds: bool = False
    address: str = ""


def run(wanted: Wanted) -> int:
    """Runs a job on nodes that are actors of Ray; returns its exit code. SIGTERM and SIGINT have it end with a
    checkpoint; a second SIGINT ends it at once."""
    fleet = Fleet(wanted)
    with _signals() as received:
        try:
            while True:
                fleet.heed(received)
                if (code := fleet.code(received)) is not None:
                    return code
                fleet.look()
                fleet.hear()
        finally:
            fleet.close()


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the driver's variables that its nodes may have: none that Ray has set for this process, and none that say
    which devices it sees."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("RAY_") and not name.endswith("_VISIBLE_DEVICES")
    }


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the signals that this process gets."""
    received: list[int] = []
    numbers = signal.SIGTERM, signal.SIGINT
    before = {each: signal.signal(each, lambda number, _: received.append(number)) for each in numbers}
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class Fleet:
    """The bundles of a job, and the nodes on them."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted, self._ray = wanted, ray_package()
        self._variables = {**forwarded(os.environ), VARIABLE: new_secret()}
        self._backoff = Backoff(WINDOW, LONGEST)
        self._left: set[str] = set()  # Ray nodes whose node was told to leave
        self._looked, self._waits = float("-inf"), time.monotonic()  # since when there is too little room
        self._founded, self._foundings, self._tries = float("-inf"), 0, 0
        self._asked = 0  # the signal by which the job is told to end
        self._over: int | None = None  # the exit code of the job
        self._deadline = float("inf")
        self._last = LaunchError.exit_code  # of the node that was lost last
        self._fatal: int | None = None
        group = self._group(self.wanted.least)
        self._bundles = [Bundle(group, index) for index in range(self.wanted.least)]

    def heed(self, received: list[int]) -> None:
        """Has the job end with a checkpoint, once a signal has come."""
        if not received or self._asked:
            return
        self._asked = received[0]
        say("the job is told to end, with a checkpoint")
        for bundle in self._bundles:
            if bundle.address:
                bundle.actor.signal.remote(signal.SIGINT)  # see nodes.Came
            elif bundle.actor is not None:
                self._free(bundle)  # it does not train yet

    def code(self, received: list[int]) -> int | None:
        """Returns the exit code once the job has ended, for the nodes too."""
        running = any(each.actor is not None for each in self._bundles)
        if signal.SIGINT in received[1:]:
            return 128 + signal.SIGINT
        if self._over is not None and (not running or time.monotonic() > self._deadline):
            return self._over
        if running:
            return None
        return 128 + self._asked if self._asked else self._fatal

    def look(self) -> None:
        """Learns where Ray has placed the bundles, has it place further ones, and starts nodes on them."""
        now = time.monotonic()
        if self._asked or self._over is not None or now < self._looked + LOOK:
            return
        self._looked = now
        alive = {each["NodeID"] for each in self._ray.nodes() if each["Alive"]}
        placed: dict[Any, Mapping[Any, str]] = {}
        for bundle in self._bundles:
            key = bundle.group.id
            if key not in placed:
                placed[key] = self._ray.util.placement_group_table(bundle.group).get("bundles_to_node_id", {})
            node = placed[key].get(bundle.index, "")
            if bundle.actor is None:  # else it is lost with its Ray node, which is heard of soon
                bundle.node = node if node in alive else ""
        self._grow()
        self._say_what_is_missing(now)
        self._start(now)

    def hear(self) -> None:
        """Takes in what the actors tell; waits a moment where they tell nothing."""
        futures = {each.future: each for each in self._bundles if each.future is not None}
        if not futures:
            time.sleep(0.2)
            return
        done, _ = self._ray.wait(list(futures), timeout=0.2)
        for future in done:
            bundle = futures[future]
            try:
                told = self._ray.get(future)
            except self._ray.exceptions.RayError as error:
                self._fail(bundle, LaunchError.exit_code, f"its actor is lost ({first_line(error)})")
                continue
            if isinstance(told, Ended):
                self._end(bundle, told)
            else:
                bundle.address = told
                bundle.future = bundle.actor.wait.remote()

    def close(self) -> None:
        """Ends what runs, and gives back what was reserved."""
        for bundle in self._bundles:
            self._free(bundle)
        time.sleep(FORWARDED)
        for group in {each.group.id: each.group for each in self._bundles}.values():
            self._ray.util.remove_placement_group(group)

    def _group(self, count: int, without: frozenset[str] = frozenset()) -> Any:
        selectors = [{NODE_ID: f"!in({','.join(sorted(without))})"}] * count if without else None
        bundles = [dict(self.wanted.resources) for _ in range(count)]
        return self._ray.util.placement_group(bundles, strategy="STRICT_SPREAD", bundle_label_selector=selectors)

    def _usable(self) -> list[Bundle]:
        """Returns the bundles that may have a node: the first one on each Ray node, and where one has a node that."""
        owners: dict[str, Bundle] = {}
        for bundle in sorted(self._bundles, key=lambda each: each.actor is None):
            if bundle.node and bundle.node not in self._left:
                owners.setdefault(bundle.node, bundle)
        return list(owners.values())

    def _grow(self) -> None:
        """Has Ray look for room for one more node, where there may be more."""
        taken = frozenset(self._left | {each.node for each in self._bundles if each.node})
        usable = self._usable()
        for bundle in self._bundles[self.wanted.least :]:
            stale = bundle not in usable if bundle.node else bundle.without != taken
            if bundle.actor is None and stale:
                self._ray.util.remove_placement_group(bundle.group)
                self._bundles.remove(bundle)
        if all(each.node for each in self._bundles) and len(usable) < self.wanted.most:
            self._bundles.append(Bundle(self._group(1, taken), 0, taken))

    def _say_what_is_missing(self, now: float) -> None:
        if len(self._usable()) >= self.wanted.least:
            self._waits = now
        elif now - self._waits > PATIENCE:
            self._waits = float("inf")  # once
            have = [{name: each.get(name, 0) for name in self.wanted.resources} for each in machines()]
            say(
                f"Ray has no room yet for {self.wanted.least} node(s) with {self.wanted.resources} each; its nodes "
                f"have {have}, some of which others may use. The job waits"
            )

    def _start(self, now: float) -> None:
        """Starts nodes where there is room: one that founds the job, or all that can join it."""
        for bundle in self._usable():
            members = [each.address for each in self._bundles if each.address]
            if not members and any(each.actor is not None for each in self._bundles):
                return  # the first is no member yet
            if bundle.actor is None and self._backoff.left(bundle.node, now) <= 0:
                if not members and not self._may_found(now):
                    return
                self._begin(bundle, members)

    def _may_found(self, now: float) -> bool:
        """Whether the job is founded, for the first time or again after all its nodes were lost."""
        self._tries = self._tries + 1 if now < self._founded + SHORT else 1
        self._founded, self._foundings = now, self._foundings + 1
        if self._tries > TRIES:
            say(f"all nodes were lost {TRIES} times, each time within {SHORT:.0f} s after the job had begun")
            self._fatal = self._last
        return self._fatal is None

    def _begin(self, bundle: Bundle, members: list[str]) -> None:
        bundle.founds = not members
        bundle.actor = start_actor(Host, bundle.group, bundle.index, self.wanted.resources, threads=2)
        command = [*self.wanted.command, str(self._foundings)]
        order = Order(command, members, self.wanted.ranks, os.getcwd(), self._variables, (*MARKS, FILE_VARIABLE))
        bundle.future = bundle.actor.begin.remote(order)

    def _end(self, bundle: Bundle, ended: Ended) -> None:
        """Takes in that a supervisor has ended."""
        if not ended.over:
            how = f"was killed by signal {-ended.code}" if ended.code < 0 else f"gave up with exit code {ended.code}"
            self._fail(bundle, ended.code if ended.code > 0 else LaunchError.exit_code, f"its supervisor {how}")
            return
        alone = all(each is bundle or each.actor is None for each in self._bundles)
        if not ended.leaves(alone) and (ended.code < 128 or not self._asked):
            self._over, self._deadline = ended.code, min(self._deadline, time.monotonic() + GRACE)
        elif not self._asked:
            self._left.add(bundle.node)
            say(f"the node on Ray node {bundle.node[:8]} was told to leave: nothing starts there any more")
        self._free(bundle)

    def _fail(self, bundle: Bundle, code: int, why: str) -> None:
        """Takes in that a node is lost. It starts again, unless it was the last one and its error is the user's."""
        say(f"the node on Ray node {bundle.node[:8]} is lost: {why}")
        counted = bundle.founds or bool(bundle.address)
        self._backoff.failed(bundle.node, time.monotonic())
        self._free(bundle)
        alone = not any(each.actor is not None for each in self._bundles)
        if counted:
            self._last = code
            if alone and code != LaunchError.exit_code:
                self._fatal = code

    def _free(self, bundle: Bundle) -> None:
        if bundle.actor is not None:
            self._ray.kill(bundle.actor)
        bundle.actor = bundle.future = None
        bundle.founds, bundle.address = False, ""
