"""The buffers of a model: those that a checkpoint has, and other values in the place of their own for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn


@contextmanager
def replaced(values: Iterable[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Puts values in the place of buffers, each given by the module that has it and its name there, inside the
    context."""
    before = []
    for owner, attribute, value in values:
        before.append((owner, attribute, owner._buffers[attribute]))
        owner._buffers[attribute] = value
    try:
        yield
    finally:
        for owner, attribute, buffer in reversed(before):  # a module with two names was replaced twice
            owner._buffers[attribute] = buffer


def persistent_buffers(root: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yields the buffers that a checkpoint has, each with its name and the module that has it."""
    for path, owner in root.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield f"{path}.{name}".lstrip("."), owner, buffer


def buffers_replaced(root: nn.Module, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Puts `values` in the place of the buffers of `root` that have their names, inside the context."""
    places = ((*name.rpartition(".")[::2], value) for name, value in values.items())
    return replaced([(root.get_submodule(path), attribute, value) for path, attribute, value in places])


def buffers_untouched(root: nn.Module) -> AbstractContextManager[None]:
    """Redirects writes to the buffers of `root` to copies, inside the context: a later backward may need the
    originals."""
    copies = {id(buffer): buffer.clone() for buffer in root.buffers()}
    places = root.named_buffers(remove_duplicate=False)
    return buffers_replaced(root, {name: copies[id(buffer)] for name, buffer in places})


@contextmanager
def buffers_put_back(root: nn.Module) -> Iterator[None]:
    """Gives the buffers of `root` the values that they have now, after the context. Tables, which are not persistent
    and re-bound as they follow shapes, stay where they have another one."""
    before = [
        (owner, name, buffer, buffer._version, buffer.clone())
        for owner in root.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for owner, name, buffer, version, values in before:
            now = owner._buffers[name]
            if buffer._version != version:
                buffer.copy_(values)
            follows = name in owner._non_persistent_buffers_set and (now is None or now.shape != buffer.shape)
            if now is not buffer and not follows:
                owner._buffers[name] = buffer
