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


def input_half(
    roots: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Box]
) -> tuple[list[Tensor | None], list[Start]]:
    """The gradients of `inputs`, and where the second half starts. The graph stays for it."""
    partings = _partings(roots, [box.edge.node for box in inputs])
    edges = [edge for each, _, _ in partings for edge in each]
    found = torch.autograd.grad(
        list(roots), [*(box.edge for box in inputs), *edges], list(grads), retain_graph=True, allow_unused=True
    )
    of_inputs: list[Tensor | None] = list(found[: len(inputs)])
    rest = iter(found[len(inputs) :])
    starts = []
    for each, weights, beside in partings:
        there = [(edge, grad) for edge, grad in zip(each, rest, strict=False) if grad is not None]
        if there:
            starts.append(Start([edge for edge, _ in there], [grad for _, grad in there], weights, beside))
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
    """Those of users see the sum of a weight's gradients, once."""
    hooks = [weight._backward_hooks for weight in weights]
    try:
        for weight in weights:
            weight._backward_hooks = None
        yield
    finally:
        for weight, own in zip(weights, hooks, strict=True):
            weight._backward_hooks = own


def _step(start: Start) -> list[tuple[Tensor, Tensor]]:
    """The same of a node from which a weight can be reached through the inputs too, where it is used once more: one step by hand, away from them."""
    node = start.edges[0].node
    if _variable(node) is not None or not start.beside:
        return _of_weights(start.edges, start.grads, start.weights)
    came = {edge.output_nr: grad for edge, grad in zip(start.edges, start.grads, strict=True)}
    given: Any = node(*(came.get(number) for number in range(max(came) + 1)))  # type: ignore[operator]
    given = given if isinstance(given, tuple) else (given,)
    found = []
    for place in start.beside:
        child, number = node.next_functions[place]
        if child is not None and given[place] is not None:
            shape = child._input_metadata[number].shape  # which autograd brings it to: it may have been broadcast
            found += _of_weights([GradientEdge(child, number)], [given[place].sum_to_size(shape)], list(_weights([child])))
    return found


def _partings(roots: Sequence[Tensor], inputs: Sequence[Node]) -> list[tuple[list[GradientEdge], list[Tensor], tuple[int, ...]]]:
    """Edges into nodes that lead to an input and to weights beside it, with these and the ways to them; of nodes that do both in one, the edges out of them to the latter."""
    order, parents = _graph([(root.grad_fn, root.output_nr) for root in roots if root.grad_fn is not None])
    leading = set(inputs)
    for node in order:  # children before parents
        if any(child in leading for child, _ in node.next_functions if child is not None):
            leading.add(node)
    found: dict[Node, tuple[set[int], dict[Tensor, None], tuple[int, ...]]] = {}

    def add(node: Node, numbers: set[int], ends: Sequence[Node], beside: Sequence[int] = ()) -> None:
        if weights := _weights(ends):
            found.setdefault(node, (numbers, {}, tuple(beside)))[1].update(weights)

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
            add(root.grad_fn, {root.output_nr}, [root.grad_fn])
    return [
        ([GradientEdge(node, number) for number in sorted(numbers)], list(weights), beside)
        for node, (numbers, weights, beside) in found.items()
    ]


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
