"""A module at its owner: forwards and backwards for its clients, and the gradients of its parameters by context."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.server.remote import contexts
from shoal.server.remote.contexts import Passing
from shoal.server.remote.draws import ForwardDraws
from shoal.server.remote.gradients import Gradients
from shoal.server.remote.graphs import Graph, Graphs
from shoal.server.remote.leaves import Leaves, Versions
from shoal.server.remote.messages import Backward, Forward
from shoal.server.remote.module import ANCHOR
from shoal.server.remote.payload import Payload, taken_apart
from shoal.server.remote.updates import Updates

_MODE_SECONDS = 60.0


class Client:
    """What the owner keeps for one remote module of another process.

    sessions: how many are open; with the last one all of this goes.
    """

    def __init__(self, most_graphs: int) -> None:
        self.graphs = Graphs(most_graphs)
        self.sessions = 0


class Exposed:
    """`module` as clients call it, several at once.

    seed: of what forwards draw; -1 for torch's generator.
    shared: by clients, each of which may have it stepped while forwards of others wait for their backward.
    """

    def __init__(self, module: nn.Module, seed: int, shared: bool) -> None:
        self.module, self.seed = module, seed
        self._versions = Versions(module) if shared else None
        first = next(iter([*module.parameters(), *module.buffers()]), torch.empty(0))
        self._device = first.device
        self._guard = threading.Lock()
        self.gradients = Gradients()
        self.updates = Updates(module, self.gradients, self._versions, self._guard)
        self._turn = threading.Condition()
        self._running = 0

    def forward(self, client: Client, asked: Forward, sent: Payload) -> Payload:
        """Returns what the module returns, and keeps the graph if a gradient is needed."""
        if not asked.grad:
            with torch.no_grad():
                draws = ForwardDraws(self.seed, asked.number)
                return taken_apart(self._run(client, asked, sent, draws, None), grad=False)
        client.graphs.begin(asked.number)
        try:
            for tensor, needs in zip(sent.tensors, sent.needing, strict=True):
                tensor.requires_grad_(needs)
            draws, leaves = ForwardDraws(self.seed, asked.number), self._leaves()
            with torch.enable_grad():
                found = taken_apart(self._run(client, asked, sent, draws, leaves), grad=True)
                outputs = [tensor for tensor, needs in zip(found.tensors, found.needing, strict=True) if needs]
            inputs = [tensor if tensor.requires_grad else None for tensor in sent.tensors]
        except BaseException:
            client.graphs.release(asked.number)
            raise
        if outputs:
            client.graphs.put(asked.number, Graph(asked.context, outputs, inputs, draws, leaves))
        else:
            client.graphs.release(asked.number)
        return found

    def backward(self, client: Client, asked: Backward, grads: list[Tensor | None]) -> Payload:
        """Returns the gradient of each tensor of the forward's arguments, or None; adds those of the parameters to the
        forward's context."""
        graph = client.graphs.get(asked.number, asked.keep)
        if not isinstance(grads, list) or len(grads) != len(graph.outputs):
            raise UserError(f"gradients of {len(graph.outputs)} outputs were to come")
        given = [(out, grad.to(out.device)) for out, grad in zip(graph.outputs, grads, strict=True) if grad is not None]
        wanted = [tensor for tensor in graph.inputs if tensor is not None]
        first, names = len(wanted), dict[str, int]()
        if asked.parameters:
            for name, parameter in self.module.named_parameters():
                if parameter.requires_grad:
                    names[name] = len(wanted)
                    wanted += [parameter, *([graph.leaves.of[parameter]] if graph.leaves else [])]
            wanted.append(ANCHOR)  # of remote modules in this one
        passing = Passing(asked.thread, asked.passing)
        found: list[Tensor | None] = [None] * len(wanted)
        if given and wanted:
            with contexts.entered(self.gradients.context(client, graph.context), passing), graph.draws.backward():
                roots, by = zip(*given, strict=True)
                found = list(torch.autograd.grad(roots, wanted, by, retain_graph=asked.keep, allow_unused=True))
        for part in range(2 if graph.leaves else 1):
            of_parameters = {name: found[at + part] for name, at in names.items()}
            self.gradients.add(client, graph.context, passing, of_parameters)
        of_inputs = iter(found[:first])
        return taken_apart([None if each is None else _dense(next(of_inputs)) for each in graph.inputs], grad=False)

    def drop(self, context: str) -> None:
        """Drops the gradients of a context, here and at owners below."""
        for each in self.gradients.drop(context):
            each.drop(context)

    def state(self) -> dict[str, Any]:
        """Returns a copy of the module's state, with those of remote modules in it."""
        state = self.module.state_dict()
        with self._guard:
            return {name: each.clone() if isinstance(each, Tensor) else each for name, each in state.items()}

    def load(self, state: object) -> list[list[str]]:
        """Loads what `state` has; returns names that it has not, names that are not known, and what did not fit."""
        if not isinstance(state, dict):
            raise UserError("no state of a module")
        with self._guard:
            if self._versions is not None:
                self._versions.move({each: each.data for each in self.module.parameters()})
        try:
            found = self.module.load_state_dict(state, strict=False)
        except RuntimeError as error:  # what has another shape
            return [[], [], [str(error)]]
        return [found.missing_keys, found.unexpected_keys, []]

    def leave(self, client: Client) -> None:
        """Drops the gradients and optimizers that only this client has asked for."""
        self.updates.leave(client)
        for name in self.gradients.leave(client):
            for each in self.gradients.drop(name):
                each.forget(name)

    def _leaves(self) -> Leaves | None:
        with self._guard:
            return self._versions.leaves() if self._versions and self.updates.any else None

    def _run(self, client: Client, asked: Forward, sent: Payload, draws: ForwardDraws, leaves: Leaves | None) -> Any:
        versions = [tensor._version for tensor in sent.tensors]
        given = sent.value([tensor.to(self._device) for tensor in sent.tensors])
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict)):
            raise UserError("no arguments of a module")
        args, kwargs = given
        with ExitStack() as around:
            around.enter_context(contexts.entered(self.gradients.context(client, asked.context)))
            around.enter_context(self._mode(asked.training))
            around.enter_context(draws.forward())
            if leaves is not None:
                around.enter_context(leaves.standing_in())
            found = self.module(*args, **kwargs)
        if versions != [tensor._version for tensor in sent.tensors]:
            raise UserError(
                f"{type(self.module).__name__} changes its input in place, which the caller's tensor would not show: "
                "clone it in its forward"
            )
        return found

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
