"""Moves a built module onto its chunks, and from one set to another: parameters become views, buffers become real."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.chunks.chunk import Chunk
from shoal.chunks.spec import Slot
from shoal.chunks.weakly import is_weak
from shoal.errors import UserError
from shoal.module.record import has_values, span_of, storage_of
from shoal.precision import Precision

_adopted: MutableMapping[Tensor, weakref.ref[Chunk]] = WeakTensorKeyDictionary()
"""The chunk of each parameter that is trained."""
_seen: MutableMapping[Tensor, list[tuple[weakref.ref[Tensor], int]]] = WeakTensorKeyDictionary()
"""The views that a module has of each parameter beside it, and at which element of it each begins."""
Places = dict[int, list[tuple[Tensor, nn.Parameter]]]
"""The tensors that were built, with the parameters made of them, by the storage in which they lie."""


def check_free(module: nn.Module) -> None:
    """Raises UserError for a parameter that lies on chunks, and for which `let_go` has not been called since; and for
    one whose values an engine kept elsewhere, that has been closed."""
    for name, built in module.named_parameters():
        if (chunk_of := _adopted.get(built)) is not None and (chunk := chunk_of()) is not None:
            inside = ", inside engine.whole_weights()" if chunk.passes else ""
            raise UserError(
                f"{name} is trained by another engine, which would go on with what the model no longer has: close that "
                f"engine first, or give this one a copy (copy.deepcopy of the module{inside})"
            )
        if _is_blank(built):
            raise UserError(
                f"{name} shows NaN: the engine that has trained the model kept its weights in parts, or on the host, "
                "and is closed. Copy the module before that (copy.deepcopy of it inside engine.whole_weights()), or "
                "build it anew and load a checkpoint"
            )


def _is_blank(tensor: Tensor) -> bool:
    """Whether a tensor has one value for all its elements, which is not finite (see gather)."""
    real = tensor.layout == torch.strided and has_values(tensor)
    return real and tensor.numel() > 1 and not any(tensor.stride()) and not bool(tensor.isfinite().any())


def adopt(
    module: nn.Module,
    chunks: Sequence[Chunk],
    value: Callable[[str, Tensor], Tensor],
    precision: Precision,
    device: torch.device,
    fill: bool = True,
) -> dict[str, nn.Parameter]:
    """Fills chunks and buffers with their initial values, one tensor at a time, and puts them into `module`.

    `value(name, built)` gives a tensor's initial value; without `fill` chunks have none yet. Returns the parameters by
    their first names, in the module's order; a tied parameter is one object in all its places.
    """
    slots = {slot.name: (chunk, slot) for chunk in chunks for slot in chunk.slots}
    owned: dict[str, list[Slot]] = {name: [] for name in slots}
    for chunk in chunks:
        for part in chunk.owned.slots:
            owned[part.name].append(part)
    adopted: dict[int, nn.Parameter] = {}
    places: Places = {}
    by_name: dict[str, nn.Parameter] = {}
    with torch.no_grad():
        for name, built in list(module.named_parameters(remove_duplicate=False)):
            if id(built) not in adopted:
                chunk, slot = slots[name]
                if fill:
                    _fill(chunk, owned[name], value(name, built))
                if chunk.passes:
                    chunk.open()
                parameter = nn.Parameter(slot.view(chunk.data), requires_grad=built.requires_grad)
                if chunk.passes:
                    chunk.let_go()
                parameter.__dict__.update(built.__dict__)
                _adopted[parameter] = weakref.ref(chunk)
                _take_over_hooks(parameter, built)
                adopted[id(built)] = by_name[name] = parameter
                places.setdefault(storage_of(built), []).append((built, parameter))
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, adopted[id(built)])
        for chunk in chunks:
            chunk.publish()
        _adopt_other_tensors(module, value, precision, device, adopted, places)
    return by_name


def let_go(parameters: Mapping[str, nn.Parameter]) -> None:
    """Lets others adopt the module of `parameters`: nobody trains them any more."""
    for parameter in parameters.values():
        _adopted.pop(parameter, None)


def _fill(chunk: Chunk, parts: Sequence[Slot], first: Tensor) -> None:
    """Writes the initial value of a parameter, `first`, into the parts of it that this rank owns."""
    if chunk.group is not None:  # a constructor may have drawn from elsewhere than torch
        first = chunk.group.broadcast(first.contiguous(), purpose="weights")
    for part in parts:
        part.view(chunk.owned.master).copy_(
            first if part.whole is None else first.flatten()[part.start :][: part.numel]
        )


@torch.no_grad()
def move(
    parameters: Mapping[str, nn.Parameter],
    masters: Mapping[str, nn.Parameter],
    old: Sequence[Chunk],
    new: Sequence[Chunk],
) -> None:
    """Moves the values of `old` chunks into `new` ones of the same parameters, cut otherwise.

    The parameter objects stay: those of the module, with the views that it has of them, and those over the masters that
    the optimizer updates.
    """
    before = {slot.name: slot.view(chunk.master) for chunk in old for slot in chunk.slots}
    for chunk in new:
        for slot in chunk.slots:
            slot.view(chunk.master).copy_(before[slot.name])
        chunk.publish()
        for slot in chunk.slots:
            parameter = parameters[slot.name]
            parameter.data = slot.view(chunk.data)
            for reference, offset in _seen.get(parameter, ()):
                if (seen := reference()) is not None:
                    seen.data = _within(parameter, offset, seen)
            _adopted[parameter] = weakref.ref(chunk)
            if slot.name in masters:
                masters[slot.name].data = slot.view(chunk.master)


def _take_over_hooks(parameter: nn.Parameter, built: Tensor) -> None:
    """Takes over hooks of users: the dicts themselves, so that their handles still remove them. Hooks of an engine that
    has trained the module before are not among them any more."""
    if built._backward_hooks:
        parameter._backward_hooks = built._backward_hooks
    after = built._post_accumulate_grad_hooks or {}
    for key in [key for key, hook in after.items() if is_weak(hook)]:
        del after[key]
    if after:
        parameter._post_accumulate_grad_hooks = after


def _stay_in_the_chunk() -> None:
    """Stands in for `RNNBase.flatten_parameters`, which on CUDA would re-bind the weights to a buffer of its own."""


def _adopt_other_tensors(
    module: nn.Module,
    value: Callable[[str, Tensor], Tensor],
    precision: Precision,
    device: torch.device,
    adopted: Mapping[int, nn.Parameter],
    places: Places,
) -> None:
    """Makes buffers real, and tensors that the constructor kept as plain attributes; one tensor in several places stays
    one.

    `adopted`: the parameters by the `id` of those that were built, for attributes that refer to them. `places`: for
    those that are a view of one.
    """
    buffers: dict[tuple[int, torch.dtype], Tensor] = {}
    for prefix, owner in module.named_modules():
        for name, buffer in list(owner._buffers.items()):
            if buffer is not None:
                dtype = precision.buffer_dtype(buffer, owner, name not in owner._non_persistent_buffers_set)
                if (id(buffer), dtype) not in buffers:
                    full = f"{prefix}.{name}".lstrip(".")
                    made = _view_in_memory(full, buffer, places)
                    if made is None:
                        made = value(full, buffer).to(device, dtype).contiguous()
                    buffers[id(buffer), dtype] = made
                owner._buffers[name] = buffers[id(buffer), dtype]
        for name, attribute in list(vars(owner).items()):
            of_torch = name in ("_parameters", "_buffers", "_modules")
            empty = isinstance(attribute, dict) and not attribute  # as most dicts of hooks are
            if of_torch or empty:
                continue
            leaves = [leaf for leaf in tree_leaves(attribute) if isinstance(leaf, Tensor)]
            if any(isinstance(leaf, FakeTensor) or id(leaf) in adopted or _part(leaf, places) for leaf in leaves):
                real = partial(_real, f"{prefix}.{name}".lstrip("."), value, device, adopted, places)
                vars(owner)[name] = tree_map_only(Tensor, real, attribute)
        if isinstance(owner, nn.RNNBase):
            owner.flatten_parameters = _stay_in_the_chunk  # type: ignore[method-assign]


def _real(
    name: str,
    value: Callable[[str, Tensor], Tensor],
    device: torch.device,
    adopted: Mapping[int, nn.Parameter],
    places: Places,
    tensor: Tensor,
) -> Tensor:
    """Makes the plain attribute `name`, a `tensor` of the built module, real."""
    if id(tensor) in adopted:
        return adopted[id(tensor)]
    if (part := _part(tensor, places)) is not None:
        return _view(*part, tensor)
    if any(tensor is each for each in adopted.values()):  # a module has followed its parameters by itself
        return tensor
    return value(name, tensor).to(device) if isinstance(tensor, FakeTensor) else tensor


def _view(parameter: nn.Parameter, offset: int, like: Tensor) -> Tensor:
    """Returns what is to the `parameter` as `like`, `offset` elements from its first, is to what was built; it has
    memory when that has."""
    chunk = _adopted[parameter]()
    assert chunk is not None
    if chunk.passes:
        chunk.open()
    view = _within(parameter, offset, like)
    if chunk.passes:
        chunk.let_go()
    _seen.setdefault(parameter, []).append((weakref.ref(view), offset))
    return view


def views_beside(parameter: nn.Parameter, given: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the views, without a gradient, that a module has of `parameter` beside it, each with what the same part of
    `given` is, another tensor of its shape."""
    for reference, offset in _seen.get(parameter, ()):
        if (view := reference()) is not None:
            yield view, given.detach().contiguous().as_strided(view.shape, view.stride(), offset)


