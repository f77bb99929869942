"""Shoal's gradient algorithms as the communication hook of torch's DistributedDataParallel.

    ddp = DistributedDataParallel(model) ddp.register_comm_hook(*as_ddp_hook({"name": "powersgd", "rank": 2}, ddp))

A bucket of DDP is a chunk of the algorithm, reduced in place on a lane: all ranks issue the same operations in the same
order, in a process group of the hook's own. Hooks that chain futures, as torch's own PowerSGD does, guarantee neither,
and mismatch under load.

DDP makes its buckets anew after the first iteration. The algorithm's state is carried over by parameter name.
"""

# Without `from __future__ import annotations`: DDP compares the annotations of a hook, and refuses strings.

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shoal.chunks import Chunk, Slot
from shoal.comm import Group, Lane, Ledger
from shoal.comm.torch_group import open_group
from shoal.device import is_accelerator
from shoal.errors import UserError
from shoal.exchange.algorithm import Algorithm, Holds, Replica
from shoal.exchange.gradients_only import gradient_algorithm
from shoal.optim.optimizer import ChunkOptimizer
from shoal.plan import Option


def as_ddp_hook(
    algorithm: Option | Algorithm, ddp: DistributedDataParallel, loss_scale: Callable[[], float] | None = None
) -> tuple["BucketExchange", Any]:
    """Returns the two arguments of `ddp.register_comm_hook`: the state, which can be saved and restored, and the hook.

    All ranks call it.

    - `algorithm`: as a plan's `exchange`, or an object of your own. It gives the mean of the replicas' gradients, as
      DDP does, except for Adasum, which gives its own combination of them
    - `ddp`: the wrapped model
    - `loss_scale`: returns what the loss is multiplied with now, such as `scaler.get_scale` of a torch.amp.GradScaler.
      Error feedback then keeps its residuals in the unit of the gradients themselves, which does not change with the
      scale

    Raises UserError for an algorithm that works on more than gradients.
    """
    return BucketExchange(
        gradient_algorithm(algorithm, "a hook of DistributedDataParallel"), ddp, loss_scale
    ), exchange_bucket


