"""What operations that only rearrange a tensor do to its dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shoal.parallel.tensor.graph.dims import Dim, block, joined, new, pieces, reshape, stretch, unify
from shoal.parallel.tensor.graph.flow import Flow, Handler
from shoal.parallel.tensor.graph.trace import Op


def _first(op: Op) -> Tensor:
    return op.inputs[0]


def _same(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    for result in op.outputs:
        flow.put(result, flow.dims(_first(op)) if result.shape == _first(op).shape else None)


def _fresh(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    for result in op.outputs:
        flow.put(result, None)


def _reshape(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    before, result = _first(op), op.result
    dims = reshape(flow.dims(before), result.shape) if before.numel() and result is not before else None
    if dims is None and result is not before:
        flow.block_all(op)
        return
    flow.put(result, dims)


def _order(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    """Transposes and permutations."""
    before, ndim = _first(op), _first(op).dim()
    order = list(range(ndim))
    if op.name == "permute":
        order = [each % ndim for each in given["dims"]]
    elif op.name in ("transpose", "swapaxes", "swapdims"):
        one, other = (list(op.args)[1:] + list(op.kwargs.values()))[:2]
        order[one], order[other] = order[other], order[one]
    elif op.name in ("t", "numpy_T"):
        order.reverse()
    elif op.name in ("mT", "adjoint", "mH"):
        order[-2:] = reversed(order[-2:])
    else:
        sources, targets = (_list(each) for each in op.args[1:3])
        order = [at for at in order if at not in [each % ndim for each in sources]]
        for target, source in sorted(zip([each % ndim for each in targets], sources, strict=True)):
            order.insert(target, source % ndim)
    flow.put(op.result, [flow.dims(before)[at] for at in order])
    _note_view(flow, before, op.result)


def _note_view(flow: Flow, before: Tensor, result: Tensor) -> None:
    parameter = flow.parameter_of(before)
    if parameter is not None:
        flow.views[id(result)] = parameter


def _list(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _unsqueeze(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    dims: list[Dim] = list(flow.dims(_first(op)))
    dims.insert(given["dim"] % (len(dims) + 1), [])
    flow.put(op.result, dims)


def _squeeze(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    before = _first(op)
    chosen = given.get("dim")
    places = range(before.dim()) if chosen is None else [each % before.dim() for each in _list(chosen)]
    gone = [at for at in places if before.shape[at] == 1]
    flow.put(op.result, [dim for at, dim in enumerate(flow.dims(before)) if at not in gone])


def _expand(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    flow.put(op.result, flow.join(op, [_first(op)], op.result.shape))


def _repeat(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    before, repeats = _first(op), _list(given["repeats"] if "repeats" in given else given["dims"])
    repeats = [1] * (before.dim() - len(repeats)) + list(repeats)  # tile() takes fewer than there are dims
    dims: list[Dim] = [[]] * (len(repeats) - before.dim()) + flow.dims(before)
    flow.put(op.result, [[*new(times), *dim] for times, dim in zip(repeats, dims, strict=True)])


def _repeat_interleave(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    before, times = _first(op), given.get("repeats")
    if not isinstance(times, int) or given.get("dim") is None:
        flow.block_all(op)
        return
    dims = list(flow.dims(before))
    dims[given["dim"]] = [*dims[given["dim"]], *new(times)]
    flow.put(op.result, dims)


def _split(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    before = _first(op)
    dim = given.get("dim", 0) % before.dim()
    parts = pieces(flow.dims(before)[dim], [each.shape[dim] for each in op.result], op.name)
    for result, part in zip(op.result, parts, strict=True):
        dims = list(flow.dims(before))
        dims[dim] = part
        flow.put(result, dims)
        _note_view(flow, before, result)


def _unbind(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    before = _first(op)
    dims = list(flow.dims(before))
    block(dims.pop(given.get("dim", 0)), op.name)
    for result in op.outputs:
        flow.put(result, dims)


def _slice(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    before = _first(op)
    dim, whole = given["dim"] % before.dim(), before.shape[given["dim"]]
    step = given.get("step") or 1
    start, stop, _ = slice(given.get("start"), given.get("end"), step).indices(whole)
    if op.name == "narrow":
        start, stop = given["start"] % (whole + 1), given["start"] % (whole + 1) + given["length"]
    dims = list(flow.dims(before))
    if step == 1:
        dims[dim] = stretch(dims[dim], start, max(start, stop), op.name) if stop > start else []
    else:
        halves = reshape([dims[dim]], [whole // step, step]) if whole % step == 0 else None
        block(dims[dim] if halves is None else halves[1], op.name)
        dims[dim] = new(op.result.shape[dim]) if halves is None else halves[0]
    flow.put(op.result, dims)


def _cat(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    inputs = [each for each in op.inputs if each.dim() == op.result.dim()]
    dim = given.get("dim", 0) % op.result.dim()
    dims = [
        joined([flow.dims(each)[at] for each in inputs]) if at == dim else _joined_at(flow, op, inputs, at)
        for at in range(op.result.dim())
    ]
    flow.put(op.result, dims)


def _stack(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    dim = given.get("dim", 0) % op.result.dim()
    dims = [_joined_at(flow, op, op.inputs, at) for at in range(op.result.dim() - 1)]
    extra = new(op.result.shape[dim])
    block(extra, op.name)
    dims.insert(dim, extra)
    flow.put(op.result, dims)


def _joined_at(flow: Flow, op: Op, inputs: Sequence[Tensor], at: int) -> Dim:
    first = flow.dims(inputs[0])[at]
    for each in inputs[1:]:
        unify(first, flow.dims(each)[at], op.name)
    return first


def _select(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    dims = list(flow.dims(_first(op)))
    block(dims.pop(given["dim"]), op.name)
    flow.put(op.result, dims)


def _index(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    """Indexing by tensors: the dims indexed are blocked, the others stay where all indices stand together."""
    before, indices = _first(op), given["indices"]
    dims, places = flow.dims(before), [at for at, each in enumerate(indices) if each is not None]
    for at in places:
        block(dims[at], op.name)
    together = places == list(range(places[0], places[-1] + 1)) if places else False
    if not together or any(indices[at].dtype.itemsize == 1 for at in places):
        flow.block_all(op)
        return
    shape = op.result.shape[places[0] : op.result.dim() - (before.dim() - places[-1] - 1)]
    for each in places:
        for dim in flow.dims(indices[each]):
            block(dim, op.name)
    flow.put(op.result, [*dims[: places[0]], *map(new, shape), *dims[places[-1] + 1 :]])


def _gathered(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    """`index_select` and `roll`, `flip` and kin: the dims named are blocked, the others pass."""
    before = _first(op)
    chosen = given.get("dims") if given.get("dims") is not None else given.get("dim")
    places = [each % before.dim() for each in _list(chosen)] if chosen not in (None, []) else range(before.dim())
    dims = list(flow.dims(before))
    for at in places:
        block(dims[at], op.name)
        dims[at] = new(op.result.shape[at])
    flow.put(op.result, dims)


def _last_two(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    """`tril` and `triu`."""
    dims = flow.dims(_first(op))
    for dim in dims[-2:]:
        block(dim, op.name)
    flow.put(op.result, dims)


def _unfolded(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    """Dims whose sizes have changed are blocked (padding, pooling, resizing), the others pass."""
    before = _first(op)
    for result in op.outputs:
        if result.dim() != before.dim():
            flow.block_all(op)
            return
        dims = []
        for at, dim in enumerate(flow.dims(before)):
            kept = at < before.dim() - _TAIL.get(op.name, before.dim())
            kept = kept or (op.name not in _TAIL and before.shape[at] == result.shape[at])
            if not kept:
                block(dim, op.name)
            dims.append(dim if kept else new(result.shape[at]))
        flow.put(result, dims)


_TAIL = {
    f"{how}{dims}d": dims
    for dims in (1, 2, 3)
    for how in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "upsample_nearest")
} | {"upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "upsample_linear1d": 1, "max_pool2d_with_indices": 2}

_TABLE: dict[Handler, str] = {
    _same: "contiguous clone detach alias lift_fresh lift _to_copy requires_grad_ view_as_real_copy positive "
    "empty_like zeros_like ones_like  full_like lift_fresh_copy pin_memory",
    _fresh: "new_empty new_zeros new_ones new_full new_empty_strided empty_strided scalar_tensor arange",
    _reshape: "view reshape _unsafe_view flatten unflatten view_as reshape_as ravel",
    _order: "t transpose permute swapaxes swapdims movedim moveaxis numpy_T mT adjoint mH",
    _unsqueeze: "unsqueeze unsqueeze_",
    _squeeze: "squeeze squeeze_",
    _expand: "expand expand_as broadcast_to",
    _repeat: "repeat tile",
    _repeat_interleave: "repeat_interleave",
    _split: "split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk",
    _unbind: "unbind",
    _slice: "slice narrow",
    _cat: "cat concat concatenate",
    _stack: "stack",
    _select: "select",
    _index: "index",
    _gathered: "index_select roll flip",
    _last_two: "tril triu",
    _unfolded: f"pad constant_pad_nd {' '.join(_TAIL)}",
}
VIEWS: dict[str, Handler] = {name: handler for handler, names in _TABLE.items() for name in names.split()}
"""By the name of the operation."""
