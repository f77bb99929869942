"""Adam and AdamW on the host in one pass over memory, in C.

torch's fused kernels write the unscaled gradient back, and know one dtype for all: an eighth more traffic, and with
bf16 weights one more pass. `HostAdam` stands in for the step of a torch Adam or AdamW, whose options, state and
checkpoints stay what they are; `takes` says whether it can.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.chunks import Buffer, Slot, flat_views
from shoal.chunks.masters import join_halves, part_halves
from shoal.native import library

MASTER_SPLIT, GRAD_BF16, DECOUPLED = 1, 2, 4
OPTIONS = ("lr", "betas", "eps", "weight_decay")
SHARE = 1 << 16
"""Elements of a thread, at least."""


class HostAdam:
    """Runs the step of `optimizer`, an Adam or AdamW, chunk by chunk in the C kernel on the host.

    `parameters` are views of the masters of the chunks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._group_of = {
            id(each): index for index, group in enumerate(optimizer.param_groups) for each in group["params"]
        }

    @staticmethod
    def takes(optimizer: torch.optim.Optimizer, chunks: Sequence[Buffer]) -> bool:
        """Whether the kernel does what `optimizer` would with fp32 masters, and gradients of fp32 or bf16, on the
        host."""
        plain = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not any(
            group["amsgrad"]
            or group["maximize"]
            or group["capturable"]
            or group["differentiable"]
            or isinstance(group["lr"], Tensor)
            for group in optimizer.param_groups
        )
        here = all(each.is_cpu for chunk in chunks for each in (chunk.master_like, chunk.gradient))
        masters = all(chunk.master_like.dtype == torch.float32 for chunk in chunks)
        gradients = all(chunk.gradient.dtype in (torch.float32, torch.bfloat16) for chunk in chunks)
        return plain and library() is not None and here and masters and gradients

    def begin(self) -> None:
        """Begins a step with the options of now, whatever a schedule makes of them before its last chunk is updated."""
        self._options = [dict(group) for group in self._optimizer.param_groups]

    @torch.no_grad()
    def step(self, chunk: Buffer, factor: float, left_out: Collection[str]) -> None:
        """Updates the owned `chunk` with gradients times `factor`, except the parameters `left_out`; bf16 data are
        written in the same pass."""
        due = [slot for slot in chunk.slots if slot.name not in left_out and slot.numel]
        is_low = chunk.data.dtype == torch.bfloat16
        if due:
            group = self._options[self._group_of[id(self._parameters[due[0].name])]]
            states = [self._state(slot) for slot in due]
            torch._foreach_add_([state["step"] for state in states], 1)
            lower = chunk.lower_halves
            flats = [chunk.master if lower is None else lower, chunk.gradient, *([chunk.data] if is_low else [])]
            arguments: dict[int, _Arguments] = {}  # by step, which is mostly one
            work = []  # all of it first: between kernels, which leave nothing in the caches, Python is slow
            for state, master, grad, *weights in zip(states, *flat_views(due, *flats), strict=True):
                step = int(state["step"])
                if step not in arguments:
                    arguments[step] = _arguments(step, factor, **{name: group[name] for name in OPTIONS})
                tensors = [master, grad, state["exp_avg"], state["exp_avg_sq"], *weights]
                work.append(_work(tensors, arguments[step], group["decoupled_weight_decay"]))
            for calls in work:
                _run(calls)
        is_whole = len(due) == sum(slot.numel > 0 for slot in chunk.slots)  # masters of others may be changed by hand
        chunk.data_is_new = is_low and is_whole and chunk.master_like is not chunk.data

    def _state(self, slot: Slot) -> dict[str, Any]:
        """State of the optimizer of what this rank has of a parameter; zeros at first."""
        state: dict[str, Any] = self._optimizer.state[self._parameters[slot.name]]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros(slot.shape, dtype=torch.float32) for _ in range(2))
        return state


