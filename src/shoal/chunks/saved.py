"""Tensors that autograd saves for backward while weights are gathered.

of a gathered weight    only where it lies is kept, so its memory is free until backward asks for it
of one that is given    a copy: a layer that has weights of its own takes it as its input, and has a copy of it for more
                        than one sample (of learned queries, say), for one the weight itself; backward would ask for it
                        on ranks with one sample alone
of anything else        the tensor, on the device or, for a part of the bytes, on the host (activations_on_host)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shoal.chunks.activations import Activations
from shoal.chunks.activations_on_host import OnHost, Saved, check_unchanged
from shoal.chunks.chunk import Chunk
from shoal.module.record import storage_of


@dataclass(frozen=True)
class _Weight:
    """A view of the data of the chunk at `index`."""

    index: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Kept:
    """Another tensor, and its version when it was saved."""

    tensor: Tensor
    version: int


class SavedTensors:
    """Autograd's saved-tensor hooks.

    - `chunks`: whose weights are gathered
    - `always`: storages (by `_cdata`) of the other weights, which stay in memory anyway
    - `running`: indices of the chunks that each module whose forward is under way has asked for, innermost last
    - `use`: brings the chunks at some indices, which backward needs together
    - `activations`: counts what is kept; None on a GPU, whose allocator does
    - `on_host`: where a part of it waits
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        always: set[int],
        running: Sequence[set[int]],
        use: Callable[[Iterable[int]], None],
        activations: Activations | None,
        on_host: OnHost | None,
    ) -> None:
        self._chunks, self._always, self._running, self._use = chunks, always, running, use
        self._activations, self._on_host = activations, on_host
        self._weights = {storage_of(chunk.data): index for index, chunk in enumerate(chunks)}
        self._node: Any = None
        self._of_node: frozenset[int] = frozenset()
        self._watches = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which a graph is made."""
        before, self._watches = self._watches, True
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._watches = before

    def forward_is_over(self) -> None:
        """Counts what the next forward saves by itself."""
        if self._on_host is not None:
            self._on_host.forward_is_over()

    def backward_is_over(self) -> None:
        """Forgets the node of the graph that ran last."""
        self._node, self._of_node = None, frozenset()
        if self._on_host is not None:
            self._on_host.begin()

    def stays(self, chunk: Chunk) -> None:
        """Counts the weights of `chunk` among those that stay in memory."""
        storage = storage_of(chunk.data)
        del self._weights[storage]
        self._always.add(storage)

    def chunks_of(self, tree: Any) -> set[int]:
        """Indices of the chunks in which the tensors in `tree` lie."""
        storages = (storage_of(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and _has_storage(leaf))
        return {self._weights[each] for each in storages if each in self._weights}

    def _pack(self, tensor: Tensor) -> Tensor | _Kept | _Weight | Saved:
        plain = _has_storage(tensor)
        storage = storage_of(tensor) if plain else 0
        index = self._weights.get(storage)
        lazy = plain and (tensor.is_conj() or tensor.is_neg())
        if index is not None and lazy:
            return tensor.detach().resolve_conj().resolve_neg()
        own = self._running[-1] if self._running else set()
        if index is not None and (index in own or not own):
            return _Weight(index, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        kept = tensor.detach()  # itself it would keep its own graph alive
        if index is not None:
            kept = kept.clone()
        if not plain or storage in self._always:
            return kept
        here = not lazy and kept.device == self._chunks[0].data.device
        if here and self._on_host is not None and (away := self._on_host.save(kept)):
            return away
        if self._activations is not None:
            self._activations.keep(kept)
        return _Kept(kept, kept._version)

    def _unpack(self, saved: Tensor | _Kept | _Weight | Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if isinstance(saved, _Kept):
            check_unchanged(saved.tensor, saved.version)
            return saved.tensor
        node = torch._C._current_autograd_node()  # what it unpacks one after the other it uses together
        first = node is None or node is not self._node
        if first:
            self._node, self._of_node = node, frozenset()
        if isinstance(saved, Saved):
            assert self._on_host is not None
            return self._on_host.restore(saved, self._chunks[0].data.device, first)
        self._of_node |= {saved.index}
        self._use(self._of_node)
        data = self._chunks[saved.index].data
        weight = data.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
        # a graph that is made beside what is watched keeps its weights for itself
        return weight.clone() if torch.is_grad_enabled() and not self._watches else weight


def _has_storage(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory of its own kind: it is neither sparse nor wrapped by torch.func."""
    return tensor.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
