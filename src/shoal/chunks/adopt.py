"""Moving a built module onto its storage: parameters become views of chunks, buffers become real."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.chunks.allocate import Allocator
from shoal.chunks.assign import ChunkKey, assign
from shoal.chunks.chunk import Chunk
from shoal.precision import Precision


def make_chunks(
    module: nn.Module,
    member: Mapping[str, int],
    precision: Precision,
    chunk_bytes: int,
    group: str,
    allocate: Allocator,
    gradients: Allocator,
) -> list[Chunk]:
    """Chunks for the parameters of `module`, last registered first, since their gradients are ready first.

    `member[name]` is a parameter's optimizer group. A tied parameter is known by its first name and stands there, where its
    gradient is complete. `gradients` allocates the flat gradients, `allocate` the rest.
    """
    owners = {
        f"{prefix}.{name}".lstrip("."): owner
        for prefix, owner in module.named_modules()
        for name, _ in owner.named_parameters(recurse=False)
    }
    order = []
    for name, parameter in reversed(list(module.named_parameters())):
        dtype = precision.parameter_dtype(parameter.dtype, owners[name])
        rows = isinstance(owners[name], nn.Embedding | nn.EmbeddingBag) and owners[name].sparse and parameter.requires_grad
        key = ChunkKey(dtype, group, member[name], parameter.requires_grad, name if rows else None)
        order.append((name, parameter.shape, key))
    cut = assign(order, chunk_bytes, precision.grad.itemsize)
    return [
        Chunk(
            index,
            slots,
            key.dtype,
            _master(key.dtype, precision),
            precision.grad,
            key.trainable,
            allocate,
            gradients,
            bool(key.sparse),
        )
        for index, (key, slots) in enumerate(cut)
    ]


def _master(dtype: torch.dtype, precision: Precision) -> torch.dtype:
    return precision.master if dtype.is_floating_point else dtype


def adopt(
    module: nn.Module, chunks: Sequence[Chunk], value: Callable[[str, Tensor], Tensor], precision: Precision, device: torch.device
) -> dict[str, nn.Parameter]:
    """Fills chunks and buffers with their initial values, one tensor at a time, and puts them into `module`.

    Returns the parameters by their first names, in the module's order. Every place of a tied parameter gets the same object.
    """
    slots = {slot.name: (chunk, slot) for chunk in chunks for slot in chunk.slots}
    adopted: dict[int, nn.Parameter] = {}
    by_name: dict[str, nn.Parameter] = {}
    with torch.no_grad():
        for name, built in list(module.named_parameters(remove_duplicate=False)):
            if id(built) not in adopted:
                chunk, slot = slots[name]
                slot.view(chunk.master).copy_(value(name, built))
                parameter = nn.Parameter(slot.view(chunk.data), requires_grad=built.requires_grad)
                parameter.__dict__.update(built.__dict__)
                adopted[id(built)] = by_name[name] = parameter
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, adopted[id(built)])
        for chunk in chunks:
            chunk.publish()
        _adopt_other_tensors(module, value, precision, device)
    return by_name


def _on_device(value: Callable[[str, Tensor], Tensor], name: str, device: torch.device, tensor: Tensor) -> Tensor:
    return value(name, tensor).to(device)


def _stay_in_the_chunk() -> None:
    """Stands in for `RNNBase.flatten_parameters`, which on CUDA would re-bind the weights to a buffer of its own."""


def _adopt_other_tensors(
    module: nn.Module, value: Callable[[str, Tensor], Tensor], precision: Precision, device: torch.device
) -> None:
    """Makes buffers real, and tensors that the constructor kept as plain attributes."""
    for prefix, owner in module.named_modules():
        for name, buffer in list(owner._buffers.items()):
            if buffer is not None:
                dtype = precision.buffer_dtype(buffer, owner, name not in owner._non_persistent_buffers_set)
                owner._buffers[name] = value(f"{prefix}.{name}".lstrip("."), buffer).to(device, dtype).contiguous()
        for name, attribute in list(vars(owner).items()):
            of_torch = name in ("_parameters", "_buffers", "_modules")
            if not of_torch and any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(attribute)):
                vars(owner)[name] = tree_map_only(
                    FakeTensor, partial(_on_device, value, f"{prefix}.{name}".lstrip("."), device), attribute
                )
        if isinstance(owner, nn.RNNBase):
            owner.flatten_parameters = _stay_in_the_chunk  # type: ignore[method-assign]