class _Arguments(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_float)
        for name in ("beta1", "beta2", "eps", "weight_decay", "lr", "step_size", "bias2_sqrt", "grad_factor")
    ]


def adam_update(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    grad_factor: float = 1.0,
    weights: Tensor | None = None,
) -> None:
    """Updates 1-D tensors of equal length, in place, on the CPU, with torch's current number of threads.

    - `master`: fp32; or int16, the lower halves of fp32 values whose upper ones are `weights` (see chunks.masters)
    - `grad`: fp32 or bf16, times `grad_factor`
    - `weights`: bf16 that get the new values
    - `step`: counts from 1
    - `decoupled`: weight decay of AdamW
    """
    arguments = _arguments(step, grad_factor, lr, betas, eps, weight_decay)
    tensors = [master, grad, exp_avg, exp_avg_sq, *([] if weights is None else [weights])]
    _run(_work(tensors, arguments, decoupled))


def _arguments(
    step: int, grad_factor: float, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> _Arguments:
    bias1, bias2 = 1 - betas[0] ** step, 1 - betas[1] ** step
    return _Arguments(betas[0], betas[1], eps, weight_decay, lr, lr / bias1, math.sqrt(bias2), grad_factor)


def _work(tensors: Sequence[Tensor], arguments: _Arguments, decoupled: bool) -> list[Callable[[], None]]:
    """Calls that update (master, grad, exp_avg, exp_avg_sq, perhaps weights) as `adam_update` says, one a thread. The
    tensors may have any shape."""
    assert all(map(Tensor.is_contiguous, tensors))
    master, grad = tensors[:2]
    kind = (
        MASTER_SPLIT * (master.dtype == torch.int16)
        | GRAD_BF16 * (grad.dtype == torch.bfloat16)
        | DECOUPLED * decoupled
    )
    kernels = library()
    if kernels is None:
        return [partial(_in_torch, [each.view(-1) for each in tensors], arguments, kind)]

    def call(start: int, stop: int) -> Callable[[], None]:
        pointers = [each.data_ptr() + start * each.element_size() for each in tensors]
        weights = [None] * (5 - len(tensors))
        return partial(kernels.shoal_adam, *pointers, *weights, stop - start, kind, ctypes.byref(arguments))

    elements = master.numel()
    threads = max(1, min(torch.get_num_threads(), elements // SHARE))
    if threads == 1:
        return [call(0, elements)]
    each = -(-elements // threads)
    each += -each % 64
    return [call(start, min(start + each, elements)) for start in range(0, elements, each)]


def _run(calls: Sequence[Callable[[], None]]) -> None:
    """Makes `calls` at once, each on a thread."""
    if len(calls) == 1:
        calls[0]()
    else:
        list(_pool(torch.get_num_threads()).map(lambda call: call(), calls))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="shoal-adam")


def _in_torch(tensors: Sequence[Tensor], a: _Arguments, kind: int) -> None:
    master, grad, exp_avg, exp_avg_sq = tensors[:4]
    weights = tensors[4] if len(tensors) > 4 else None
    p = master
    if kind & MASTER_SPLIT:
        assert weights is not None
        p = torch.empty_like(exp_avg)
        join_halves(weights, master, out=p)
    g = grad.float() * a.grad_factor
    if not kind & DECOUPLED:
        g = g + p * a.weight_decay
    exp_avg.add_((g - exp_avg) * (1 - a.beta1))
    exp_avg_sq.mul_(a.beta2).add_(g * g * (1 - a.beta2))
    keep = 1 - a.lr * a.weight_decay if kind & DECOUPLED else 1.0
    p.mul_(keep).sub_(a.step_size * exp_avg / (exp_avg_sq.sqrt() / a.bias2_sqrt + a.eps))
    if kind & MASTER_SPLIT:
        assert weights is not None
        part_halves(weights, master, p)
    elif weights is not None:
        weights.copy_(p)
