"""A module at its owner: forwards and backwards for its clients, and the gradients of its parameters by context."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.server.remote import contexts
from shoal.server.remote.contexts import Context, Passing
from shoal.server.remote.draws import ForwardDraws
from shoal.server.remote.graphs import Graph, Graphs
from shoal.server.remote.messages import Backward, Forward
from shoal.server.remote.module import ANCHOR
from shoal.server.remote.payload import Payload, taken_apart

_MODE_SECONDS = 60.0


class Client:
    """What the owner keeps for one remote module of another process.

    sessions: how many are open; with the last one all of this goes.
    """

    def __init__(self, most_graphs: int) -> None:
        self.graphs = Graphs(most_graphs)
        self.sessions = 0


Gradients = dict[str, Tensor]


@dataclass
class Kept:
    """The gradients of a context by the parameters' names, and the clients that have used it.

    open: what the newest backward pass of each thread has given so far, which is not in `gradients` yet.
    """

    context: Context
    gradients: Gradients = field(default_factory=dict)
    open: dict[str, tuple[int, Gradients]] = field(default_factory=dict)
    clients: set[Client] = field(default_factory=set)

    def add(self, passing: Passing, found: Mapping[str, Tensor | None]) -> None:
        """Adds what a part of a backward pass has given."""
        number, sums = self.open.get(passing.thread, (passing.number, {}))
        if number != passing.number:
            self._close(passing.thread)
            sums = {}
        _add(sums, found)
        self.open[passing.thread] = passing.number, sums

    def total(self) -> Gradients:
        """Returns the gradients of all passes, which have ended."""
        for thread in list(self.open):
            self._close(thread)
        return dict(self.gradients)

    def _close(self, thread: str) -> None:
        _, sums = self.open.pop(thread)
        _add(self.gradients, sums)


def _add(total: Gradients, found: Mapping[str, Tensor | None]) -> None:
    for name, gradient in found.items():
        if gradient is not None:  # not in place: backward may give one tensor for two parameters, or a view
            before = total.get(name)
            total[name] = gradient if before is None else before + gradient


class Exposed:
    """`module` as clients call it, several at once.

    seed: of what forwards draw; -1 for torch's generator.
    """

    def __init__(self, module: nn.Module, seed: int) -> None:
        self.module, self._seed = module, seed
        first = next(iter([*module.parameters(), *module.buffers()]), torch.empty(0))
        self._device = first.device
        self._guard = threading.Lock()
        self._kept: dict[str, Kept] = {}
        self._turn = threading.Condition()
        self._running = 0

    @property
    def contexts(self) -> list[str]:
        """The contexts in which gradients may be kept."""
        with self._guard:
            return list(self._kept)

    def forward(self, client: Client, asked: Forward, sent: Payload) -> Payload:
        """Returns what the module returns, and keeps the graph if a gradient is needed."""
        if not asked.grad:
            with torch.no_grad():
                return taken_apart(self._run(client, asked, sent, ForwardDraws(self._seed, asked.number)), False)
        client.graphs.begin(asked.number)
        try:
            for tensor, needs in zip(sent.tensors, sent.needing, strict=True):
                tensor.requires_grad_(needs)
            draws = ForwardDraws(self._seed, asked.number)
            with torch.enable_grad():
                found = taken_apart(self._run(client, asked, sent, draws), grad=True)
                outputs = [tensor.cpu() for tensor, needs in zip(found.tensors, found.needing, strict=True) if needs]
            inputs = [tensor if tensor.requires_grad else None for tensor in sent.tensors]
        except BaseException:
            client.graphs.release(asked.number)
            raise
        if outputs:
            client.graphs.put(asked.number, Graph(asked.context, outputs, inputs, draws))
        else:
            client.graphs.release(asked.number)
        return found

    def backward(self, client: Client, asked: Backward, grads: list[Tensor | None]) -> Payload:
        """Returns the gradient of each tensor of the forward's arguments, or None; adds those of the parameters to the
        forward's context."""
        graph = client.graphs.get(asked.number, asked.keep)
        if not isinstance(grads, list) or len(grads) != len(graph.outputs):
            raise UserError(f"gradients of {len(graph.outputs)} outputs were to come")
        given = [(out, grad) for out, grad in zip(graph.outputs, grads, strict=True) if grad is not None]
        names, wanted = [], [tensor for tensor in graph.inputs if tensor is not None]
        first = len(wanted)
        if asked.parameters:
            for name, parameter in self.module.named_parameters():
                if parameter.requires_grad:
                    names.append(name)
                    wanted.append(parameter)
            wanted.append(ANCHOR)  # of remote modules in this one
        passing = Passing(asked.thread, asked.passing)
        found: list[Tensor | None] = [None] * len(wanted)
        if given and wanted:
            with contexts.entered(self._entered(client, graph.context), passing), graph.draws.backward():
                roots, by = zip(*given, strict=True)
                found = list(torch.autograd.grad(roots, wanted, by, retain_graph=asked.keep, allow_unused=True))
        with self._guard:
            self._kept_for(client, graph.context).add(passing, dict(zip(names, found[first:], strict=False)))
        of_inputs = iter(found[:first])
        return taken_apart([None if each is None else _dense(next(of_inputs)) for each in graph.inputs], grad=False)

    def drop(self, context: str) -> None:
        """Drops the gradients of a context, here and at owners below."""
        with self._guard:
            kept = self._kept.pop(context, None)
        for each in list(kept.context.used) if kept else ():
            each.forget(context)

    def leave(self, client: Client) -> None:
        """Drops the gradients that only this client has asked for."""
        with self._guard:
            for kept in self._kept.values():
                kept.clients.discard(client)
            alone = [name for name, kept in self._kept.items() if not kept.clients]
        for name in alone:
            self.drop(name)

    def gradients(self, context: str) -> dict[str, Tensor]:
        """Returns the gradients of a context by the parameters' names."""
        with self._guard:
            kept = self._kept.get(context)
            return kept.total() if kept else {}

    def _run(self, client: Client, asked: Forward, sent: Payload, draws: ForwardDraws) -> Any:
        versions = [tensor._version for tensor in sent.tensors]
        given = sent.value([tensor.to(self._device) for tensor in sent.tensors])
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict)):
            raise UserError("no arguments of a module")
        args, kwargs = given
        with contexts.entered(self._entered(client, asked.context)), self._mode(asked.training), draws.forward():
            found = self.module(*args, **kwargs)
        if versions != [tensor._version for tensor in sent.tensors]:
            raise UserError(
                f"{type(self.module).__name__} changes its input in place, which the caller's tensor would not show: "
                "clone it in its forward"
            )
        return found

    def _entered(self, client: Client, name: str) -> Context:
        with self._guard:
            return self._kept_for(client, name).context

    def _kept_for(self, client: Client, name: str) -> Kept:
        kept = self._kept.setdefault(name, Kept(Context(name)))
        kept.clients.add(client)
        return kept

    @contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        """Has the module in this mode; waits while forwards run in the other one."""
        with self._turn:
            if not self._turn.wait_for(lambda: not self._running or self.module.training == training, _MODE_SECONDS):
                raise UserError(
                    f"{type(self.module).__name__} has been running in the other mode (train, eval) for "
                    f"{_MODE_SECONDS:g} s, for other calls: give each mode a module of its own"
                )
            if self.module.training != training:
                self.module.train(training)
            self._running += 1
        try:
            yield
        finally:
            with self._turn:
                self._running -= 1
                self._turn.notify_all()


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.layout != torch.strided else gradient