def _within(parameter: nn.Parameter, offset: int, like: Tensor) -> Tensor:
    return parameter.detach().as_strided(like.shape, like.stride(), parameter.storage_offset() + offset)


def _view_in_memory(name: str, buffer: Tensor, places: Places) -> Tensor | None:
    """Returns the buffer `name` as a view of the parameter of which it was built as one; None where there is none.
    Raises UserError for one that comes and goes, whose values a buffer has to have at all times."""
    if (part := _part(buffer, places)) is None:
        return None
    chunk = _adopted[part[0]]()
    if chunk is not None and chunk.passes:
        raise UserError(
            f"the buffer {name} is a view of a weight, which is in memory only while it is used (plan.zero = 3, "
            "plan.memory): keep it as a plain attribute (self.x = weight.detach()), or a copy (.clone())"
        )
    return _view(*part, buffer)


def _part(tensor: Tensor, places: Places) -> tuple[nn.Parameter, int] | None:
    """Returns the parameter of whose built tensor this one is a view without a gradient, and where it begins in that;
    None where there is none."""
    if tensor.layout != torch.strided or tensor.requires_grad or not tensor.numel():
        return None
    first, end = span_of(tensor)
    for built, parameter in places.get(storage_of(tensor), ()):
        begins, ends = span_of(built)
        if tensor.dtype == built.dtype and built.is_contiguous() and begins <= first and end <= ends:
            return parameter, first - begins
    return None
