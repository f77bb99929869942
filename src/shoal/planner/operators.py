"""The placement problem of a traced model: a variable for each operation and for each tensor that several use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.module.recompute import without_caches
from shoal.parallel.tensor.graph.dims import size
from shoal.parallel.tensor.graph.select import HANDLERS, followed
from shoal.parallel.tensor.graph.strategies import WHOLE, Lies, Strategy, Ways
from shoal.parallel.tensor.graph.trace import Op, Trace, fake_mode, tensors_in, trace
from shoal.parallel.tensor.graph.views import VIEWS
from shoal.planner.computing import ATTENTION_BACKWARD
from shoal.planner.placements import Problem, Rates, redistributed
from shoal.planner.prepare import Subject, blank, in_one_line
from shoal.training.loss import call_loss

Place = tuple[Lies, Lies]
"""How a tensor lies, and its gradient."""


class _Called(Exception):
    """The loss has called the model."""


def traced(subject: Subject) -> Trace:
    """Traces a forward of the model of `subject` on one microbatch, as its loss calls it. Raises UserError for a model
    that cannot be run so."""
    given: list[tuple[Any, Any]] = []

    def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
        given.append((args, kwargs))
        raise _Called

    with in_one_line():
        module = blank(subject.factory).module
        without_caches(module)
        mode = fake_mode(module)
        hook = module.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with mode, torch.inference_mode():
                rows = subject.microbatch
                batch = {key: torch.empty(rows, *each.shape, dtype=each.dtype) for key, each in subject.sample.items()}
                call_loss(subject.loss, module, batch)
        except _Called:
            pass
        finally:
            hook.remove()
        return trace("", module, *given[0], mode)


def problem_of(trace: Trace, rates: Rates) -> Problem:
    """Returns the placement problem of a traced module on these ranks, of forward and backward of what was traced."""
    return _Making(trace, rates).run()


@dataclass(frozen=True)
class _Made:
    """A tensor by the operation that made it, as its `result`; of parameters and inputs `op` is -1."""

    op: int
    result: int
    tensor: Tensor


class _Making:
    def __init__(self, trace: Trace, rates: Rates) -> None:
        self._trace, self._rates, self._problem = trace, rates, Problem()
        root = trace.calls[0]
        parameters = list(root.module.parameters())
        self._flow = followed(trace, parameters, root.name == "")
        self._parameters = {id(each) for each in parameters}
        self._grads = {id(each) for each in parameters if each.requires_grad}
        for op in trace.ops:
            if op.name != "detach" and any(id(each) in self._grads for each in op.inputs):
                self._grads |= {id(each) for each in op.outputs if each.is_floating_point()}
        ways = Ways(self._flow, HANDLERS, rates.ranks)
        self._ways: list[list[Strategy]] = [ways.of(op) for op in trace.ops]
        self._uses: dict[tuple[int, int], tuple[_Made, list[tuple[int, list[int]]]]] = {}

    def run(self) -> Problem:
        for op, ways in zip(self._trace.ops, self._ways, strict=True):
            place = self._problem.add(len(ways), [each.name for each in ways])
            self._problem.alone[place] += [_seconds(self._work(op), each, self._rates) for each in ways]
        for use in self._flow.uses:
            place = next(at for at, op in enumerate(self._trace.ops) if op is use.op)
            self._problem.layers.setdefault(use.op.call.name, place)
        self._find_uses()
        for made, users in self._uses.values():
            self._connect(made, users)
        return self._problem

    def _find_uses(self) -> None:
        """Finds which operations use what another has made; what is computed in place is another tensor then."""
        current: dict[int, _Made] = {}
        for at, op in enumerate(self._trace.ops):
            places: dict[int, list[int]] = {}
            for place, each in enumerate(op.inputs):
                places.setdefault(id(each), []).append(place)
            for key, its in places.items():
                made = current.setdefault(key, _Made(-1, len(current), op.inputs[its[0]]))
                self._uses.setdefault((made.op, made.result), (made, []))[1].append((at, its))
            for result, each in enumerate(op.outputs):
                current[id(each)] = _Made(at, result, each)
        for each in tensors_in(self._trace.calls[0].result):
            last = current.get(id(each))
            if last is not None and last.op >= 0:
                self._at_the_end(last, each)

    def _at_the_end(self, last: _Made, result: Tensor) -> None:
        """The loss takes parts, but no summands."""
        given = [way.outputs[last.result] for way in self._ways[last.op]]
        self._problem.alone[last.op] += [
            self._moved(result, (lies, lies.dual), (lies.dual, lies.dual)) for lies in given
        ]

    def _connect(self, made: _Made, users: Sequence[tuple[int, list[int]]]) -> None:
        tensor, problem = made.tensor, self._problem
        wanted = [[self._wanted(way, its) for way in self._ways[at]] for at, its in users]
        weighs = id(tensor) in self._parameters and made.op < 0
        if len(users) == 1 and made.op < 0:
            at, rows = users[0][0], wanted[0]
            problem.alone[at] += [self._from_outside(tensor, places) for places in rows]
            if weighs:
                problem.weights[at] += [self._bytes_here(tensor, places[0][0]) for places in rows]
            return
        if len(users) == 1:
            given = [(way.outputs[made.result], way.outputs[made.result].dual) for way in self._ways[made.op]]
            self._pay(made.op, given, users[0][0], wanted[0], tensor)
            return
        choices = list(dict.fromkeys(place for rows in wanted for places in rows for place in places))
        if made.op >= 0:
            given = [(way.outputs[made.result], way.outputs[made.result].dual) for way in self._ways[made.op]]
            choices = list(dict.fromkeys([*choices, *given]))
        node = problem.add(len(choices))
        if made.op >= 0:
            self._pay(made.op, given, node, [[each] for each in choices], tensor)
        else:
            problem.alone[node] += [self._from_outside(tensor, [each]) for each in choices]
            if weighs:
                problem.weights[node] += [self._bytes_here(tensor, lies) for lies, _ in choices]
        for (at, _), rows in zip(users, wanted, strict=True):
            self._pay(node, choices, at, rows, tensor)

    def _wanted(self, way: Strategy, places: Sequence[int]) -> list[Place]:
        """Returns how a strategy wants a tensor that it takes at some places."""
        return list(dict.fromkeys((way.inputs[place], way.gradients[place]) for place in places))

    def _pay(self, one: int, given: Sequence[Place], other: int, wanted: Sequence[list[Place]], of: Tensor) -> None:
        costs = [[sum(self._moved(of, source, each) for each in rows) for rows in wanted] for source in given]
        if np.any(costs):
            self._problem.pay(one, other, np.array(costs))

    def _moved(self, tensor: Tensor, source: Place, target: Place) -> float:
        """Seconds to bring a tensor from one placement to another, and its gradient back."""
        nbytes = self._nbytes(tensor)
        seconds = redistributed(nbytes, source[0], target[0], self._rates)
        if id(tensor) in self._grads:
            seconds += redistributed(nbytes, target[1], source[1], self._rates)
        return seconds

    def _from_outside(self, tensor: Tensor, wanted: Sequence[Place]) -> float:
        """Seconds of what is not computed: parameters lie as they are wanted, inputs and buffers are whole."""
        if id(tensor) not in self._parameters:
            return sum(self._moved(tensor, (WHOLE, WHOLE), each) for each in wanted)
        first, nbytes, rates = wanted[0][0], self._nbytes(tensor), self._rates.at_the_end
        seconds = sum(redistributed(nbytes, first, lies, rates) for lies, _ in wanted)
        if id(tensor) in self._grads:
            seconds += sum(redistributed(nbytes, grad, first.dual, rates) for _, grad in wanted) / rates.microbatches
        return seconds

    def _bytes_here(self, tensor: Tensor, lies: Lies) -> float:
        return self._nbytes(tensor) / (self._rates.ranks if lies.what == "cut" else 1)

    def _nbytes(self, tensor: Tensor) -> int:
        return int(tensor.numel() * (self._rates.itemsize if tensor.is_floating_point() else tensor.itemsize))

    def _work(self, op: Op) -> tuple[float, float, float, bool]:
        """Operations of products and of attention, bytes of anything else, and whether backward runs through it."""
        again = any(id(each) in self._grads for each in op.outputs)
        if op.name in VIEWS or not op.outputs:
            return 0.0, 0.0, 0.0, False
        result = float(op.outputs[0].numel())
        if op.name == "scaled_dot_product_attention":
            given = op.bound()
            q, k = given["query"], given["key"]
            causal = 2 if given.get("is_causal") else 1
            return 0.0, 4.0 * q.numel() * k.shape[-2] / causal, 0.0, again
        use = next((each for each in self._flow.uses if each.op is op), None)
        if use is not None and not use.lookup:
            return 2.0 * result * use.weight.numel() / size(use.rows), 0.0, 0.0, again
        if op.name.startswith("conv"):
            return 2.0 * result * op.inputs[1].numel() / op.outputs[0].shape[1], 0.0, 0.0, again
        if op.name in ("matmul", "bmm", "mm", "baddbmm", "addmm"):
            return 2.0 * result * op.inputs[-2].shape[-1], 0.0, 0.0, again
        given_tensors: Iterable[Tensor] = op.outputs if op.name == "embedding" else (*op.inputs, *op.outputs)
        return 0.0, 0.0, float(sum(map(self._nbytes, given_tensors))), again


def _seconds(work: tuple[float, float, float, bool], way: Strategy, rates: Rates) -> float:
    """Seconds of forward and backward of an operation, of which a rank does its share."""
    share = 1 / rates.ranks if way.is_shared else 1.0
    products, attention, touched = (share * each for each in work[:3])
    seconds = rates.computed(products, attention, touched)
    if work[3]:
        seconds += rates.computed(2 * products, ATTENTION_BACKWARD * attention, 2 * touched)
    return seconds
