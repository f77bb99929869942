"""Backward in two halves: the gradients of a stage's inputs, for which the stage before waits, and those of its
weights, for which no other rank waits (Qi et al. 2023, arXiv 2401.10241).

The first half computes no weight's gradient: autograd skips what nobody asks for. On the way it records the gradients
at the nodes where the paths to inputs and to weights part; the second half starts there. A node that cannot skip a
half, an autograd.Function (compiled blocks, products that communicate), runs once, in the first half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.checkpoint import GraphExecGroup

from shoal.pipeline.arrived import Box


@dataclass(frozen=True)
class Start:
    """A node where the second half starts.

    edges: into the node
    grads: the gradients that arrived at them in the first half
    weights: the leaves that the second half reaches from here
    beside: indices of the node's outgoing edges that lead to no input
    """

    edges: list[GradientEdge]
    grads: list[Tensor]
    weights: list[Tensor]
    beside: tuple[int, ...]


@dataclass
class _Parting:
    """A node where paths to inputs and to weights part, before any gradient has arrived.

    node: of the graph
    numbers: input numbers of the node that edges enter
    weights: the leaves that the second half reaches from here
    beside: indices of the node's outgoing edges that lead to no input
    """

    node: Node
    numbers: set[int]
    weights: dict[Tensor, None]
    beside: tuple[int, ...]

    @property
    def edges(self) -> list[GradientEdge]:
        return [GradientEdge(self.node, number) for number in sorted(self.numbers)]


def input_half(
    roots: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Box]
) -> tuple[list[Tensor | None], list[Start]]:
    """Runs the first half: returns the gradients of `inputs`, and the starts of the second half.

    roots: tensors where backward starts
    grads: their gradients; None: 1
    inputs: the received values

    The graph is retained for the second half.
    """
    partings = _partings(roots, [box.edge.node for box in inputs])
    ends = [weight for each in partings if (weight := _variable(each.node)) is not None]
    with _without_hooks(ends):
        found = torch.autograd.grad(
            list(roots),
            [*(box.edge for box in inputs), *(edge for each in partings for edge in each.edges)],
            list(grads),
            retain_graph=True,
            allow_unused=True,
        )
    of_inputs: list[Tensor | None] = list(found[: len(inputs)])
    rest = iter(found[len(inputs) :])
    starts = []
    for each in partings:
        there = [(edge, grad) for edge, grad in zip(each.edges, rest, strict=False) if grad is not None]
        if there:
            starts.append(
                Start([edge for edge, _ in there], [grad for _, grad in there], list(each.weights), each.beside)
            )
    return of_inputs, starts


def weight_half(starts: Sequence[Start]) -> None:
    """Runs the second half: adds the gradients from `starts` to their weights, once per weight, from the last start to
    the first, as a whole backward goes: in that order chunks of gradients are cut.

    What `plan.recompute` computes again is computed once for all starts, but for those whose weights have several:
    these may go through a node twice, which torch refuses in one group.
    """
    sums: dict[Tensor, Tensor] = {}
    uses = Counter(weight for start in starts for weight in start.weights)
    together = GraphExecGroup()
    for start in reversed(starts):  # one by one: a joint backward would pass through the inputs to the next
        if any(uses[weight] > 1 for weight in start.weights):
            for weight, grad in _step(start):
                sums[weight] = sums[weight] + grad if weight in sums else grad
        elif _variable(start.edges[0].node) is not None:
            torch.autograd.backward(start.weights, start.grads)
        else:
            with together:
                torch.autograd.backward(start.edges, start.grads, inputs=start.weights, retain_graph=True)
    if sums:
        torch.autograd.backward(list(sums), list(sums.values()))


def _of_weights(
    edges: Sequence[GradientEdge], grads: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Returns (weight, gradient) for the weights that the gradients at `edges`, into one node, reach."""
    if _variable(edges[0].node) is not None:
        return [(weights[0], grads[0])]
    with _without_hooks(weights):
        found = torch.autograd.grad(edges, weights, grads, retain_graph=True, allow_unused=True)
    return [(weight, grad) for weight, grad in zip(weights, found, strict=True) if grad is not None]


@contextmanager
def _without_hooks(weights: Sequence[Tensor]) -> Iterator[None]:
    """Switches off the users' hooks on `weights` in the context: they must see the sum of a weight's gradients,
    once."""
    hooked = [(weight, weight._backward_hooks) for weight in weights if weight._backward_hooks]
    try:
        for weight, _ in hooked:
            weight._backward_hooks = None
        yield
    finally:
        for weight, hooks in hooked:
            weight._backward_hooks = hooks


