"""The placement problem with backward free to be cut otherwise than forward: what tying the two loses, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from shoal.parallel.tensor.graph.strategies import WHOLE, Lies, Strategy
from shoal.parallel.tensor.graph.trace import Op, Trace
from shoal.planner.computing import ATTENTION_BACKWARD
from shoal.planner.operators import _Made, _Making
from shoal.planner.placements import Problem, Rates, redistributed


def untied(trace: Trace, rates: Rates) -> Problem:
    """The problem of a traced module in which each operation, and each tensor that several use, has one variable for
    forward and another for backward. What an operation reads again in backward is brought to how that wants it."""
    return _Untied(trace, rates).run()


class _Untied(_Making):
    """Variables by place: of operation i forward is 2 i, and backward 2 i + 1."""

    def run(self) -> Problem:
        problem, rates = self._problem, self._rates
        for at, (op, ways) in enumerate(zip(self._trace.ops, self._ways, strict=True)):
            products, attention, touched, again = self._work(op)
            for times in ((1.0, 1.0, 1.0), (2.0, ATTENTION_BACKWARD, 2.0)):
                place = problem.add(len(ways))
                for choice, way in enumerate(ways):
                    share = 1 / rates.ranks if way.is_shared else 1.0
                    work = (share * each * by for each, by in zip((products, attention, touched), times, strict=True))
                    problem.alone[place][choice] = rates.computed(*work) if times[0] == 1 or again else 0.0
            if again:
                self._between(at, partial(self._read_again, op))
        self._find_uses()
        for made, users in self._uses.values():
            self._connect(made, users)
        return problem

    def _between(self, at: int, cost: Callable[[Strategy, Strategy], float]) -> None:
        """Pays what an operation's forward and backward need of each other."""
        ways = self._ways[at]
        self._problem.pay(2 * at, 2 * at + 1, np.array([[cost(one, other) for other in ways] for one in ways]))

    def _read_again(self, op: Op, forward: Strategy, backward: Strategy) -> float:
        places = zip(op.inputs, forward.inputs, backward.inputs, strict=True)
        return sum(redistributed(self._nbytes(each), one, other, self._rates) for each, one, other in places)

    def _at_the_end(self, last: _Made, result: Tensor) -> None:
        """The loss takes parts, but no summands; backward begins with the gradient of what it took."""
        nbytes, rates = self._nbytes(result), self._rates
        lies = [way.outputs[last.result] for way in self._ways[last.op]]
        self._problem.alone[2 * last.op] += [redistributed(nbytes, own, own.dual, rates) for own in lies]
        costs = [[redistributed(nbytes, one.dual, other.dual, rates) for other in lies] for one in lies]
        self._problem.pay(2 * last.op, 2 * last.op + 1, np.array(costs))

    def _connect(self, made: _Made, users: Sequence[tuple[int, list[int]]]) -> None:
        tensor, problem, rates, nbytes = made.tensor, self._problem, self._rates, self._nbytes(made.tensor)
        has_grad, is_weight = id(tensor) in self._grads, id(tensor) in self._parameters and made.op < 0
        taken = [[_distinct(way.inputs[place] for place in its) for way in self._ways[at]] for at, its in users]
        given = [[_distinct(way.gradients[place] for place in its) for way in self._ways[at]] for at, its in users]
        own = [] if made.op < 0 else [way.outputs[made.result] for way in self._ways[made.op]]
        ways = _distinct([*(lies for rows in taken for row in rows for lies in row), *own])
        back = _distinct([*(lies for rows in given for row in rows for lies in row), *(lies.dual for lies in own)])
        there, here = problem.add(len(ways)), problem.add(len(back))
        self._flow_between(there, ways, [2 * at for at, _ in users], taken, tensor, False)
        if has_grad:
            self._flow_between(here, back, [2 * at + 1 for at, _ in users], given, tensor, True)
        if made.op >= 0:
            self._flow_between(there, ways, [2 * made.op], [[[lies] for lies in own]], tensor, True)
            if has_grad:
                self._flow_between(here, back, [2 * made.op + 1], [[[lies.dual] for lies in own]], tensor, False)
        elif not is_weight:
            problem.alone[there] += [redistributed(nbytes, WHOLE, lies, rates) for lies in ways]
        elif has_grad:  # gradients are summed to how the weight lies
            costs = [[redistributed(nbytes, grad, lies.dual, rates.at_the_end) for grad in back] for lies in ways]
            problem.pay(there, here, np.array(costs) / rates.microbatches)

    def _flow_between(
        self, node: int, lies: Sequence[Lies], places: list[int], wanted: list[list[list[Lies]]], of: Tensor, into: bool
    ) -> None:
        """Pays for a tensor between a node and operations: from the node to them, or from them `into` the node."""
        nbytes, rates = self._nbytes(of), self._rates
        for place, rows in zip(places, wanted, strict=True):
            costs = [
                [
                    sum(redistributed(nbytes, *((other, one) if into else (one, other)), rates) for other in row)
                    for row in rows
                ]
                for one in lies
            ]
            self._problem.pay(node, place, np.array(costs))


def _distinct(lies: Iterable[Lies]) -> list[Lies]:
    return list(dict.fromkeys(lies))