def exchange_bucket(state: "BucketExchange", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchanges a bucket: the hook itself."""
    return state.take(bucket)


class BucketExchange:
    """The state of the hook: an algorithm, its place among the other replicas, and DDP's buckets as chunks.

    `step` counts the backward passes that were exchanged, `ledger` what was sent. `state_dict` belongs to this rank:
    each rank saves and restores its own, into a hook with the same algorithm and as many ranks.
    """

    def __init__(
        self, algorithm: Algorithm, ddp: DistributedDataParallel, loss_scale: Callable[[], float] | None = None
    ) -> None:
        devices = {parameter.device for parameter in ddp.module.parameters()}
        if len(devices) > 1:
            raise UserError(
                f"the parameters are on {', '.join(sorted(map(str, devices)))}: the hook serves modules on one device"
            )
        self.ledger = Ledger()
        self.step = 0
        self._algorithm = algorithm
        self._names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        self._among = partial(_among, ddp.process_group, self.ledger)
        self._group = self._among("gradients", range(dist.get_world_size(ddp.process_group)))
        self._chunks: list[Chunk] = []
        self._loss_scale, self._scale = loss_scale, 1.0
        # Of this step's buckets. DDP leaves the gradients of parameters alone that no rank has used, so an exchange
        # must pay nothing of what it keeps back into them.
        self._kept_back = _KeptBack(ddp.find_unused_parameters or ddp.static_graph) if algorithm.keeps_back else None
        self._arriving: list[tuple[Chunk, _Arrival]] = []  # buckets of a new layout, until all of them are known
        # state that the algorithm takes over when it is attached next
        self._carried: dict[str, Mapping[str, Tensor]] | None = {}
        self._failures: list[Exception] = []
        self._lane = Lane(devices.pop(), self.ledger)
        # The lane's work does not refer to this object, so the thread ends with it; at exit it is not waited for.
        weakref.finalize(self, self._lane.close).atexit = False

    def take(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Takes a full bucket; the future gets its buffer, exchanged."""
        index, buffer, parameters = bucket.index(), bucket.buffer(), bucket.parameters()
        names = [self._names[id(parameter)] for parameter in parameters]
        if buffer.is_sparse:
            raise UserError(
                f"the gradient of {names[0]} is sparse, which no hook exchanges: make its embedding with sparse=False"
            )
        if index == 0:
            self._arriving = []
            if self._chunks:
                self._algorithm.begin(self.step)
            self.step += 1
            if self._kept_back is not None:
                self._kept_back.begin()
            self._scale = 1.0 if self._loss_scale is None else float(self._loss_scale())
        arrival = _Arrival(buffer, self._failures)
        if (
            not self._arriving
            and index < len(self._chunks)
            and names == [slot.name for slot in self._chunks[index].slots]
        ):
            self._submit(self._chunks[index], arrival, bucket.is_last())
            return arrival.answer
        self._arriving.append((_chunk(index, names, parameters, bucket.gradients(), buffer), arrival))
        if bucket.is_last():
            first = self._arriving[0][0].index
            self._attach([*self._chunks[:first], *(chunk for chunk, _ in self._arriving)])
            for chunk, waiting in self._arriving:
                self._submit(chunk, waiting, waiting is arrival)
            self._arriving = []
        return arrival.answer

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state: the number of steps, and the algorithm's tensors by kind and name, not copied."""
        return {"step": self.step, "tensors": {kind: dict(tensors) for kind, tensors in self._tensors().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues, with the next backward pass, from what `state_dict` returned on this rank."""
        self.step, self._carried = state["step"], dict(state["tensors"])
        self._chunks = []

    def _tensors(self) -> dict[str, Mapping[str, Tensor]]:
        if self._carried is not None:
            return self._carried
        return {kind: state.tensors for kind, state in self._algorithm.state().items()}

    def _attach(self, chunks: list[Chunk]) -> None:
        """Attaches the algorithm to a new layout, with the state that it had under the old one or that was loaded."""
        self._lane.wait()
        carried, self._carried, self._chunks = self._tensors(), None, chunks
        # The optimizer is the caller's: `gradient_algorithm` lets no algorithm through that uses one.
        optimizer = cast(ChunkOptimizer, None)
        self._algorithm.attach(Replica(chunks, self._group, self._lane, optimizer, self._among))
        self._algorithm.begin(self.step - 1)
        states = self._algorithm.state()
        if carried and carried.keys() != states.keys():
            raise UserError(
                f"the saved state holds {', '.join(carried)}, this algorithm needs {', '.join(states) or 'none'}: "
                "load what the same one saved"
            )
        for kind, state in states.items() if carried else ():
            for name, tensor in state.tensors.items():
                tensor.copy_(carried[kind][name])
        self._algorithm.restored()

    def _submit(self, chunk: Chunk, arrival: "_Arrival", last: bool) -> None:
        divisor = self._group.size if self._algorithm.holds(self.step - 1) is Holds.SUM else 1
        work = partial(_exchange, self._algorithm, chunk, self._scale, divisor, self._kept_back, last, arrival)
        self._lane.submit(work, f"gradients {chunk.index}")


class _KeptBack:
    """What decides, at the end of a step, what becomes of what an algorithm keeps back.

    `some_unused`: whether there may be parameters that no rank has used. They are taken from the gradients, which are
    zeros on all ranks, at the cost of a small all-reduce a bucket.
    """

    def __init__(self, some_unused: bool) -> None:
        self._some_unused = some_unused
        self.begin()

    def begin(self) -> None:
        self._norms: list[Tensor] = []
        self._unused: list[str] = []

    def unused(self, chunk: Chunk, group: Group) -> list[Slot]:
        """Returns those parameters of `chunk` whose gradients, not yet exchanged, are zeros on all ranks."""
        if not self._some_unused:
            return []
        used = torch.stack([(slot.view(chunk.gradient) != 0).any() for slot in chunk.slots]).float()
        group.all_reduce(used, purpose=f"used {chunk.index}")
        return [slot for slot, ranks in zip(chunk.slots, used.tolist(), strict=True) if not ranks]

    def exchanged(self, chunk: Chunk, unused: Sequence[Slot]) -> None:
        """Gives the parameters that are `unused` zeros for gradients, whatever the exchange made of them."""
        for slot in unused:
            slot.view(chunk.gradient).zero_()
        self._unused += [slot.name for slot in unused]
        self._norms.append(torch.linalg.vector_norm(chunk.gradient))

    def renew(self, algorithm: Algorithm) -> None:
        """Renews what is kept back, of parameters that were used, unless a norm is not finite: a GradScaler skips such
        a step, which must leave no trace."""
        norms = torch.stack(self._norms)
        bad, one = ~norms.isfinite().all(), torch.ones((), dtype=torch.float64, device=norms.device)
        if is_accelerator(norms.device):  # the host would have to wait for `bad`
            algorithm.renew(one, bad.float(), self._unused)
        elif not bad:
            algorithm.renew(one, None, self._unused)


class _Arrival:
    """A bucket's buffer and the future that DDP waits for.

    `answer` completes when `done` gets the buffer, with the first error if there is one. C++ sees an error that `then`
    raises, but not one of `Future.set_exception`.
    """

    def __init__(self, buffer: Tensor, failures: list[Exception]) -> None:
        self.buffer, self.failures = buffer, failures
        self.done: Future[Tensor] = Future(devices=[buffer.device] if is_accelerator(buffer.device) else None)

        def outcome(_: Future[Tensor]) -> Tensor:
            if failures:
                raise failures[0]
            return buffer

        self.answer: Future[Tensor] = self.done.then(outcome)


@torch.no_grad()
def _exchange(
    algorithm: Algorithm,
    chunk: Chunk,
    scale: float,
    divisor: int,
    kept_back: "_KeptBack | None",
    last: bool,
    arrival: _Arrival,
) -> None:
    """Exchanges a bucket on the lane.

    - `chunk`: the bucket as a chunk
    - `scale`: the loss scale
    - `divisor`: turns the algorithm's result into the mean
    - `kept_back`: what is known of the step's buckets so far; None where the algorithm keeps nothing back
    - `last`: whether it is the step's last bucket. What is kept back is then renewed
    - `arrival`: the buffer and its future

    After a failure the ranks are no longer at the same operation, so nothing further is tried.
    """
    flat, buffer = chunk.gradient, arrival.buffer
    elsewhere = flat.data_ptr() != buffer.data_ptr()
    try:
        if not arrival.failures:
            if elsewhere:
                flat.copy_(buffer)
            if scale != 1:
                flat.div_(scale)
            unused = [] if kept_back is None else kept_back.unused(chunk, algorithm.replica.group)
            algorithm.reduce(chunk, torch.ones(()))
            flat.div_(divisor / scale)
            if kept_back is not None:
                kept_back.exchanged(chunk, unused)
                if last:
                    kept_back.renew(algorithm)
            if elsewhere:
                buffer.copy_(flat)
    except Exception as error:  # for the trainer's thread, which waits for the answer
        arrival.failures.append(error)
    arrival.done.set_result(buffer)


def _chunk(
    index: int, names: Sequence[str], parameters: Sequence[Tensor], gradients: Sequence[Tensor], buffer: Tensor
) -> Chunk:
    """Makes a chunk of the bucket: in place, or with a gradient in fp32 beside a narrower buffer."""
    start = buffer.storage_offset()
    slots = tuple(
        Slot(name, parameter.shape, int(gradient.storage_offset() - start))
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True)
    )
    wide = buffer.dtype in (torch.float32, torch.float64)
    return Chunk.of_gradient(index, slots, buffer if wide else torch.zeros_like(buffer, dtype=torch.float32))


def _among(pg: dist.ProcessGroup, ledger: Ledger, name: str, members: Sequence[int]) -> Group:
    return open_group(pg, name, members, ledger)