@torch.no_grad()
def _step(start: Start) -> list[tuple[Tensor, Tensor]]:
    """Returns (weight, gradient) for the weights of one start, some of which have several starts.

    From its node such a weight may also be reached through the inputs. So the node is run by hand and only the outgoing
    edges `beside` are followed.
    """
    node = start.edges[0].node
    if _variable(node) is not None or not start.beside:
        return _of_weights(start.edges, start.grads, start.weights)
    came = {edge.output_nr: grad for edge, grad in zip(start.edges, start.grads, strict=True)}
    given: Any = node(*(came.get(number) for number in range(len(node._input_metadata))))  # type: ignore[operator]
    given = given if isinstance(given, tuple) else (given,)
    found, own = [], set(start.weights)
    for place in start.beside:
        child, number = node.next_functions[place]
        if child is None or given[place] is None:
            continue
        if ends := [weight for weight in _weights([child]) if weight in own]:
            shape = child._input_metadata[number].shape  # the gradient of a broadcast operand is summed to it
            found += _of_weights([GradientEdge(child, number)], [given[place].sum_to_size(shape)], ends)
    return found


def _partings(roots: Sequence[Tensor], inputs: Sequence[Node]) -> list[_Parting]:
    """Returns the nodes where paths to `inputs` and to weights part, with these weights.

    An autograd.Function computes both in one: there the second half starts at its children. It also starts at `roots`
    that lead to no input.

    The gradient that arrives at such a child or root in the first half already includes what comes from other partings
    above it. A weight below it and below another parting would get that twice; such a weight becomes a start itself,
    with its whole gradient from the first half.
    """
    order, parents = _graph([(root.grad_fn, root.output_nr) for root in roots if root.grad_fn is not None])
    leading = set(inputs)
    for node in order:  # children before parents
        if any(child in leading for child, _ in node.next_functions if child is not None):
            leading.add(node)
    found: dict[Node, _Parting] = {}

    def add(node: Node, numbers: set[int], ends: Sequence[Node], beside: Sequence[int] = ()) -> None:
        if weights := _weights(ends):
            found.setdefault(node, _Parting(node, numbers, {}, tuple(beside))).weights.update(weights)

    for node in order:
        if node in leading and node not in inputs:
            ways = [
                (place, child)
                for place, (child, _) in enumerate(node.next_functions)
                if child is not None and child not in leading
            ]
            if not _does_both(node):
                add(node, parents[node], [child for _, child in ways], [place for place, _ in ways])
            else:
                for _, child in ways:
                    add(child, parents[child], [child])
    for root in roots:
        if root.grad_fn is not None and root.grad_fn not in leading:
            add(root.grad_fn, parents[root.grad_fn], [root.grad_fn])

    uses = Counter(weight for each in found.values() for weight in each.weights)
    beginnings = [each for each in found.values() if each.node not in leading]
    whole = {weight for each in beginnings for weight in each.weights if uses[weight] > 1}
    if whole:
        for each in found.values():
            each.weights = {weight: None for weight in each.weights if weight not in whole}
        found = {node: each for node, each in found.items() if each.weights}
        for node in order:
            weight = _variable(node)
            if weight is not None and weight in whole:
                found[node] = _Parting(node, parents[node], {weight: None}, ())
    return list(found.values())


def _weights(ends: Sequence[Node]) -> dict[Tensor, None]:
    """Returns the leaves below nodes that lead to no input."""
    order, _ = _graph([(node, 0) for node in ends])
    return {leaf: None for node in order if (leaf := _variable(node)) is not None}


def _variable(node: Node) -> Tensor | None:
    """Returns the leaf whose gradient `node` accumulates, if it is an AccumulateGrad node."""
    return getattr(node, "variable", None)


def _does_both(node: Node) -> bool:
    """True for the node of an autograd.Function, which computes all its gradients at once."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _graph(roots: Sequence[tuple[Node, int]]) -> tuple[list[Node], dict[Node, set[int]]]:
    """Returns all nodes below `roots`, children before parents, and the input numbers at which each is reached."""
    order: list[Node] = []
    parents: dict[Node, set[int]] = {}
    seen: set[Node] = set()
    pending: list[tuple[Node, bool]] = []
    for root, number in roots:
        parents.setdefault(root, set()).add(number)
        pending.append((root, False))
    while pending:
        node, done = pending.pop()
        if done:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        pending.append((node, True))
        for child, number in node.next_functions:
            if child is not None:
                parents.setdefault(child, set()).add(number)
                pending.append((child, False))
    return order, parents
