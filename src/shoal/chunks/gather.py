"""Weights that are whole only while they are used (ZeRO 3 where ranks share no memory): hooks say when.

    forward     a module that is about to run, or an access to a parameter, says what is needed
    backward    autograd asks for the weight that it saved: kept is only which part of which chunk it was

What a module asked for stays while it runs, its own weights from the beginning; what the loss function itself asks for, while it runs. Those of a module
that runs again in the middle of a backward (recompute) stay until their gradients have come, since what was saved then is out of our hands; frozen ones
until the end of that backward.

Between passes a parameter shows NaN of its shape, so that who reads it there by mistake neither reads freed memory nor goes on unnoticed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.chunks.activations import Activations
from shoal.chunks.activations_on_host import OnHost, Saved, check_unchanged
from shoal.chunks.chunk import Chunk
from shoal.chunks.executor import Executor
from shoal.chunks.tier import Tier
from shoal.chunks.weakly import weakly
from shoal.errors import UserError


@dataclass(frozen=True)
class _Saved:
    """A view of a chunk's data that autograd has saved."""

    place: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Kept:
    """What else autograd has saved, and its version then."""

    tensor: Tensor
    version: int


class Passing:
    """Watches `module`, whose parameters are views of `chunks` among others, and asks `executor` for those in time.

    `together`: modules that run as one, since hooks inside them would be compiled. `tier`: where what backward keeps is counted, on a CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        chunks: Sequence[Chunk],
        executor: Executor,
        together: Sequence[nn.Module],
        tier: Tier | None = None,
        on_host: Callable[[Activations | None], OnHost] | None = None,
    ) -> None:
        self._chunks, self.executor = chunks, executor
        self._place = {slot.name: place for place, chunk in enumerate(chunks) for slot in chunk.slots}
        self._storage = {chunk.data.untyped_storage()._cdata: place for place, chunk in enumerate(chunks)}
        self._always = {p.untyped_storage()._cdata for name, p in module.named_parameters() if name not in self._place}
        self._activations = Activations(tier) if tier is not None and tier.device.type == "cpu" else None
        self.on_host = on_host(self._activations) if on_host is not None else None
        self._running: list[set[int]] = []  # what the loss and the modules whose forward is under way asked for, innermost last
        self._until_gradients: dict[int, set[str]] = {}
        self._node: Any = None
        self._of_node: frozenset[int] = frozenset()
        self._all_there, self._is_aside = 0, False
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
        self._views = {name: (p, p.detach(), _blank(p)) for name, p in module.named_parameters() if name in self._place}
        self._needs: dict[nn.Module, set[str]] = {}
        self._show(False)
        closed = {id(inner) for outer in together for inner in outer.modules() if inner is not outer}
        for each in module.modules():
            if id(each) in closed:
                continue
            as_one = any(each is outer for outer in together) or isinstance(each, nn.RNNBase)
            needs = {self._names[id(p)] for p in each.parameters(recurse=as_one)} & self._place.keys()
            runs_alone = as_one or all(child is each for child in each.modules())
            self._needs[each] = needs if runs_alone else set()
            each.register_forward_pre_hook(self._enter, prepend=True)
            each.register_forward_hook(self._leave, always_call=True)
            if not as_one:
                each._parameters = _Asked(each._parameters, self._asked)
        for name, parameter in module.named_parameters():
            if name in self._place and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(weakly(self._came), name))

    @contextmanager
    def step(self, kind: Hashable) -> Iterator[None]:
        """Around a pass that is the same each time for the same `kind`: all microbatches of a step, or an evaluation."""
        if self._all_there:
            if torch.is_grad_enabled():
                raise UserError("a step inside engine.whole_weights(): it would not see what it updates. Train outside")
            yield
            return
        self.begin(kind)
        try:
            with self.watching():
                yield
        except BaseException:
            self.abandon()
            raise
        self.end()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, forwards are no part of a pass and are for shapes alone: their weights are zeros, all in the same memory. (Blank ones, of one element, not every kernel takes.)"""
        largest: dict[torch.dtype, int] = {}
        for _, view, _ in self._views.values():
            largest[view.dtype] = max(view.numel(), largest.get(view.dtype, 0))
        zeros = {dtype: torch.zeros(numel, dtype=dtype, device=self._chunks[0].data.device) for dtype, numel in largest.items()}
        for parameter, view, _ in self._views.values():
            parameter.data = zeros[view.dtype][: view.numel()].view(view.shape)
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False
            self._show(self.executor.active or bool(self._all_there))

    def left(self) -> None:
        """The forward that ran is over, in the middle of modules: an exception that no hook sees has ended it."""
        del self._running[1:]

    def begin(self, kind: Hashable) -> None:
        """A pass begins, for those whose passes are no block of code: forwards `watching` and backwards, until `end` or `abandon`."""
        if not self._all_there:
            self._show(True)
            self._running.append(set())
            self.executor.begin(kind)

    def watching(self) -> AbstractContextManager[Any]:
        """Around what makes a graph: autograd keeps of weights only where they lie."""
        return nullcontext() if self._all_there else torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def end(self) -> None:
        """The pass is over. Raises BudgetExceeded if it was the first of its kind and needs more than there is."""
        try:
            self._clear()
            if self.executor.active:
                self.executor.end()
        finally:
            self._show(bool(self._all_there))

    def abandon(self) -> None:
        """The pass was cut short: nothing is learned from it."""
        self._clear()
        self.executor.forget()
        self._show(bool(self._all_there))

    def backward_is_over(self) -> None:
        """Nothing is needed any more of what the loss function asked for, or of what this backward recomputed."""
        if self._running:
            self._running[0].clear()
        self._until_gradients.clear()
        self._node, self._of_node = None, frozenset()
        if self.on_host is not None:
            self.on_host.begin()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, all weights are there. All ranks come alike."""
        if self.executor.active:
            raise UserError("all weights are asked for in the middle of a step: do it between steps")
        if not self._all_there:
            for chunk in self._passing():
                chunk.open()
                chunk.fill()
            self._show(True)
        self._all_there += 1
        try:
            yield
        finally:
            self._all_there -= 1
            if not self._all_there:
                self._show(False)
                for chunk in self._passing():
                    chunk.let_go()

    def _passing(self) -> list[Chunk]:
        return [chunk for chunk in self._chunks if chunk.passes]

    def stays(self, chunk: Chunk) -> None:
        """The weights of `chunk` are always there from now on."""
        place = self._chunks.index(chunk)
        storage = chunk.data.untyped_storage()._cdata
        del self._storage[storage]
        self._always.add(storage)
        for slot in chunk.slots:
            del self._place[slot.name]
            parameter, view, _ = self._views.pop(slot.name)
            parameter.data = view
            for needs in self._needs.values():
                needs.discard(slot.name)
        self.executor.forget_block(place)

    def again(self, module: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Makes contexts for a second forward of `module`, whose hooks do not run then."""
        return partial(self._again, module)

    @contextmanager
    def _again(self, module: nn.Module) -> Iterator[None]:
        self._enter(module)
        try:
            yield
        finally:
            self._leave()

    def _show(self, views: bool) -> None:
        """Parameters are views of their chunks, or blank."""
        for parameter, view, blank in self._views.values():
            parameter.data = view if views else blank

    def __deepcopy__(self, _: Any) -> Passing:
        """A copy of the module is watched no more, but the hooks that it copies need somebody."""
        return self

    def _clear(self) -> None:
        self._running.clear()
        self.backward_is_over()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if self.executor.active and not self._is_aside:
            self._running.append(set())
            self._ask(self._needs.get(module, set()))

    def _leave(self, *_: Any) -> None:
        if self.executor.active and len(self._running) > 1 and not self._is_aside:
            self._running.pop()

    def _asked(self, parameter: Tensor) -> None:
        """A module's parameter was read, by whomever."""
        name = self._names.get(id(parameter))
        if self.executor.active and name in self._place and not self._is_aside:
            self._ask({name})

    def _ask(self, names: set[str]) -> None:
        """`names` are needed while what runs now goes on; in a second forward, until their gradients have come."""
        if not names:
            return
        places = {self._place[name] for name in names}
        in_backward = torch._C._current_graph_task_id() != -1
        for name in names if in_backward else ():
            self._until_gradients.setdefault(self._place[name], set()).add("" if name in self._frozen else name)
        are_held = places <= set().union(*self._running)
        self._running[-1] |= places
        if in_backward or not are_held:
            self._use(places)

    def _came(self, name: str, _: Tensor) -> None:
        place = self._place.get(name, -1)
        if (waits_for := self._until_gradients.get(place)) is not None:
            waits_for.discard(name)
            if not waits_for:
                del self._until_gradients[place]

    def _use(self, places: Iterable[int]) -> None:
        if not self.executor.active:
            raise UserError(
                "backward asks for weights of a step that is over: keep no graph beyond the loss function that made it"
            )
        self.executor.use(frozenset(places).union(*self._running, self._until_gradients))

    def _pack(self, tensor: Tensor) -> Tensor | _Kept | _Saved | Saved:
        plain = tensor.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        storage = tensor.untyped_storage()._cdata if plain else 0
        place = self._storage.get(storage)
        lazy = plain and (tensor.is_conj() or tensor.is_neg())
        if place is not None and lazy:
            return tensor.detach().resolve_conj().resolve_neg()
        if place is None:
            kept = tensor.detach()  # itself it would keep its own graph alive
            if not plain or storage in self._always:
                return kept
            here = not lazy and kept.device == self._chunks[0].data.device
            if here and self.on_host is not None and (away := self.on_host.save(kept)):
                return away
            if self._activations is not None:
                self._activations.keep(kept)
            return _Kept(kept, kept._version)
        return _Saved(place, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Tensor | _Kept | _Saved | Saved) -> Tensor:
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
            assert self.on_host is not None
            return self.on_host.restore(saved, self._chunks[0].data.device, first)
        self._of_node |= {saved.place}
        self._use(self._of_node)
        data = self._chunks[saved.place].data
        return data.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)


class _Asked(dict[str, Any]):
    """A module's parameters by name; says so when one is asked for."""

    def __init__(self, parameters: Mapping[str, Any], asked: Callable[[Tensor], None]) -> None:
        super().__init__(parameters)
        self._asked = asked

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {name: copy.deepcopy(parameter, memo) for name, parameter in super().items()}

    def _told(self, parameter: Any) -> Any:
        if parameter is not None:
            self._asked(parameter)
        return parameter

    def __getitem__(self, name: str) -> Any:
        return self._told(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._told(super().get(name, default)) if name in self else default

    def values(self) -> Any:
        return (self._told(parameter) for parameter in super().values())

    def items(self) -> Any:
        return ((name, self._told(parameter)) for name, parameter in super().items())


def _blank(parameter: Tensor) -> Tensor:
    """NaN (0 of integers) of the parameter's shape, in the memory of one element."""
    value = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
    return torch.full((), value, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
