"""What fake tensors do not know of kernels: the bytes that oneDNN's LSTM and GRU keep for backward, which they say only
when they run, that of torch's squared error, formats of the statistics of a batch, and how much a mask picks of a
gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, disable_fake_tensor_cache
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shoal.module import grouped
from shoal.planner.formats import laid_out

RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default
"""(input [T, B, F], four weights, h, c, options ...) -> (output, h, c, workspace)."""
SQUARES = torch.ops.aten.mse_loss.default
"""(input, target, reduction: 0 for none)"""
BATCH_NORM = torch.ops.aten.native_batch_norm.default
"""(input, weight, bias, running mean, running variance, options ...) -> (output, mean, inverse deviation)."""
SHORT, LONG = 8, 16


def called(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives.

    What a mask picks in a backward is as large as if all of it were True, which is the most that it can be, unless the
    forward put a tensor there that says it: the gradient of what `x[mask] = parameter` puts there (SpecAugment), of
    `x[mask] = features`, and an embedding's by rows, without its padding.
    """
    if func is torch.ops.aten.index.Tensor and (at := _masked_dim(args[1])) is not None:
        picked = args[0].flatten(at, at + args[1][at].dim() - 1)
        return picked.narrow(at, 0, _rows_put(picked, at)).clone()
    if func.overloadpacket is torch.ops.aten.set_ and isinstance(args[0], FakeTensor):
        return _set(func, args, kwargs)
    return grouped.called(func, args, kwargs)


class Called(TorchDispatchMode):
    """Operations on fake tensors as `called` gives them, for what other modes above it run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(func, args, kwargs or {})


def _set(func: Any, args: Any, kwargs: Any) -> Any:
    """What a tensor is that is given another storage, which torch's cache of fake operations would keep."""
    with disable_fake_tensor_cache(args[0].fake_mode):
        return func(*args, **kwargs)


def _masked_dim(indices: Sequence[Tensor | None]) -> int | None:
    """The dim, in a backward, from which on a mask alone picks; None for all other indices."""
    if torch._C._current_graph_task_id() == -1:
        return None
    given = [(at, each) for at, each in enumerate(indices) if each is not None]
    at, mask = given[0] if len(given) == 1 else (0, None)
    return at if isinstance(mask, FakeTensor) and mask.dtype == torch.bool and mask.dim() else None


def _rows_put(picked: Tensor, at: int) -> int:
    """How many rows the forward put where a mask is True, along dim `at` of the gradient of all of them: as many as the
    tensor had that it put there; if that had one for all of them, all."""
    node = torch._C._current_autograd_node()
    if not node.name().startswith("IndexPut"):
        return picked.shape[at]
    after, place = node.next_functions[1]  # of what was put there, whose gradient this is
    shape = after._input_metadata[place].shape  # type: ignore[union-attr]
    dim = at - picked.dim()
    return shape[dim] if len(shape) >= -dim and shape[dim] != 1 else picked.shape[at]


def with_workspace(func: Any, args: Any, out: Any) -> Any:
    """`out`, what `func` gave for fake `args`, with a workspace as large as the real one's, laid out as that."""
    out = laid_out(func, args, out)
    if func is SQUARES and (len(args) < 3 or args[2] != 0):  # the sum lies where its terms were
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return torch.empty(max(1, shape.numel()), dtype=out.dtype)[0]
    if func is BATCH_NORM:  # of the format of the parameters, also where the input is narrower
        dtype = next((each.dtype for each in args[1:5] if each is not None), args[0].dtype)
        return (out[0], *(each.to(dtype) for each in out[1:]))
    if func is not RECURRENT:
        return out
    described = tuple(
        (tuple(each.shape), each.dtype) if isinstance(each, Tensor) else _hashable(each) for each in args[1:]
    )
    steps = args[0].shape[0]
    size = _measured(tuple(args[0].shape[1:]), args[0].dtype, described, min(steps, LONG))
    if steps > LONG:  # so much more for each step
        short = _measured(tuple(args[0].shape[1:]), args[0].dtype, described, SHORT)
        size += (size - short) * (steps - LONG) // (LONG - SHORT)
    return (*out[:3], torch.empty(size, dtype=torch.uint8))


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@cache
def _measured(row: tuple[int, ...], dtype: torch.dtype, described: tuple[Any, ...], steps: int) -> int:
    """Bytes that a real call with so many steps keeps."""
    with _disable_current_modes(), torch.enable_grad():  # without gradients it keeps none
        rest = [_real(each) for each in described]
        return int(RECURRENT(torch.zeros(steps, *row, dtype=dtype), *rest)[3].nbytes)


def _real(each: Any) -> Any:
    if isinstance(each, tuple) and len(each) == 2 and isinstance(each[1], torch.dtype):
        return torch.zeros(each[0], dtype=each[1])
    return list(each) if isinstance(each, tuple) else each
