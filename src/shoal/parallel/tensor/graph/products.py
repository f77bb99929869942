"""What products, norms, softmax and reductions do to dims: a dim that is summed over is joined with that of the other
factor, and is blocked where a whole one is needed."""

from __future__ import annotations

from typing import Any

from shoal.parallel.tensor.graph.dims import Atom, Dim, block, new, reshape, resolve, size, unify
from shoal.parallel.tensor.graph.flow import Flow, Handler, Use
from shoal.parallel.tensor.graph.trace import Op


def _linear(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    rows, columns = flow.dims(weight)
    if bias is not None:
        unify(flow.dims(bias)[0], rows, op.name)
    out = flow.product(op, x, weight, rows, columns, flow.dims(x)[-1])
    flow.put(op.result, [*flow.dims(x)[:-1], out])


def _matmul(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    """`matmul`, `mm`, `bmm`, and with a summand `addmm`, `baddbmm`."""
    *summand, a, b = op.inputs
    if a.dim() < 2 or b.dim() < 2:
        flow.block_all(op)
        return
    dims_a, dims_b = flow.dims(a), flow.dims(b)
    if b.dim() == 2 and flow.parameter_of(b) is not None:
        last = flow.product(op, a, b, dims_b[1], dims_b[0], dims_a[-1])
        result = [*dims_a[:-1], last]
    elif a.dim() == 2 and flow.parameter_of(a) is not None:
        first = flow.product(op, b, a, dims_a[0], dims_a[1], dims_b[-2])
        result = [*dims_b[:-2], first, dims_b[-1]]
    else:
        unify(dims_a[-1], dims_b[-2], op.name)
        block(dims_a[-1], op.name)
        batch = _broadcast(op, dims_a[:-2], dims_b[:-2], a.shape[:-2], b.shape[:-2])
        result = [*batch, dims_a[-2], dims_b[-1]]
    flow.put(op.result, result)
    if summand:
        flow.join(op, [summand[0], op.result], op.result.shape)


def _broadcast(op: Op, one: list[Dim], other: list[Dim], shape: Any, others: Any) -> list[Dim]:
    """Joins batch dims."""
    found: list[Dim] = []
    for at in range(1, max(len(one), len(other)) + 1):
        mine = one[-at] if at <= len(one) and shape[-at] != 1 else None
        theirs = other[-at] if at <= len(other) and others[-at] != 1 else None
        if mine is not None and theirs is not None:
            unify(mine, theirs, op.name)
        found.insert(0, mine if mine is not None else theirs or [])
    return found


def _attention(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    """softmax(q k^T + mask) v, with heads in the dim before the tokens; queries may have more heads."""
    q, k, v, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    of_q, of_k, of_v = flow.dims(q), flow.dims(k), flow.dims(v)
    heads = of_q[:-2]
    for key, its in ((k, of_k), (v, of_v)):
        block(its[-2], op.name)
        if q.dim() > 2 and key.dim() > 2 and q.shape[-3] != key.shape[-3] > 1:
            grouped = reshape([of_q[-3]], [key.shape[-3], q.shape[-3] // key.shape[-3]])
            if grouped is None:
                block(of_q[-3], op.name)
                block(its[-3], op.name)
            else:
                unify(grouped[0], its[-3], op.name)
            _broadcast(op, of_q[:-3], its[:-3], q.shape[:-3], key.shape[:-3])
        else:
            _broadcast(op, of_q[:-2], its[:-2], q.shape[:-2], key.shape[:-2])
    unify(of_k[-2], of_v[-2], op.name)
    unify(of_q[-1], of_k[-1], op.name)
    block(of_q[-1], op.name)
    flow.put(op.result, [*heads, of_q[-2], of_v[-1]])
    if mask is not None:
        weights = [*heads, of_q[-2], of_k[-2]]
        shape = (*q.shape[:-1], k.shape[-2])
        _broadcast(op, weights, flow.dims(mask), shape, mask.shape)


def _convolution(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    x, weight, bias, groups = given["input"], given["weight"], given.get("bias"), given.get("groups", 1)
    back = op.name.startswith("conv_transpose")
    of_x, of_w = flow.dims(x), flow.dims(weight)
    inner, outer = (of_w[0], of_w[1]) if back else (of_w[1], of_w[0])
    for dim in (*of_x[2:], *of_w[2:]):
        block(dim, op.name)
    if x.dim() != weight.dim():
        flow.block_all(op)
        return
    if groups == 1:
        out = flow.product(op, x, weight, outer, inner, of_x[1])
    else:
        grouped = _grouped(flow, op, groups, of_x[1], inner if back else outer, outer if back else inner)
        if grouped is None:
            flow.block_all(op)
            return
        out = grouped if not back else [*resolve(inner)[:1], *outer]
    if bias is not None and size(out) == bias.shape[0]:
        unify(flow.dims(bias)[0], out, op.name)
    flow.put(op.result, [of_x[0], out, *(new(length) for length in op.result.shape[2:])])


def _grouped(flow: Flow, op: Op, groups: int, channels: Dim, grouped: Dim, single: Dim) -> Dim | None:
    """Joins the groups of the channels with those of the weight's dim that counts them; blocks what is in a group."""
    halves = reshape([channels], [groups, size(channels) // groups])
    of_weight = reshape([grouped], [groups, size(grouped) // groups])
    if halves is None or of_weight is None:
        return None
    unify(halves[0], of_weight[0], op.name)
    for dim in (halves[1], of_weight[1], single):
        block(dim, op.name)
    return [*of_weight[0], *of_weight[1]]


def _embedding(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    weight, ids = given["weight"], given["indices"]
    rows, columns = flow.dims(weight)
    parameter = flow.parameters.get(id(weight))
    if parameter is None:
        block(rows, op.name)
    else:
        flow.uses.append(Use(op, parameter, rows, columns, ids, lookup=True))
    flow.put(op.result, [*flow.dims(ids), columns])


def _norm(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    """`layer_norm` and `rms_norm`: over the last dims, which the weight and the bias have too."""
    x, number = given["input"], len(given["normalized_shape"])
    dims = flow.dims(x)
    for each in (given.get("weight"), given.get("bias")):
        for mine, its in zip(dims[-number:], flow.dims(each) if each is not None else (), strict=False):
            unify(mine, its, op.name)
    for dim in dims[-number:]:
        block(dim, op.name)
    flow.put(op.result, dims)


def _channel_norm(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    """`batch_norm`, `instance_norm` and `group_norm`: the channels are the second dim, in groups of their own."""
    x = op.inputs[0]
    dims = flow.dims(x)
    for each in op.inputs[1:]:
        unify(dims[1], flow.dims(each)[0], op.name)
    groups = given.get("num_groups")
    if groups is not None:
        halves = reshape([dims[1]], [groups, x.shape[1] // groups])
        block(dims[1] if halves is None else halves[1], op.name)
    for dim in (*dims[2:], *([] if op.name != "batch_norm" else dims[:1])):
        block(dim, op.name)
    for result in op.outputs[:1]:
        flow.put(result, dims)
    for result in op.outputs[1:]:
        flow.put(result, None)


def _along(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    """Softmax, reductions, sorts: over some dims, which are blocked; the others pass."""
    x = op.inputs[0]
    chosen = given.get("dim", given.get("dims"))
    if chosen is None or chosen == []:
        places = list(range(x.dim()))
    else:
        places = [each % max(1, x.dim()) for each in ([chosen] if isinstance(chosen, int) else chosen)]
    dims = flow.dims(x)
    for at in places:
        if x.dim():
            block(dims[at], op.name)
    for result in op.outputs:
        if result.shape == x.shape:
            flow.put(result, dims)
        elif result.dim() == x.dim():
            flow.put(result, [new(result.shape[at]) if at in places else dim for at, dim in enumerate(dims)])
        elif result.dim() == x.dim() - len(places):
            flow.put(result, [dim for at, dim in enumerate(dims) if at not in places])
        else:
            flow.put(result, None)


def _einsum(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    """Letters that stand for one dim are joined; those that the result lacks are summed over."""
    equation, inputs = given["equation"].replace(" ", ""), op.inputs
    if "." in equation or "->" not in equation or any(flow.parameter_of(each) is not None for each in inputs):
        flow.block_all(op)
        return
    terms, result = equation.split("->")
    known: dict[str, list[Atom]] = {}
    for letters, tensor in zip(terms.split(","), inputs, strict=True):
        for letter, dim in zip(letters, flow.dims(tensor), strict=True):
            if letter in known and size(known[letter]) == size(dim):
                unify(known[letter], dim, op.name)
            known.setdefault(letter, dim)
    for letter, dim in known.items():
        if letter not in result:
            block(dim, op.name)
    flow.put(op.result, [known[letter] for letter in result])


def _drawn(flow: Flow, op: Op, given: dict[str, Any]) -> None:
    """Draws of torch's own generator, which depend on how many there are before: no dim can be cut. (Those of `dropout`
    are keyed by element.)"""
    for tensor in op.inputs:
        for dim in flow.dims(tensor):
            block(dim, op.name)
    for result in op.outputs:
        flow.put(result, flow.dims(op.inputs[0]) if result.shape == op.inputs[0].shape else None)


_TABLE: dict[Handler, str] = {
    _linear: "linear",
    _matmul: "matmul mm bmm addmm baddbmm __matmul__",
    _attention: "scaled_dot_product_attention",
    _convolution: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    _embedding: "embedding",
    _norm: "layer_norm rms_norm",
    _channel_norm: "batch_norm group_norm instance_norm",
    _along: "softmax log_softmax _softmax _log_softmax sum mean var std var_mean std_mean amax amin max min argmax "
    "argmin prod logsumexp norm linalg_vector_norm any all topk sort argsort cumsum cumprod median mode count_nonzero "
    "glu cummax",
    _einsum: "einsum",
    _drawn: "rand_like randn_like randint_like bernoulli bernoulli_ uniform_ normal_ random_ exponential_ rrelu rrelu_ "
    "native_dropout alpha_dropout feature_dropout feature_alpha_dropout multinomial log_normal_ cauchy_ geometric_",
}
PRODUCTS: dict[str, Handler] = {name: handler for handler, names in _TABLE.items() for name in names.split()}
"""By the name of the operation."""
