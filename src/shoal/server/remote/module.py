"""A module whose forward and backward run at its owner, in another process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual

from shoal.errors import UserError
from shoal.server.options import check_seconds
from shoal.server.remote import contexts
from shoal.server.remote.crossing import Crossing, stand_in_of
from shoal.server.remote.link import Link
from shoal.server.remote.messages import Backward, Drop, Forward, Load, Save
from shoal.server.remote.payload import Payload, taken_apart
from shoal.server.sessions import Address, accelerator, key_of_token

_PART_BYTES = 1 << 28
"""Bytes of a state that are sent at once."""

_leaf = torch.zeros(0, requires_grad=True)
ANCHOR = _leaf.view_as(_leaf)
"""An input of every remote forward, so that it takes part in backward where no other input needs a gradient. It is not
a leaf: of others alone the engine tells whether a backward comes to them."""


def remote(
    address: str,
    factory: str | Callable[..., Any],
    *args: Any,
    token: str | None = None,
    name: str = "",
    seed: int | None = None,
    timeout: float = 60.0,
    shared: bool = True,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> RemoteModule:
    """Returns a module that the owner at `address` builds and runs: `factory(*args, **kwargs)`.

    factory: a name that the owner exposes, or a class or function that it exposes under its `__name__`.
    args, kwargs: plain values and tensors.
    token: the owner's; None for the user's secret (see docs/security.md).
    name: all clients that give the same one share a module, which the first of them builds; "" for one of its own.
    seed: the module is built as after `torch.manual_seed(seed)`, and what it draws depends on the seed and the number
        of its forward alone; None for torch's generator in the owner's process.
    timeout: seconds for which the owner may be silent, while it computes too.
    shared: use shared memory where the owner is on this host.
    device: an accelerator whose tensors go to that of the owner (`OwnerOptions.device`) directly, e.g. "cuda:0"; where
        the owner has none, or the same one, they go through the host's memory.

    Raises LaunchError where the owner cannot be reached or has another token, UserError for a factory that it does not
    expose or arguments that cannot be sent, RemoteError where the factory raises.
    """
    if seed is not None and not (type(seed) is int and 0 <= seed < 2**53):  # a number of JSON
        raise UserError(f"remote: seed = {seed!r} is no whole number between 0 and 2**53")
    if not isinstance(name, str):
        raise UserError(f"remote: name = {name!r:.100} is no text")
    check_seconds("remote(timeout", timeout, above_0=True)
    link = Link(Address.read(address), key_of_token(token), timeout, shared, accelerator(device))
    asked = factory if isinstance(factory, str) else getattr(factory, "__name__", repr(factory))
    try:
        training = link.build(asked, name, -1 if seed is None else seed, taken_apart((args, kwargs), grad=False))
    except BaseException:
        link.close()
        raise
    return RemoteModule(link).train(training)


class RemoteModule(nn.Module):
    """Stands for a module at its owner, where its parameters are, and their gradients by context. Made by `remote`.

    Called like the module, with plain values and tensors, also nested in tuples, lists and dicts; inputs and outputs
    are copies. Several threads may call it at once. `train` and `eval` apply to the module at the owner from the next
    forward on; `state_dict` and `load_state_dict` read and write its state.

    link: to the owner.
    """

    elsewhere = True
    """Its parameters and their gradients are another process's."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link = link
        self._numbers = itertools.count()
        finalize(self, link.close)

    @property
    def peer(self) -> str:
        """What stands at the other end, for messages."""
        return self.link.peer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module. Raises SessionLost where the owner is gone or silent, RemoteError where the module has
        raised; both name the owner."""
        grad = torch.is_grad_enabled()
        sent = taken_apart((args, kwargs), grad)
        _check_first_order(self.peer, sent.tensors)
        device = sent.tensors[0].device if sent.tensors else torch.device("cpu")
        context = contexts.current()
        context.used.add(self)
        number = next(self._numbers)
        record = Forward(number, context.name, grad, self.training)
        if not grad:
            returned = self.link.ask(record, sent)
            return returned.value([tensor.to(device) for tensor in returned.tensors])
        # On the CPU, so that backward runs in the thread that calls it: see crossing.py.
        inputs, near = Crossing(), list(sent.tensors)
        for number, (tensor, needs) in enumerate(zip(sent.tensors, sent.needing, strict=True)):
            if needs:
                near[number] = inputs.depart(number, tensor) if tensor.device == self.link.device else tensor.cpu()
        given = [inputs.tensors.pop(number, tensor) for number, tensor in enumerate(near)]
        run = _Run(self, record, sent._replace(tensors=given), inputs)
        outputs = list(_Remote.apply(run, ANCHOR, *near))
        for number in list(run.outputs.tensors):
            outputs[number] = run.outputs.arrive(number, outputs[number])
        return run.returned.value([tensor.to(device) for tensor in outputs])

    def forget(self, context: str) -> None:
        """Has the gradients of a context dropped, some time soon."""
        self.link.forget(context)

    def drop(self, context: str) -> None:
        """Has the gradients of a context dropped."""
        self.link.ask(Drop(context))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        answer = self.link.ask(Save())
        for name, value in answer.value(answer.tensors).items():
            destination[prefix + name] = value

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        mine = {name.removeprefix(prefix): each for name, each in state_dict.items() if name.startswith(prefix)}
        missing: set[str] | None = None
        for part in _parts(mine):
            answer = self.link.ask(Load(), taken_apart(part, grad=False))
            lacking, unknown, wrong = answer.value(answer.tensors)
            missing = set(lacking) if missing is None else missing & set(lacking)
            unexpected_keys += [prefix + name for name in unknown]
            error_msgs += [f"{self.peer}: {each}" for each in wrong]
        missing_keys += [prefix + name for name in sorted(missing or ())]

    def close(self) -> None:
        """Leaves the owner. It does so by itself once nothing refers to it any more."""
        self.link.close()

    def extra_repr(self) -> str:
        return self.peer

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UserError(f"{self.peer} is a remote module, of which there is no copy: call shoal.remote once more")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UserError(f"{self.peer} is a remote module, which cannot be pickled: call shoal.remote in each process")


class _Run:
    """A forward and the backward that may follow.

    sent: the arguments, apart. inputs, outputs: what of arguments and results is beside the graph.
    """

    returned: Payload

    def __init__(self, module: RemoteModule, record: Forward, sent: Payload, inputs: Crossing) -> None:
        self.module, self.record, self.sent = module, record, sent
        self.inputs, self.outputs = inputs, Crossing()
        self._spent = False
        self._release = finalize(self, module.link.release, record.number)
        self._release.atexit = False

    def forward(self) -> list[Tensor]:
        self.returned = self.module.link.ask(self.record, self.sent)
        self.sent = self.sent._replace(structure=None, tensors=[])
        tensors = self.returned.tensors
        for number, needs in enumerate(self.returned.needing):
            if needs and not tensors[number].is_cpu:
                self.outputs.tensors[number] = tensors[number]
                tensors[number] = stand_in_of(tensors[number])
        self.returned = self.returned._replace(tensors=[])
        if not any(self.returned.needing):
            self._release.detach()
        return tensors

    def backward(self, grads: tuple[Tensor | None, ...], keep: bool, parameters: bool) -> list[Tensor | None]:
        """Returns the gradient of each tensor of the arguments, or None."""
        peer = self.module.peer
        if self._spent:
            raise RuntimeError(
                f"{peer}: backward a second time through a remote forward whose graph has been freed: give "
                "retain_graph=True the first time"
            )
        if not keep:
            self._spent = True
            self._release.detach()
        passing = contexts.passing()
        needed = [grad for grad, needs in zip(self.outputs.given(grads), self.returned.needing, strict=True) if needs]
        asked = Backward(self.record.number, passing.thread, passing.number, keep, parameters)
        answer = self.module.link.ask(asked, taken_apart(needed, grad=False))
        return self.inputs.returned(answer.value(answer.tensors))


class _Remote(torch.autograd.Function):
    """The forward of a remote module; its backward asks the owner for the gradients of the inputs."""

    @staticmethod
    def forward(ctx: Any, run: _Run, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run = run
        found = run.forward()
        ctx.mark_non_differentiable(
            *(tensor for tensor, needs in zip(found, run.returned.needing, strict=True) if not needs)
        )
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        if torch.is_grad_enabled():
            raise UserError(
                f"{run.module.peer}: derivatives of a higher order (create_graph=True) do not go through a remote "
                "module: compute them inside the module, at its owner"
            )
        if all(grad is None for grad in grads):
            return (None,) * (2 + len(run.sent.needing))
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        assert ANCHOR.grad_fn is not None
        parameters = torch._C._will_engine_execute_node(ANCHOR.grad_fn)
        return None, None, *run.backward(grads, keep, parameters)


def _parts(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Divides a state into parts of at most _PART_BYTES, or one tensor."""
    part, size = dict[str, Any](), 0
    for name, value in state.items():
        more = value.nbytes if isinstance(value, Tensor) else 0
        if part and size + more > _PART_BYTES:
            yield part
            part, size = {}, 0
        part[name] = value
        size += more
    yield part


def _check_first_order(peer: str, tensors: list[Tensor]) -> None:
    """Raises UserError for tensors of a transform, of which only a backward pass can go through a session."""
    for tensor in tensors:
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if wrapped or unpack_dual(tensor).tangent is not None:
            raise UserError(
                f"{peer}: torch.func and forward-mode derivatives (jvp, vmap, grad of torch.func) do not go through a "
                "remote module: use backward, or compute them inside the module, at its owner"
            )
