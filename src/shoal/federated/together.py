"""Local training of several clients at once: their weights are rows of one tensor, and each operation is done for all.

One step of one client (forward, backward, clipping) is written with torch.func, spread over clients by vmap, and traced
once to the operations that it comes to; each step then runs those alone. For a small model that takes a tenth of the
time of one client after the other, since torch takes about as long to start an operation for one as for 32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.fx import Graph, GraphModule, Node

from shoal.federated.flat import Flat
from shoal.federated.recipe import LocalOptimizer, Recipe, Trained, is_elementwise, limited, mean_of, norm_of
from shoal.module.functional import call_with
from shoal.module.random import host_draws, host_state
from shoal.module.record import storage_of
from shoal.training.loss import call_loss

MOST = 32
"""Clients that train at once, at most."""
MOST_BYTES = 64 * 2**20
"""Bytes of their weights."""


class WithLoss(nn.Module):
    """A module whose forward gives the loss of a microbatch."""

    def __init__(self, module: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._loss = module, loss

    def forward(self, mb: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the sum, the count, and auxiliary losses, which are means."""
        sums = call_loss(self._loss, self.module, mb)
        return sums.total, sums.count, sum(sums.aux.values(), torch.zeros_like(sums.total))


class Together:
    """Trains up to `size` clients at once, each on its own rows of `tensors`.

    mu: see `Strategy`.
    """

    def __init__(
        self, module: nn.Module, flat: Flat, recipe: Recipe, tensors: Mapping[str, Tensor], size: int, mu: float
    ) -> None:
        self.size, self._flat, self._recipe, self._tensors = size, flat, recipe, tensors
        module.train()
        device = next(module.parameters()).device
        self._stack = torch.zeros(size, flat.size, dtype=flat.dtype, device=device)
        self._start = torch.zeros_like(self._stack)
        named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self._weights = flat.views(self._stack)[: len(named)]
        self._optimizer = LocalOptimizer(recipe, named, self._weights)
        self._mu, self._anchors = mu, flat.views(self._start)[: len(named)]
        whole = WithLoss(module, recipe.loss)
        self._step = self._traced(whole, ["module." + name for name, _ in named])
        first = {key: values[: recipe.batch] for key, values in tensors.items()}
        self._reached = reached(whole, first, [each for _, each in named])

    def _traced(self, module: nn.Module, names: Sequence[str]) -> Callable[..., Any]:
        """Returns a step of all clients as the operations that it comes to."""
        from torch.fx.experimental.proxy_tensor import make_fx  # which takes a second to import

        def objective(parameters: list[Tensor], mb: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            total, count, auxiliary = call_with(module, dict(zip(names, parameters, strict=True)), partial(module, mb))
            return mean_of(total, count) + auxiliary, (total, count.to(total.dtype))

        count_of, keys = len(names), list(self._tensors)

        def one(*given: Tensor) -> tuple[Tensor, ...]:
            parameters, anchors = list(given[:count_of]), given[count_of : 2 * count_of]
            mb = dict(zip(keys, given[2 * count_of :], strict=True))
            gradients, (_, (total, count)) = grad_and_value(objective, has_aux=True)(parameters, mb)
            if self._mu:
                gradients = [
                    gradient + self._mu * (parameter - anchor)
                    for gradient, parameter, anchor in zip(gradients, parameters, anchors, strict=True)
                ]
            if self._recipe.clip:
                factor = limited(norm_of(gradients), self._recipe.clip)
                gradients = [gradient * factor for gradient in gradients]
            return (*gradients, total, count)

        rows = torch.zeros(self.size, self._recipe.batch, dtype=torch.int64)
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        try:
            with host_draws(0):
                undrawn = host_state()
                graph = make_fx(vmap(one, randomness="different"))(*self._weights, *self._anchors, *self._batch(rows))
                draws = host_state() is not undrawn
        finally:
            changed = [name for name, buffer in module.named_buffers() if not torch.equal(buffer, before[name])]
            for name in changed:
                module.get_buffer(name).copy_(before[name])
        if changed:
            raise NotImplementedError(f"its forward changes {', '.join(changed)}")
        trained = {name: each for name, each in module.named_parameters() if name in names}
        if past := constant_of(graph, trained):
            name = past.removeprefix("module.")
            raise NotImplementedError(f"its forward finds {name} elsewhere than in its module, which a trace holds")
        if draws:
            raise NotImplementedError("its forward draws from numpy or Python, which a trace would hold as constants")
        without_repeats(graph.graph)
        graph.recompile()
        return graph

    def _batch(self, rows: Tensor) -> list[Tensor]:
        flat = rows.flatten()
        return [values.index_select(0, flat).view(*rows.shape, *values.shape[1:]) for values in self._tensors.values()]

    @torch.no_grad()
    def train(self, starts: Tensor, rows: Tensor, steps: Sequence[int], factor: float) -> Trained:
        """Trains `n` <= size clients from `starts` ([size of the model] for all, or [n, ...]).

        rows: [n, most steps, batch]. steps: of each client, largest first. factor: of the learning rate.
        """
        n, most = rows.shape[0], steps[0]
        if n < self.size:  # the trace is for `size`: the last client trains again, and is forgotten
            rows = torch.cat([rows, rows[-1:].expand(self.size - n, -1, -1)])
        self._start[:n] = starts
        self._start[n:] = self._start[n - 1]
        self._stack.copy_(self._start)
        by_step = rows.transpose(0, 1).contiguous().to(self._stack.device)
        self._optimizer.begin(factor)
        ended: dict[int, Tensor] = {}
        losses = torch.zeros(self.size, dtype=torch.float64, device=self._stack.device)
        counts = torch.zeros_like(losses)
        working = n
        for step in range(most):
            while steps[working - 1] <= step:
                working -= 1
                ended[working] = self._stack[working].clone()
            *gradients, total, count = self._step(*self._weights, *self._anchors, *self._batch(by_step[step]))
            pairs = zip(gradients, self._reached, strict=True)
            self._optimizer.step([each if there else None for each, there in pairs])
            losses[:working] += total[:working]
            counts[:working] += count[:working]
        for client, weights in ended.items():
            self._stack[client] = weights
        return Trained(self._start[:n] - self._stack[:n], losses[:n], counts[:n])


def reached(module: nn.Module, mb: Mapping[str, Tensor], parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Returns which parameters a loss has gradients of."""
    total, _, auxiliary = module(mb)
    gradients = torch.autograd.grad(total + auxiliary, parameters, allow_unused=True)
    return [gradient is not None for gradient in gradients]


def constant_of(graph: GraphModule, trained: Mapping[str, nn.Parameter]) -> str | None:
    """Returns which of the parameters `trained` a traced step has as a constant, such as a view of it: a forward has
    that from a list, or from a closure, where no client's own is put."""
    held = [getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    places = {storage_of(each) for each in held if isinstance(each, Tensor) and each.layout == torch.strided}
    return next((name for name, each in trained.items() if storage_of(each) in places), None)


def without_repeats(graph: Graph) -> None:
    """Drops what a traced step computes twice, or for nothing; a trace of a derivative has much of it. What is written
    in place, as some derivatives do, is another value before and after, and stays."""
    seen: dict[object, Node] = {}
    is_written = _written(graph)
    for node in list(graph.nodes):
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
            continue
        if any(map(is_written, (node, *node.all_input_nodes))):
            continue
        if _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        key = (target, repr(node.args), repr(sorted(node.kwargs.items())))  # the repr of a node is its name
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node
    graph.eliminate_dead_code()


def _written(graph: Graph) -> Callable[[Node], bool]:
    """Returns whether the memory of a node's value is written to after it was made, by any node of the graph."""
    owner: dict[Node, Node] = {}  # the node that has made the memory
    written = set[Node]()
    for node in graph.nodes:
        owner[node], inputs = node, node.all_input_nodes
        if node.op != "call_function" or not inputs:
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None or node.target is torch.ops.aten._unsafe_view.default:
            owner[node] = owner[inputs[0]]  # one of several results
        elif any(each.alias_info is not None for each in schema.returns):
            owner[node] = owner[inputs[0]]
        if schema is not None and schema.is_mutable:
            written |= {owner[each] for each in inputs}  # also what it only reads, which costs little
    return lambda node: owner[node] in written


def _changes_nothing(node: Node) -> bool:
    """Returns whether a node only looks at its input as it is, or multiplies by 1."""
    aten = torch.ops.aten
    if node.target is aten.mul.Scalar:
        return bool(node.args[1] == 1) and _form(node) == _form(node.args[0])
    if node.target not in (aten.expand.default, aten.view.default, aten._unsafe_view.default):
        return False
    return bool(_form(node) == _form(node.args[0]))


def _form(node: Any) -> tuple[Any, ...]:
    meta = node.meta.get("tensor_meta")
    return (node,) if meta is None else (meta.shape, meta.stride, meta.dtype)


@contextmanager
def spread_or_refused() -> Iterator[None]:
    """Makes an error of torch's warning that an operation would be done for one client, or sample, after the other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="There is a performance drop")
        yield


def together_or_why(
    module: nn.Module, flat: Flat, recipe: Recipe, tensors: Mapping[str, Tensor], asked: int, mu: float
) -> Together | str:
    """Returns the training of `asked` clients a round at once, in groups of one size; or why it cannot be."""
    most = min(MOST, MOST_BYTES // (4 * flat.size))
    if asked == 1 or most < 2:
        return "one client a round" if asked == 1 else f"a model of {flat.size:,} weights is large enough alone"
    if why := is_elementwise(recipe):
        return why
    groups = -(-asked // most)
    try:
        with spread_or_refused():
            return Together(module, flat, recipe, tensors, -(-asked // groups), mu)
    except Exception as error:  # a model may do anything that vmap cannot spread or a trace cannot hold
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
