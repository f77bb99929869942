"""Backward in two halves: the gradients of a stage's inputs, which the stage before waits for, and those of its weights, for which nobody waits (Qi et al. 2023, arXiv 2401.10241).

The first half computes no weight's gradient: autograd skips what nothing asks for. On the way it notes the gradients at the nodes where the ways to inputs and to weights part; the second half
starts there. A node that cannot skip a half, an autograd.Function (compiled blocks, products that communicate), runs once, in the first one.
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

from shoal.pipeline.arrived import Box


@dataclass(frozen=True)
class Start:
    """Where a way to `weights` begins: edges into one node, and what comes there; `beside`: which of the ways out of it lead to no input."""

    edges: list[GradientEdge]
    grads: list[Tensor]
    weights: list[Tensor]
    beside: tuple[int, ...]


@dataclass
class _Parting:
    """The same before anything has come: `numbers` of the edges into `node`."""

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
    """The gradients of `inputs`, and where the second half starts. The graph stays for it."""
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
            starts.append(Start([edge for edge, _ in there], [grad for _, grad in there], list(each.weights), each.beside))
    return of_inputs, starts


def weight_half(starts: Sequence[Start]) -> None:
    """Adds what comes from `starts` to the gradients of their weights, of each once."""
    sums: dict[Tensor, Tensor] = {}
    uses = Counter(weight for start in starts for weight in start.weights)
    for start in starts:  # each alone: a backward from several would go from one through the inputs to the next
        if any(uses[weight] > 1 for weight in start.weights):
            for weight, grad in _step(start):
                sums[weight] = sums[weight] + grad if weight in sums else grad
        elif _variable(start.edges[0].node) is not None:
            torch.autograd.backward(start.weights, start.grads)
        else:
            torch.autograd.backward(start.edges, start.grads, inputs=start.weights, retain_graph=True)
    if sums:
        torch.autograd.backward(list(sums), list(sums.values()))


def _of_weights(edges: Sequence[GradientEdge], grads: Sequence[Tensor], weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    if _variable(edges[0].node) is not None:
        return [(weights[0], grads[0])]
    with _without_hooks(weights):
        found = torch.autograd.grad(edges, weights, grads, retain_graph=True, allow_unused=True)
    return [(weight, grad) for weight, grad in zip(weights, found, strict=True) if grad is not None]


@contextmanager
def _without_hooks(weights: Sequence[Tensor]) -> Iterator[None]:
    """Those of users see the sum of a weight's gradients, once: where it is added."""
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
    """The same of a node from which a weight can be reached through the inputs too, where it is used once more: one step by hand, away from them."""
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
            shape = child._input_metadata[number].shape  # which autograd brings it to: it may have been broadcast
            found += _of_weights([GradientEdge(child, number)], [given[place].sum_to_size(shape)], ends)
    return found


def _partings(roots: Sequence[Tensor], inputs: Sequence[Node]) -> list[_Parting]:
    """Nodes that lead to an input and to weights beside it, with these and the ways to them; of nodes that do both in one, and of `roots` that lead to no input, where the latter begin.

    What comes to such a beginning in the first half has in it what has come from others above it. A weight below it and below another parting would get that twice: it is one itself, and
    has all of its gradient in the first half."""
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
    """The leaves to which nodes that lead to no input lead."""
    order, _ = _graph([(node, 0) for node in ends])
    return {leaf: None for node in order if (leaf := _variable(node)) is not None}


def _variable(node: Node) -> Tensor | None:
    """The leaf whose gradient a node accumulates, if it is such a node."""
    return getattr(node, "variable", None)


def _does_both(node: Node) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _graph(roots: Sequence[tuple[Node, int]]) -> tuple[list[Node], dict[Node, set[int]]]:
    """All nodes, children before parents, and by which of their numbers others, or whoever starts, come to each."""
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
