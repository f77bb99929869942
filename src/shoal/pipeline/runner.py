"""Runs any schedule: the actions of this rank, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils._pytree import tree_leaves

from shoal.comm import Group, World
from shoal.errors import UserError
from shoal.pipeline.actions import Action, Schedule
from shoal.pipeline.arrived import Box
from shoal.pipeline.p2p import Mail, Message, Way, messages_to
from shoal.pipeline.routes import Calls, Given, Routes, Shape, Value, find_routes
from shoal.pipeline.split import Split
from shoal.pipeline.split_backward import Start, input_half, weight_half

Microbatch = Mapping[str, Tensor]


class Work(Protocol):
    """What a stage does with a microbatch, by its place in the step."""

    def around(self, microbatch: int) -> AbstractContextManager[None]:
        """Around a forward, where the model has all that this rank has of it."""

    def forward(self, microbatch: int) -> Tensor | None:
        """The loss of it, by the model: where this is the last stage the number that backward starts from."""

    def backward(self, microbatch: int, complete: set[str] | None, last: bool) -> AbstractContextManager[None]:
        """Around the part of a backward that gives the gradients of weights, of which those of `complete` are this step's then; None where it gives none. `last`: this rank's last."""


class Runner:
    """Of one rank of `group`, the ranks of one pipeline. `schedule(microbatches)` gives the schedule of a step."""

    def __init__(self, split: Split, schedule: Callable[[int], Schedule], group: Group, world: World) -> None:
        self.split, self.group, self._device = split, group, world.device
        self._ledger = world.ledger
        self._schedule = lru_cache(maxsize=16)(schedule)
        self._mail = Mail(world, group.ranks, group.rank)
        self._known: dict[Any, Routes] = {}
        self._messages = lru_cache(maxsize=16)(partial(_messages, group.rank, self._known))
        self._passes: dict[tuple[int, int], Pass] = {}
        one = self._schedule(1)
        self._rank_of, self._number = one.rank_of, one.stages
        self._forwards = lru_cache(maxsize=16)(one.forwards)
        self.own = one.stages_of(group.rank)
        self._names = {stage: split.names(stage) for stage in self.own}

    @property
    def tied(self) -> dict[str, list[int]]:
        """The weights that ranks of the pipeline share, by name: the places of all that have them."""
        places = {each.name: sorted({self._rank_of(stage) for stage in each.stages}) for each in self.split.tied}
        return {name: having for name, having in places.items() if len(having) > 1}

    @property
    def flushes(self) -> bool:
        """Whether a step ends with all its backwards."""
        return self._schedule(1).flushes

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, and with it the loss."""
        return self._number - 1 in self.own

    @property
    def rounds(self) -> int:
        """Backwards of each microbatch on this rank."""
        return len(self.own)

    def learn(
        self,
        kinds: Sequence[Any],
        run: Callable[[int], Any],
        alike: Group | None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Finds out what travels where of microbatches of `kinds` that have not been seen yet; all ranks of the pipeline call it alike. `run(place)` gives the loss of one. `alike`: pipelines
        whose ranks meet in their forwards, and so find out together. `around`: the forwards, if there are any."""
        new = torch.tensor([kind not in self._known and kind not in kinds[:place] for place, kind in enumerate(kinds)])
        if alike is not None:
            new = alike.all_reduce(new.to(torch.int32), "max", purpose="kinds").bool()
        if not new.any():
            return
        for place in new.nonzero().flatten().tolist():
            with around():
                found = find_routes(self.split, self._number, self._rank_of, self.group, partial(run, place), self._device)
            self._known[kinds[place]] = found
            self._messages.cache_clear()
            pairs = [(self._rank_of(source), self._rank_of(target)) for source, target in found.pairs()]
            self._mail.open([(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]])

    def train(self, kinds: Sequence[Any], work: Work) -> None:
        """One step of microbatches of `kinds`."""
        order = self._begin(kinds, self._schedule).orders[self.group.rank]
        weights = [place for place, action in enumerate(order) if action.kind in ("B", "W")]
        final = {order[place].stage: place for place in weights}
        with functorch_config.patch(donated_buffer=False):  # compiled blocks keep theirs until a second half has come by
            for place, action in enumerate(order):
                complete = set[str]()
                if place == final[action.stage]:
                    later = {name for stage, at in final.items() if at > place for name in self._names[stage]}
                    complete = self._names[action.stage] - later
                self._run(action, work, complete, place == weights[-1])
        self._mail.settle()

    def evaluate(self, kinds: Sequence[Any], work: Work) -> None:
        """The forwards alone."""
        for action in self._begin(kinds, self._forwards).orders[self.group.rank]:
            self._forward(action, work, "evaluation")
            self._passes.clear()
        self._mail.settle()

    def of_last_stage(self, value: Tensor | None) -> Tensor:
        """The `value` that the last stage has, on all ranks of the pipeline, which call it alike."""
        source = self._rank_of(self._number - 1)
        shape = self.group.broadcast_object(None if value is None else Shape(tuple(value.shape), value.dtype), src=source)
        found = value if value is not None and self.group.rank == source else shape.empty(self._device)
        return self.group.broadcast(found, src=source, purpose="result")

    def stream(self) -> Stream:
        """What goes on from step to step, for a schedule without a flush."""
        return Stream(self)

    def _begin(self, kinds: Sequence[Any], schedule: Callable[[int], Schedule]) -> Schedule:
        self._routes = {place: self._known[kind] for place, kind in enumerate(kinds)}
        self._passes, self._local = {}, dict[Message, list[Tensor]]()
        self._mail.expect(self._messages(tuple(kinds), schedule))
        return schedule(len(kinds))

    def _run(self, action: Action, work: Work, complete: set[str], last: bool) -> None:
        try:
            match action.kind:
                case "F":
                    self._forward(action, work)
                case "B":
                    self._backward(action, work, complete, last)
                case "I":
                    self._inputs(action, work)
                case "W":
                    self._weights(action, work, complete, last)
                case "U":
                    raise AssertionError("a schedule without a flush")
        except Exception as error:
            error.add_note(f"in {action} (stage {action.stage}, microbatch {action.microbatch})")
            raise

    def _forward(self, action: Action, work: Work, lane: str = "stage") -> None:
        stage, at = action.stage, action.microbatch
        routes = self._routes[at]
        values: dict[Value, Tensor] = {}
        for source in range(stage):
            if wanted := routes.between(source, stage):
                values |= zip(wanted, self._receive(Message("forward", source, stage, at)), strict=True)
        current = self._passes[stage, at] = Pass(self.split, stage, routes, values, self._device)
        if stage:
            self.split.hear(routes.stages[stage - 1].said)
        with self._span(action, lane), work.around(at):
            current.objective = self.split.run(stage, current, partial(work.forward, at))
        current.recall = self.split.remembered()
        for target in range(stage + 1, self._number):
            if sent := routes.between(stage, target):
                self._send(Message("forward", stage, target, at), [current.sent(value) for value in sent])

    def _backward(self, action: Action, work: Work, complete: set[str], last: bool) -> None:
        current = self._passes.pop((action.stage, action.microbatch))
        roots, grads = self._roots(action, current)
        current.recall()
        with self._span(action), work.backward(action.microbatch, complete, last):
            if roots:
                with self.split.running(action.stage, Again(current)):
                    torch.autograd.backward(roots, grads)
        self._send_back(action, {value: box.grad for value, box in current.boxes.items()})

    def _inputs(self, action: Action, work: Work) -> None:
        current = self._passes[action.stage, action.microbatch]
        roots, grads = self._roots(action, current)
        if not current.boxes or not roots:  # all of it can wait
            with self._span(action):
                current.later = (roots, grads)
            self._send_back(action, {})
            return
        current.recall()
        with self._span(action), work.backward(action.microbatch, None, False), self.split.running(action.stage, Again(current)):
            found, current.starts = input_half(roots, grads, list(current.boxes.values()))
        self._send_back(action, dict(zip(current.boxes, found, strict=True)))

    def _weights(self, action: Action, work: Work, complete: set[str], last: bool) -> None:
        current = self._passes.pop((action.stage, action.microbatch))
        roots, grads = current.later
        current.recall()
        again = self.split.running(action.stage, Again(current))
        with self._span(action), work.backward(action.microbatch, complete, last), again:
            weight_half(current.starts)
            if roots:
                torch.autograd.backward(roots, grads)

    def _roots(self, action: Action, current: Pass) -> tuple[list[Tensor], list[Tensor | None]]:
        """Where backward starts: the loss, or what other stages have taken, with the sums of their gradients."""
        stage, at, routes = action.stage, action.microbatch, self._routes[action.microbatch]
        if stage == self._number - 1:
            return ([current.objective] if current.objective is not None and current.objective.requires_grad else []), [None]
        sums: dict[Value, Tensor] = {}
        for target in range(stage + 1, self._number):
            if routes.between(stage, target):
                values = routes.back(stage, target)
                for value, grad in zip(values, self._receive(Message("backward", target, stage, at)), strict=True):
                    sums[value] = sums[value] + grad if value in sums else grad
        roots = [(current.given[value], grad) for value, grad in sums.items() if current.given[value].requires_grad]
        return [root for root, _ in roots], [grad for _, grad in roots]

    def _send_back(self, action: Action, grads: Mapping[Value, Tensor | None]) -> None:
        stage, at, routes = action.stage, action.microbatch, self._routes[action.microbatch]
        for source in range(stage):
            if routes.between(source, stage):
                back = []
                for value in routes.back(source, stage):
                    grad = grads.get(value)
                    back.append(routes.shape(value).zeros(self._device) if grad is None else grad)
                self._send(Message("backward", stage, source, at), back)

    def _span(self, action: Action, lane: str = "stage") -> AbstractContextManager[None]:
        """Around what is computed of it: waiting for messages is not."""
        return self._ledger.span(lane, str(action))

    # messages

    def _shapes(self, message: Message) -> list[Shape]:
        routes = self._routes[message.microbatch]
        forward = message.way == "forward"
        values = routes.between(message.source, message.target) if forward else routes.back(message.target, message.source)
        return [routes.shape(value) for value in values]

    def _send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        to = self._rank_of(message.target)
        if to == self.group.rank:
            self._local[message] = [tensor.detach() for tensor in tensors]
        else:
            self._mail.send(message, to, [tensor.detach() for tensor in tensors])

    def _receive(self, message: Message) -> list[Tensor]:
        source = self._rank_of(message.source)
        if source == self.group.rank:
            return self._local.pop(message)
        return self._mail.receive(message, source, self._shapes)

    def close(self) -> None:
        """Ends the lanes on which values travel."""
        self._mail.close()


def _messages(
    place: int, known: Mapping[Any, Routes], kinds: tuple[Any, ...], schedule: Callable[[int], Schedule]
) -> dict[tuple[Way, int], list[Message]]:
    return messages_to(place, schedule(len(kinds)), lambda source, target, at: bool(known[kinds[at]].between(source, target)))


class Stream:
    """Microbatches one after the other without an end, numbered from 0: of each a rank does the forward when it is fed, and the backward when it is asked for the oldest one's."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        (self._stage,) = runner.own
        self._next = 0
        self._works: dict[int, tuple[Work, int]] = {}  # whose microbatch it is, and which
        runner._routes, runner._passes, runner._local = {}, {}, {}

    @property
    def behind(self) -> int:
        """How many stages come after this rank's: as many microbatches it has on their way."""
        return self._runner._number - 1 - self._stage

    @property
    def under_way(self) -> int:
        """Microbatches whose backward is still to come."""
        return len(self._works)

    def feed(self, kind: Any, work: Work, place: int) -> None:
        """The forward of the microbatch at `place` of `work`."""
        runner, number, stage = self._runner, self._next, self._stage
        routes = runner._routes[number] = runner._known[kind]
        self._next, self._works[number] = number + 1, (work, place)
        for other in range(len(routes.stages)):
            if other < stage and routes.between(other, stage):
                runner._mail.expect_also("forward", runner._rank_of(other), Message("forward", other, stage, number))
            if other > stage and routes.between(stage, other):
                runner._mail.expect_also("backward", runner._rank_of(other), Message("backward", other, stage, number))
        self._run(Action("F", stage, number))

    def back(self) -> None:
        """The backward of the oldest one."""
        number = next(iter(self._works))
        self._run(Action("B", self._stage, number))
        del self._works[number], self._runner._routes[number]

    def _run(self, action: Action) -> None:
        self._runner._run(action, _Renamed(*self._works[action.microbatch]), set(), False)


class _Renamed:
    """One microbatch of a `work`, whatever number it is called by."""

    def __init__(self, work: Work, place: int) -> None:
        self._work, self._place = work, place

    def around(self, microbatch: int) -> AbstractContextManager[None]:
        return self._work.around(self._place)

    def forward(self, microbatch: int) -> Tensor | None:
        return self._work.forward(self._place)

    def backward(self, microbatch: int, complete: set[str] | None, last: bool) -> AbstractContextManager[None]:
        return self._work.backward(self._place, complete, last)


class Pass(Calls):
    """One forward of a stage on a microbatch (split.Forward), and what its backward needs of it."""

    def __init__(self, split: Split, stage: int, routes: Routes, values: Mapping[Value, Tensor], device: torch.device) -> None:
        super().__init__()
        self._split, self._routes, self._own = split, routes, routes.stages[stage]
        later = range(stage + 1, len(routes.stages))
        self._wanted = {value for target in later for value in routes.between(stage, target)}
        self._values, self._device = values, device
        self.boxes: dict[Value, Box] = {}
        if torch.is_grad_enabled():
            self.boxes = {value: Box(tensor) for value, tensor in values.items() if tensor.dtype.is_floating_point}
        self.given: dict[Value, Tensor] = {}
        self.objective: Tensor | None = None
        self.recall: Callable[[], None] = lambda: None
        self.starts: list[Start] = []  # of the second half of backward
        self.later: tuple[list[Tensor], list[Tensor | None]] = ([], [])  # where all of it starts

    def own(self, unit: int, part: nn.Module, args: Any, kwargs: Any) -> Any:
        result, beside = self._split.taps.run(unit, part, args, kwargs)
        call = self.count(unit)
        for place, leaf in enumerate(tree_leaves((result, beside))):
            value = Value(unit, call, place)
            if value in self._wanted:
                known = self._routes.shape(value).size
                if tuple(leaf.shape) != known:
                    raise UserError(
                        f"{self._split.units[unit].name} gives {tuple(leaf.shape)} to another stage, where of the first microbatch of these shapes it gave {known}: shapes that depend on the data "
                        "must stay within one stage (plan.stages)"
                    )
                self.given[value] = leaf.clone() if value in self._own.changed else leaf
        return result

    def elsewhere(self, unit: int) -> Any:
        return self._of_others(unit, self.count(unit))

    def again(self, unit: int) -> Any:
        """What another stage's part has given, for a forward that backward runs again."""
        if self.called(unit) > 1:
            raise UserError(
                f"{self._split.units[unit].name} is called {self.called(unit)} times in a forward, and once more inside torch.utils.checkpoint.checkpoint, which does not say which call that "
                'is: take plan.recompute = "full" in its place'
            )
        return self._of_others(unit, 0)

    def _of_others(self, unit: int, call: int) -> Any:
        given: Given | None = self._routes.given(unit, call)
        if given is None:
            raise UserError(
                f"this microbatch calls {self._split.units[unit].name}, of stage {self._split.stages[unit]}, once more than the first one of its shapes did: what is called must not "
                "depend on the data, but within one stage"
            )

        def tensor(leaf: int, shape: Shape) -> Tensor:
            value = Value(unit, call, leaf)
            if value in self.boxes:
                return self.boxes[value].tensor
            if value in self._values:
                return self._values[value]
            zeros = shape.zeros(self._device)
            return zeros.clone() if value in self._own.filled else zeros

        result, beside = given.made(tensor)
        self._split.taps.replay(unit, beside)
        return result

    def sent(self, value: Value) -> Tensor:
        if value not in self.given:
            unit = self._split.units[value.unit].name
            raise UserError(
                f"this microbatch does not call {unit} as the first one of its shapes did: what is called must not depend on the data, but within one stage"
            )
        return self.given[value]


class Again:
    """What a backward runs again of a forward that is over (split.Forward), as torch.utils.checkpoint does."""

    def __init__(self, before: Pass) -> None:
        self._before = before

    def own(self, unit: int, part: nn.Module, args: Any, kwargs: Any) -> Any:
        return part(*args, **kwargs)

    def elsewhere(self, unit: int) -> Any:
        return self._before.again(unit)
