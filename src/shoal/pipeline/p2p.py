"""Sends values from stage to stage and their gradients back: one ordered channel per pair of ranks and direction,
asynchronous to the computation.

A message to send is queued and leaves when it can. Receives are posted in the order in which the other rank sends,
which the schedule determines, a few messages before they are needed. So a late rank delays only those that need its
result.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

from torch import Tensor

from shoal.comm import Group, Lane, World
from shoal.comm.lane import Ticket
from shoal.device import is_accelerator, record_use
from shoal.pipeline.actions import Schedule
from shoal.pipeline.routes import Shape

AHEAD = 2
"""Receives posted before they are needed, for each other rank and direction."""

Way = Literal["forward", "backward"]
WAYS: tuple[Way, Way] = ("forward", "backward")


@dataclass(frozen=True)
class Message:
    """The tensors of a microbatch that go from stage `source` to `target`: values forward, or their gradients
    backward."""

    way: Way
    source: int
    target: int
    microbatch: int

    def __str__(self) -> str:
        what = "activations" if self.way == "forward" else "gradients"
        return f"{what} of microbatch {self.microbatch} from stage {self.source}"


class Mail:
    """The channels of one rank of a pipeline.

    world: gives groups and lanes
    ranks: of the pipeline, by their numbers in the world
    place: index of this rank in `ranks`
    """

    def __init__(self, world: World, ranks: Sequence[int], place: int) -> None:
        self._world, self._ranks, self._place = world, list(ranks), place
        self._serial = world.serial("pipeline")  # so that messages left over by another pipeline are not read
        self._groups: dict[tuple[Way, int, bool], Group] = {}  # by way, index of the other, and whether this one sends
        self._lanes: dict[tuple[Way, int, bool], Lane] = {}
        self._expected: dict[tuple[Way, int], deque[Message]] = {}
        self._posted: dict[Message, tuple[Ticket, list[Tensor]]] = {}
        self._under_way: Counter[tuple[Way, int]] = Counter()  # posted receives, by direction and index

    def open(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Connects the ranks at the indices of each pair (lower, higher); all ranks call it with the same pairs."""
        for lower, higher in sorted(set(pairs)):
            if self._place not in (lower, higher):
                continue
            other = higher if self._place == lower else lower
            ranks = [self._ranks[lower], self._ranks[higher]]
            for way, up in product(WAYS, (True, False)):
                sends = up == (self._place == lower)
                if (way, other, sends) not in self._groups:
                    # One NCCL communicator carries one message at a time: a receive that is posted early would keep
                    # back what is sent the other way, for which the other rank waits.
                    towards = ("-up" if up else "-down") if is_accelerator(self._world.device) else ""
                    self._groups[way, other, sends] = self._world.group(f"pp{self._serial}-{way}{towards}", ranks)
                    self._lanes[way, other, sends] = self._world.lane()

    def expect(self, messages: Mapping[tuple[Way, int], Sequence[Message]]) -> None:
        """Sets the messages that will arrive, in order, by direction and index of the rank: see `messages_to`."""
        self._expected = {(way, other): deque(messages.get((way, other), ())) for way, other, _ in self._groups}
        self._posted, self._under_way = {}, Counter()

    def expect_also(self, way: Way, place: int, message: Message) -> None:
        """Appends one more message that the rank at index `place` will send after all others expected from it."""
        self._expected.setdefault((way, place), deque()).append(message)

    def send(self, message: Message, to: int, tensors: Sequence[Tensor]) -> None:
        """Queues `tensors` for the rank at index `to`; they must not be written to."""
        group = self._groups[message.way, to, True]
        target = 1 - group.rank

        def work() -> None:
            for tensor in tensors:
                record_use(tensor)
                group.send(tensor, target, purpose=message.way)

        self._lanes[message.way, to, True].submit(work, str(message))

    def receive(self, message: Message, source: int, shapes: Callable[[Message], Sequence[Shape]]) -> list[Tensor]:
        """Returns the tensors of `message` from the rank at index `source`; `shapes` gives those of any message."""
        self.ask(source, message, shapes)
        ticket, tensors = self._posted.pop(message)
        self._under_way[message.way, source] -= 1
        try:
            ticket.wait(f"stage {message.source}")
        except Exception as error:
            error.add_note(f"while waiting for {message}, rank {self._ranks[source]}")
            raise
        record_use(*tensors)
        return tensors

    def ask(self, source: int, message: Message, shapes: Callable[[Message], Sequence[Shape]]) -> None:
        """Posts receives up to that of `message`, and further ones until `AHEAD` more are under way."""
        expected, group = self._expected[message.way, source], self._groups[message.way, source, False]
        lane = self._lanes[message.way, source, False]
        while expected and (message not in self._posted or self._under_way[message.way, source] <= AHEAD):
            following = expected.popleft()
            self._under_way[message.way, source] += 1
            # the caller's memory: the lane only fills it
            tensors = [shape.empty(self._world.device) for shape in shapes(following)]
            work = partial(_receive, group, 1 - group.rank, tensors, following.way)
            self._posted[following] = (lane.submit(work, str(following)), tensors)

    def settle(self) -> None:
        """Waits until everything sent has left and everything expected has arrived."""
        for lane in self._lanes.values():
            lane.wait(cause="pipeline")

    def close(self) -> None:
        """Closes lanes and groups; messages under way are lost."""
        for group in set(self._groups.values()):
            group.close()
        for lane in self._lanes.values():
            lane.close()


def messages_to(
    place: int, schedule: Schedule, between: Callable[[int, int, int], bool]
) -> dict[tuple[Way, int], list[Message]]:
    """Returns the messages that arrive while `schedule` runs, by direction and index of the sender, in the order sent.

    place: index of the receiving rank
    schedule: of all ranks
    between: between(source, target, microbatch) says whether anything goes forward between these stages, and so back
    """
    found: dict[tuple[Way, int], list[Message]] = {}
    own = schedule.stages_of(place)
    for source, order in enumerate(schedule.orders):
        if source == place:
            continue
        for action in (action for action in order if action.kind in ("F", "B", "I")):
            stage, microbatch = action.stage, action.microbatch
            for other in own:
                if action.kind == "F" and stage < other and between(stage, other, microbatch):
                    found.setdefault(("forward", source), []).append(Message("forward", stage, other, microbatch))
                if action.kind != "F" and other < stage and between(other, stage, microbatch):
                    found.setdefault(("backward", source), []).append(Message("backward", stage, other, microbatch))
    return found


def _receive(group: Group, source: int, into: Sequence[Tensor], way: Way) -> None:
    for tensor in into:
        record_use(tensor)
        group.recv(tensor, source, purpose=way)
