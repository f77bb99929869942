"""Weights that are whole only while they are used (ZeRO 3 where ranks share no memory): hooks say when.

    forward     a module that is about to run, or an access to a parameter, says what is needed
    backward    autograd asks for the weight that it saved: kept is only which part of which chunk it was

A module's weights stay while it runs. Those of a module that runs again in the middle of a backward (recompute) stay until their gradients
have come, since what was saved then is out of our hands; frozen ones until the end of that backward.

Between passes a parameter shows NaN of its shape, so that who reads it there by mistake neither reads freed memory nor goes on unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.chunks.activations import Activations
from shoal.chunks.chunk import Chunk
from shoal.chunks.executor import Executor
from shoal.chunks.tier import Tier


@dataclass(frozen=True)
class _Saved:
    """A view of a chunk's data that autograd has saved."""

    place: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Passing:
    """Watches `module`, whose parameters are views of `chunks` among others, and asks `executor` for those in time.

    `whole`: modules that run as one, since hooks inside them would be compiled. `tier`: where what backward keeps is counted, on a CPU.
    """

    def __init__(
        self, module: nn.Module, chunks: Sequence[Chunk], executor: Executor, whole: Sequence[nn.Module], tier: Tier | None = None
    ) -> None:
        self._chunks, self.executor = chunks, executor
        self._place = {slot.name: place for place, chunk in enumerate(chunks) for slot in chunk.slots}
        self._storage = {chunk.data.untyped_storage()._cdata: place for place, chunk in enumerate(chunks)}
        self._activations = Activations(tier) if tier is not None and tier.device.type == "cpu" else None
        self._running: list[frozenset[int]] = []  # of the modules whose forward is under way, innermost last
        self._until_gradients: dict[int, set[str]] = {}
        self._node: Any = None
        self._of_node: frozenset[int] = frozenset()
        names = _names(module)
        self._views = [(p, p.detach(), _blank(p)) for name, p in module.named_parameters() if name in self._place]
        self._show(False)
        closed = {id(inner) for outer in whole for inner in outer.modules()}
        for each in module.modules():
            below = {names[id(p)] for p in each.parameters()} & self._place.keys()
            own = {names[id(p)] for p in each.parameters(recurse=False)} & self._place.keys()
            inside = id(each) in closed
            runs_as_one = any(each is outer for outer in whole) or (not inside and isinstance(each, nn.MultiheadAttention))
            if runs_as_one or (not inside and own and own == below):
                self._watch(each, below if runs_as_one else own, module)
            if own and not inside:
                each._parameters = _Asked(each._parameters, self._asked(names))
        for name, parameter in module.named_parameters():
            if name in self._place and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._came(name))

    @contextmanager
    def step(self, kind: Hashable) -> Iterator[None]:
        """Around a pass that is the same each time for the same `kind`: all microbatches of a step, or an evaluation."""
        self._show(True)
        self.executor.begin(kind)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        except BaseException:
            self._clear()
            self.executor.forget()
            raise
        else:
            self._clear()
            self.executor.end()
        finally:
            self._show(False)

    def backward_is_over(self) -> None:
        """Nothing that this backward recomputed is needed any more."""
        self._until_gradients.clear()
        self._node, self._of_node = None, frozenset()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, all weights are there. All ranks come alike."""
        for chunk in self._chunks:
            chunk.open()
        self._show(True)
        try:
            for chunk in self._chunks:
                chunk.fill()
            yield
        finally:
            self._show(False)
            for chunk in self._chunks:
                chunk.let_go()

    def _show(self, views: bool) -> None:
        """Parameters are views of their chunks, or blank."""
        for parameter, view, blank in self._views:
            parameter.data = view if views else blank

    def _clear(self) -> None:
        self._running.clear()
        self.backward_is_over()

    def _watch(self, module: nn.Module, names: set[str], root: nn.Module) -> None:
        places = frozenset(self._place[name] for name in names)
        trainable = {name for name in names if root.get_parameter(name).requires_grad}
        by_place = {place: {name for name in trainable if self._place[name] == place} for place in places}

        def enter(*_: Any) -> None:
            if not self.executor.active:
                return
            self._running.append(places)
            if torch._C._current_graph_task_id() != -1:
                for place, waits_for in by_place.items():
                    self._until_gradients.setdefault(place, set()).update(waits_for or {""})
            self._use(places)

        def leave(*_: Any) -> None:
            if self._running:
                self._running.pop()

        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave, always_call=True)

    def _asked(self, names: Mapping[int, str]) -> Callable[[Tensor], None]:
        def asked(parameter: Tensor) -> None:
            name = names.get(id(parameter))
            if self.executor.active and name in self._place:
                place = self._place[name]
                if not any(place in running for running in self._running):
                    self._use(frozenset((place,)))

        return asked

    def _came(self, name: str) -> Callable[[Tensor], None]:
        place = self._place[name]

        def came(_: Tensor) -> None:
            if (waits_for := self._until_gradients.get(place)) is not None:
                waits_for.discard(name)
                if not waits_for:
                    del self._until_gradients[place]

        return came

    def _use(self, places: frozenset[int]) -> None:
        self.executor.use(places.union(*self._running, self._until_gradients))

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        plain = tensor.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        place = self._storage.get(tensor.untyped_storage()._cdata) if plain else None
        if place is None:
            if self._activations is not None:
                self._activations.keep(tensor)
            return tensor
        return _Saved(place, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        node = torch._C._current_autograd_node()  # what it unpacks one after the other it uses together
        if node is None or node is not self._node:
            self._node, self._of_node = node, frozenset()
        self._of_node |= {saved.place}
        self._use(self._of_node)
        data = self._chunks[saved.place].data
        return data.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)


class _Asked(dict[str, Any]):
    """A module's parameters by name; says so when one is asked for."""

    def __init__(self, parameters: Mapping[str, Any], asked: Callable[[Tensor], None]) -> None:
        super().__init__(parameters)
        self._asked = asked

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._asked(parameter)
        return parameter


def _blank(parameter: Tensor) -> Tensor:
    """NaN (0 of integers) of the parameter's shape, in the memory of one element."""
    value = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
    return torch.full((), value, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def _names(module: nn.Module) -> dict[int, str]:
    """The first name of each parameter, by its identity."""
    return {id(parameter): name for name, parameter in module.named_parameters()}
