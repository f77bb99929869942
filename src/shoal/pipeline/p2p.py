"""Values from stage to stage, and their gradients back: one ordered way for each pair of ranks and direction, beside the computation.

What is sent is queued and goes out when it can. What will be received is asked for in the order in which the other rank sends it, which the schedule says, a few messages before it is needed. So
nobody computes less because somebody else is late, but who needs what is late.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from shoal.comm import Group, Lane, World
from shoal.comm.lane import Ticket
from shoal.device import record_use
from shoal.pipeline.actions import Schedule
from shoal.pipeline.routes import Shape

AHEAD = 2
"""Messages asked for before they are needed, of each other rank and direction."""

Way = Literal["forward", "backward"]


@dataclass(frozen=True)
class Message:
    """What a microbatch brings from stage `source` to `target`: values forward, or their gradients backward."""

    way: Way
    source: int
    target: int
    microbatch: int

    def __str__(self) -> str:
        what = "activations" if self.way == "forward" else "gradients"
        return f"{what} of microbatch {self.microbatch} from stage {self.source}"


class Mail:
    """Of the rank at `place` among `ranks`, those of one pipeline."""

    def __init__(self, world: World, ranks: Sequence[int], place: int) -> None:
        self._world, self._ranks, self._place = world, list(ranks), place
        self._serial = world.serial("pipeline")  # what another one has left under way is not read here
        self._groups: dict[tuple[Way, int], Group] = {}
        self._lanes: dict[tuple[Way, int, bool], Lane] = {}
        self._expected: dict[tuple[Way, int], deque[Message]] = {}
        self._posted: dict[Message, tuple[Ticket, list[Tensor]]] = {}
        self._under_way: Counter[tuple[Way, int]] = Counter()  # of those posted, by way and place

    def open(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Connects the places of each pair (lower, higher); all ranks call it with the same pairs."""
        for lower, higher in sorted(set(pairs)):
            if self._place not in (lower, higher):
                continue
            other = higher if self._place == lower else lower
            ranks = [self._ranks[lower], self._ranks[higher]]
            for way in ("forward", "backward"):
                if (way, other) not in self._groups:
                    self._groups[way, other] = self._world.group(f"pp{self._serial}-{way}", ranks)
                    for sends in (True, False):
                        self._lanes[way, other, sends] = self._world.lane()

    def expect(self, messages: Mapping[tuple[Way, int], Sequence[Message]]) -> None:
        """What comes next, of each way and place: see `messages_to`."""
        self._expected = {key: deque(messages.get(key, ())) for key in self._groups}
        self._posted, self._under_way = {}, Counter()

    def expect_also(self, way: Way, place: int, message: Message) -> None:
        """One more message that the rank at `place` will send, after all that it was said to send."""
        self._expected.setdefault((way, place), deque()).append(message)

    def send(self, message: Message, to: int, tensors: Sequence[Tensor]) -> None:
        """Queues `tensors` for the rank at `to`; they are not to be written to."""
        group = self._groups[message.way, to]
        target = 1 - group.rank

        def work() -> None:
            for tensor in tensors:
                record_use(tensor)
                group.send(tensor, target, purpose=message.way)

        self._lanes[message.way, to, True].submit(work, str(message))

    def receive(self, message: Message, source: int, shapes: Callable[[Message], Sequence[Shape]]) -> list[Tensor]:
        """The tensors of `message`, from the rank at `source`; `shapes` are those of any message."""
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
        """Posts receives up to that of `message`, and on until `AHEAD` more are under way."""
        expected, group = self._expected[message.way, source], self._groups[message.way, source]
        lane = self._lanes[message.way, source, False]
        while expected and (message not in self._posted or self._under_way[message.way, source] <= AHEAD):
            following = expected.popleft()
            self._under_way[message.way, source] += 1
            tensors: list[Tensor] = []
            work = partial(_receive, group, 1 - group.rank, shapes(following), tensors, self._world.device, following.way)
            self._posted[following] = (lane.submit(work, str(following)), tensors)

    def settle(self) -> None:
        """Returns when all that was sent is gone, and all that is expected has come."""
        for lane in self._lanes.values():
            lane.wait(cause="pipeline")

    def close(self) -> None:
        """Messages under way are lost."""
        for group in self._groups.values():
            group.close()
        for lane in self._lanes.values():
            lane.close()


def messages_to(place: int, schedule: Schedule, between: Callable[[int, int, int], bool]) -> dict[tuple[Way, int], list[Message]]:
    """What comes to the rank at `place` while `schedule` runs, of each way and other place in the order in which it is sent; `between(source, target, microbatch)`: whether something does
    forward between these stages, and so back."""
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


def _receive(group: Group, source: int, shapes: Sequence[Shape], into: list[Tensor], device: torch.device, way: Way) -> None:
    for shape in shapes:
        into.append(group.recv(shape.empty(device), source, purpose=way))
