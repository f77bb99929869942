"""Runs the actions of a rank one after the other, for every schedule, with or without a flush."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm import Group, World
from shoal.errors import UserError
from shoal.module.block_inputs import MODIFIED
from shoal.pipeline.actions import Action
from shoal.pipeline.p2p import Mail, Message, Way
from shoal.pipeline.passes import Again, Pass
from shoal.pipeline.routes import Routes, Shape, Value
from shoal.pipeline.split import Split
from shoal.pipeline.split_backward import input_half, weight_half

CHANGED_MEANWHILE = (
    "plan.pp: a forward changes a tensor in place that the backward of an earlier microbatch needs, as by `self.calls "
    "+= 1`, and a pipeline runs that forward before this backward: give the module a new tensor instead (self.calls = "
    'self.calls + 1), or take plan.recompute = "full", or plan.pp = 1'
)


class Work:
    """The work of a stage on a microbatch, which is given by its number in the schedule."""

    def around(self, microbatch: int) -> AbstractContextManager[None]:
        """Wraps a forward; the model has all parts of this rank in place."""
        return nullcontext()

    def forward(self, microbatch: int) -> Any:
        """Runs the model and what is done with its output. A stage that comes to a part of a later one does not
        return; the last one does, and any other behind which no parts are called."""
        raise NotImplementedError

    def take(self, microbatch: int, found: Any) -> Tensor | None:
        """Takes what the forward of the last stage has found; returns the scalar from which backward starts, if any."""
        raise NotImplementedError

    def backward(self, microbatch: int, complete: Collection[str] | None, last: bool) -> AbstractContextManager[None]:
        """Wraps the part of a backward that computes gradients of weights.

        complete: the weights to which no later backward of the step adds; None if this part computes no gradients of
            weights
        last: it is this rank's last backward in the step
        """
        raise AssertionError("forwards alone")

    def reduce(self, microbatch: int) -> None:
        """Exchanges the gradients of the step that ends with this microbatch."""
        raise AssertionError("a schedule with a flush")

    def update(self, microbatch: int) -> None:
        """Updates the weights by the gradients of the step that ends with this microbatch."""
        raise AssertionError("a schedule with a flush")


class Interpreter:
    """Runs actions on one rank of a pipeline.

    split: the model with this rank's stages
    group: the ranks of the pipeline
    world: gives groups, lanes and the ledger
    rank_of: rank_of(stage) is the rank in `group` that has it
    stages: their number
    """

    def __init__(self, split: Split, group: Group, world: World, rank_of: Callable[[int], int], stages: int) -> None:
        self._split, self._group, self._rank_of, self._number = split, group, rank_of, stages
        self._device, self._ledger = world.device, world.ledger
        self._mail = Mail(world, group.ranks, group.rank)
        self._routes: dict[int, Routes] = {}
        self._passes: dict[tuple[int, int], Pass] = {}
        self._local: dict[Message, list[Tensor]] = {}

    def open(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Connects the ranks of each pair (lower, higher). Collective over the pipeline."""
        self._mail.open(pairs)

    def begin(self, routes: Mapping[int, Routes], messages: Mapping[tuple[Way, int], Sequence[Message]]) -> None:
        """Begins a schedule that ends: a step with a flush, or an evaluation.

        routes: of each microbatch
        messages: those that will arrive, in order, by direction and rank
        """
        self._routes, self._passes, self._local = dict(routes), {}, {}
        self._mail.expect(messages)

    def add(self, microbatch: int, stage: int, routes: Routes) -> None:
        """Adds one more microbatch to a schedule without a flush, behind the present ones; `forget` removes it."""
        self._routes[microbatch] = routes
        for other in range(self._number):
            if other < stage and routes.between(other, stage):
                self._mail.expect_also("forward", self._rank_of(other), Message("forward", other, stage, microbatch))
            if other > stage and routes.between(stage, other):
                self._mail.expect_also("backward", self._rank_of(other), Message("backward", other, stage, microbatch))

    def do(self, action: Action, work: Work, complete: Collection[str] = (), last: bool = False) -> None:
        """Runs one action. `complete` and `last` are those of Work.backward."""
        match action.kind:
            case "R":
                work.reduce(action.microbatch)
            case "U":
                work.update(action.microbatch)
            case _:
                try:
                    self._compute(action, work, complete, last)
                except Exception as error:
                    where = f"in {action} (stage {action.stage}, microbatch {action.microbatch})"
                    if MODIFIED in str(error):
                        raise UserError(f"{CHANGED_MEANWHILE} ({where})") from error
                    error.add_note(where)
                    raise

    def forget(self, microbatch: int) -> None:
        """Removes a microbatch whose actions are done."""
        del self._routes[microbatch]

    def _compute(self, action: Action, work: Work, complete: Collection[str], last: bool) -> None:
        match action.kind:
            case "F":
                self.forward(action, work)
            case "B":
                self._backward(action, work, complete, last)
            case "I":
                self._inputs(action, work)
            case "W":
                self._weights(action, work, complete, last)

    def forward(self, action: Action, work: Work, lane: str = "stage") -> None:
        """Runs a forward, and sends the values that other stages need from it."""
        stage, at = action.stage, action.microbatch
        routes = self._routes[at]
        values: dict[Value, Tensor] = {}
        for source in range(stage):
            if wanted := routes.between(source, stage):
                values |= zip(wanted, self._receive(Message("forward", source, stage, at)), strict=True)
        current = self._passes[stage, at] = Pass(self._split, stage, routes, values, self._device)
        if stage:
            self._split.hear(routes.stages[stage - 1].said)
        with self._span(action, lane), work.around(at):
            try:
                found = self._split.run(stage, current, partial(work.forward, at))
                if stage == self._number - 1:
                    current.objective = work.take(at, found)
            except Exception as error:
                if not isinstance(error, UserError) and (why := current.why(error)):
                    raise UserError(why) from error
                raise
        current.recall = self._split.remembered()
        for target in range(stage + 1, self._number):
            if sent := routes.between(stage, target):
                self._send(Message("forward", stage, target, at), [current.sent(value) for value in sent])

    def _backward(self, action: Action, work: Work, complete: Collection[str], last: bool) -> None:
        current = self._passes.pop((action.stage, action.microbatch))
        roots, grads = self._roots(action, current)
        current.recall()
        with self._span(action), work.backward(action.microbatch, complete, last):
            if roots:
                with self._split.running(action.stage, Again(current)):
                    torch.autograd.backward(roots, grads)
        self._send_back(action, {value: box.grad for value, box in current.boxes.items()})

    def _inputs(self, action: Action, work: Work) -> None:
        current = self._passes[action.stage, action.microbatch]
        roots, grads = self._roots(action, current)
        if not current.boxes or not roots:  # no other rank waits: all of it runs in the second half
            with self._span(action):
                current.later = (roots, grads)
            self._send_back(action, {})
            return
        current.recall()
        with (
            self._span(action),
            work.backward(action.microbatch, None, False),
            self._split.running(action.stage, Again(current)),
        ):
            found, current.starts = input_half(roots, grads, list(current.boxes.values()))
        self._send_back(action, dict(zip(current.boxes, found, strict=True)))

    def _weights(self, action: Action, work: Work, complete: Collection[str], last: bool) -> None:
        current = self._passes.pop((action.stage, action.microbatch))
        roots, grads = current.later
        current.recall()
        again = self._split.running(action.stage, Again(current))
        with self._span(action), work.backward(action.microbatch, complete, last), again:
            weight_half(current.starts)
            if roots:
                torch.autograd.backward(roots, grads)

    def _roots(self, action: Action, current: Pass) -> tuple[list[Tensor], list[Tensor | None]]:
        """Returns the tensors where backward starts, and their gradients.

        These are the loss, or the values that other stages have taken, with the sums of the gradients they sent back.
        """
        stage, at, routes = action.stage, action.microbatch, self._routes[action.microbatch]
        if stage == self._number - 1:
            return ([current.objective] if current.objective is not None and current.objective.requires_grad else []), [
                None
            ]
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
        """Records the computation of an action in the ledger, without the wait for messages."""
        return self._ledger.span(lane, str(action))

    # messages

    def _shapes(self, message: Message) -> list[Shape]:
        routes = self._routes[message.microbatch]
        forward = message.way == "forward"
        values = (
            routes.between(message.source, message.target) if forward else routes.back(message.target, message.source)
        )
        return [routes.shape(value) for value in values]

    def _send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        to = self._rank_of(message.target)
        if to == self._group.rank:
            self._local[message] = [tensor.detach() for tensor in tensors]
        else:
            self._mail.send(message, to, [tensor.detach() for tensor in tensors])

    def _receive(self, message: Message) -> list[Tensor]:
        source = self._rank_of(message.source)
        if source == self._group.rank:
            return self._local.pop(message)
        return self._mail.receive(message, source, self._shapes)

    def settle(self) -> None:
        """Waits until everything sent has left and everything expected has arrived."""
        self._mail.settle()

    def clear(self) -> None:
        """Discards forwards that no backward follows."""
        self._passes.clear()

    def close(self) -> None:
        """Closes the lanes and groups on which values travel."""
        self._mail.close()
