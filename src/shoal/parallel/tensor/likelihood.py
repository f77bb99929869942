"""The negative log likelihood over columns that are cut among ranks, and the lookup of ids among those of a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shoal.comm import Group
from shoal.comm.functional import copy_to, reduce_from
from shoal.device import is_accelerator

PURPOSE = "logits"
CACHED = 1 << 18
"""Elements whose exponentials exist at one time on a CPU: as many as a core's cache holds."""


def check_range(ids: Tensor, stop: int, what: str) -> None:
    """Raises IndexError for an id outside of [0, stop), as one device does; otherwise no rank would have it.

    On a GPU it is an assertion on the device, for which the host does not wait.
    """
    if isinstance(ids, FakeTensor) or not ids.numel() or torch._C._functorch.peek_interpreter_stack() is not None:
        return
    inside = ((ids >= 0) & (ids < stop)).all()
    if is_accelerator(ids.device):
        torch._assert_async(inside)
    elif not inside:
        raise IndexError(
            f"{what} is out of range: ids from {int(ids.min())} to {int(ids.max())}, where there are {stop}"
        )


def here_or_elsewhere(ids: Tensor, start: int, number: int, whole: int, what: str) -> tuple[Tensor, Tensor]:
    """Returns the local index of each id (0 where another rank has it), and a mask of those others.

    ids: any shape, in [0, whole)
    start, number: this rank has the ids [start, start + number)
    whole: number of ids over all ranks
    what: what an id stands for, in the error of `check_range`
    """
    check_range(ids, whole, what)
    here = ids - start
    elsewhere = (here < 0) | (here >= number)
    return here.masked_fill(elsewhere, 0), elsewhere


def at_columns(x: Tensor, here: Tensor, elsewhere: Tensor) -> Tensor:
    """Returns the column `here` [N] of each row of `x` [N, v]; 0 where the mask `elsewhere` is set."""
    return x.gather(1, here.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0)


class Likelihood(torch.autograd.Function):
    """Computes (logsumexp(x) - x[target], logsumexp(x)) over columns that are cut among ranks.

    The gradient is softmax(x) - 1[target] of this rank's columns.
    """

    @staticmethod
    def forward(local: Tensor, here: Tensor, elsewhere: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(local.dtype, torch.float32)
        rows = max(1, CACHED // local.shape[1]) if local.is_cpu else max(1, len(local))
        mine = torch.cat([block.to(wide).logsumexp(1) for block in local.split(rows)])
        largest = group.all_reduce(mine.clone(), "max", PURPOSE)
        at_target = at_columns(local, here, elsewhere)
        total, at_target = group.all_reduce(torch.stack([(mine - largest).exp(), at_target.to(wide)]), purpose=PURPOSE)
        logsumexp = total.log() + largest
        return (logsumexp - at_target).to(local.dtype), logsumexp

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        local, here, elsewhere, ctx.group = inputs
        ctx.save_for_backward(local, here, elsewhere, output[1])
        ctx.save_for_forward(local, here, elsewhere, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        local, here, elsewhere, logsumexp = ctx.saved_tensors
        of_target, of_sum = grads[0].to(logsumexp.dtype), grads[1]
        again = torch.is_grad_enabled()  # the gradient itself may be differentiated
        if again:
            # each rank uses them for its own columns, so their gradients are summed
            alike = copy_to(torch.stack([logsumexp, of_target, of_sum]), ctx.group, PURPOSE)
            logsumexp, of_target, of_sum = alike.unbind()
        minus = -of_target.masked_fill(elsewhere, 0).unsqueeze(1)
        softmax, factor, here = local - logsumexp.unsqueeze(1), (of_target + of_sum).unsqueeze(1), here.unsqueeze(1)
        if again:
            grad = (softmax.exp() * factor).scatter_add(1, here, minus)
        else:
            grad = softmax.exp_().mul_(factor).scatter_add_(1, here, minus)
        return grad.to(local.dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        local, here, elsewhere, logsumexp = ctx.saved_tensors
        change = tangents[0].to(logsumexp.dtype)
        of_sum = ((local - logsumexp.unsqueeze(1)).exp() * change).sum(1)
        of_sum, of_target = reduce_from(torch.stack([of_sum, at_columns(change, here, elsewhere)]), ctx.group, PURPOSE)
        return (of_sum - of_target).to(local.dtype), of_sum
