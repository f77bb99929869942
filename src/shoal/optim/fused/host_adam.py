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
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shoal.chunks import Buffer, Slot
from shoal.chunks.masters import join_halves, part_halves
from shoal.native import library

MASTER_SPLIT, GRAD_BF16, DECOUPLED = 1, 2, 4
SHARE = 1 << 16
"""Elements of a thread, at least."""


class HostAdam:
    """Runs the step of `optimizer`, an Adam, or AdamW if `decoupled`, chunk by chunk in the C kernel on the host.

    `parameters` are views of the masters of the chunks.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], decoupled: bool
    ) -> None:
        self._optimizer, self._parameters, self._decoupled = optimizer, parameters, decoupled
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
        if not chunk.slots:
            return
        group = self._options[self._group_of[id(self._parameters[chunk.slots[0].name])]]
        for slot in chunk.slots:
            if slot.name not in left_out and slot.numel:
                self._update(chunk, slot, factor, group)
        chunk.data_is_new = chunk.master_like is not chunk.data and chunk.data.dtype == torch.bfloat16

    def _update(self, chunk: Buffer, slot: Slot, factor: float, group: Mapping[str, Any]) -> None:
        state = self._optimizer.state[self._parameters[slot.name]]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros(slot.shape, dtype=torch.float32) for _ in range(2))
        state["step"] += 1
        lower = chunk.lower_halves
        master = slot.view(chunk.master if lower is None else lower).view(-1)
        adam_update(
            master, slot.view(chunk.gradient).view(-1),
            state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1), int(state["step"]),
            lr=group["lr"], betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"],
            decoupled=self._decoupled, grad_factor=factor,
            weights=slot.view(chunk.data).view(-1) if chunk.data.dtype == torch.bfloat16 else None,
        )  # fmt: skip


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
    bias1, bias2 = 1 - betas[0] ** step, 1 - betas[1] ** step
    arguments = _Arguments(betas[0], betas[1], eps, weight_decay, lr, lr / bias1, math.sqrt(bias2), grad_factor)
    kind = (
        MASTER_SPLIT * (master.dtype == torch.int16)
        | GRAD_BF16 * (grad.dtype == torch.bfloat16)
        | DECOUPLED * decoupled
    )
    tensors = [master, grad, exp_avg, exp_avg_sq, weights]
    kernels = library()
    if kernels is None:
        _in_torch(tensors, arguments, kind)
        return

    def run(stretch: slice) -> None:
        pointers = [None if each is None else each[stretch].data_ptr() for each in tensors]
        kernels.shoal_adam(*pointers, stretch.stop - stretch.start, kind, ctypes.byref(arguments))

    _in_shares(run, master.numel())


def _in_shares(run: Callable[[slice], None], elements: int) -> None:
    """Calls `run` for stretches of `elements`, one a thread."""
    threads = max(1, min(torch.get_num_threads(), elements // SHARE))
    if threads == 1:
        run(slice(0, elements))
        return
    each = -(-elements // threads)
    each += -each % 64
    stretches = [slice(start, min(start + each, elements)) for start in range(0, elements, each)]
    list(_pool(torch.get_num_threads()).map(run, stretches))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="shoal-adam")


def _in_torch(tensors: Sequence[Tensor | None], a: _Arguments, kind: int) -> None:
    master, grad, exp_avg, exp_avg_sq, weights = tensors
    assert master is not None and grad is not None and exp_avg is not None and exp_avg_sq is not None
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
