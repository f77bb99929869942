"""Which dropouts of a trace are of tensors that are cut: a rank drops the elements that one device drops there."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from shoal.parallel.tensor.graph.trace import Call, Op, Trace

Order = list[Tensor | None]
"""For each dropout of a call, in order: its tensor where that is cut, else None."""


def draws_of(trace: Trace, is_cut: Callable[[Tensor], bool]) -> tuple[dict[str, list[Order]], set[str]]:
    """Returns, for each module in which a cut tensor is dropped from, the dropouts of each of its calls; and the names
    of those whose calls differ."""
    drawn = [(op, tensor) for op in trace.ops if (tensor := _dropped(op)) is not None]
    names = {_caller(op.call).name for op, tensor in drawn if is_cut(tensor)}
    orders: dict[int, Order] = {}
    calls: dict[int, Call] = {}
    for op, tensor in drawn:
        call: Call | None = _caller(op.call)
        while call is not None and call.name not in names:
            call = call.above
        if call is not None:
            calls[id(call)] = call
            orders.setdefault(id(call), []).append(tensor if is_cut(tensor) else None)
    found: dict[str, list[Order]] = {}
    for key, order in orders.items():
        found.setdefault(calls[key].name, []).append(order)
    odd = {name for name, each in found.items() if len({len(order) for order in each}) > 1}
    return found, odd


def _dropped(op: Op) -> Tensor | None:
    """Returns the tensor of which an operation drops elements, by its shape; None if it drops nothing."""
    given = op.bound()
    if op.name in ("dropout", "dropout_") and given["train"] and given["p"] > 0:
        return op.inputs[0]
    if op.name == "scaled_dot_product_attention" and given.get("dropout_p", 0.0) > 0:
        query: Tensor = given["query"]
        return query
    return None


def _caller(call: Call) -> Call:
    """Returns the call in which a dropout was asked for: that around a layer which does nothing else."""
    while isinstance(call.module, _DropoutNd) and call.above is not None:
        call = call.above
    return call
