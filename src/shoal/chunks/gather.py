"""Weights that are whole only while they are used (ZeRO 3 where ranks share no memory, offload): hooks say when.

    forward     a module that is about to run, or an access to a parameter, says what is needed
    backward    autograd asks for the weight that it saved (see `saved`)

What a module asks for stays while its forward runs; what the loss function itself asks for stays for the whole
microbatch. Weights of a module that runs again during backward (recompute) stay until their gradients have come, since
another implementation then holds what was saved (see `until_gradients`); frozen ones stay until that backward ends.

Between passes a parameter shows NaN of its shape: reading it there by mistake neither touches freed memory nor goes
unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.chunks.activations import Activations
from shoal.chunks.activations_on_host import OnHost
from shoal.chunks.asked import Asked, attributes
from shoal.chunks.chunk import Chunk
from shoal.chunks.executor import Executor
from shoal.chunks.saved import SavedTensors
from shoal.chunks.tier import Tier
from shoal.chunks.until_gradients import UntilGradients
from shoal.chunks.weakly import weakly
from shoal.chunks.written import Copies, blank, inside_whole_weights, left_blank, one_of
from shoal.errors import UserError
from shoal.module.record import storage_of
from shoal.module.scripted import is_scripted, scripted_parts


class Gather:
    """Watches `module` and asks `executor` for the weights that it needs, in time.

    - `chunks`: whose weights are gathered; the module may have others
    - `together`: modules that run as one, since hooks inside them would be compiled
    - `tier`: where what backward keeps is counted, on a CPU
    - `on_host`: makes what takes a part of that to the host
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
        self._index = {slot.name: index for index, chunk in enumerate(chunks) for slot in chunk.slots}
        always = {storage_of(p) for name, p in module.named_parameters() if name not in self._index}
        activations = Activations(tier) if tier is not None and tier.device.type == "cpu" else None
        away = on_host(activations) if on_host is not None else None
        # what the loss and the modules whose forward is under way asked for, innermost last
        self._running: list[set[int]] = []
        self._saved = SavedTensors(chunks, always, self._running, weakly(self._use), activations, away)
        self._all_there, self._is_aside = 0, False
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
        self._until_gradients = UntilGradients(self._index, frozen)
        self._views = {name: (p, p.detach(), blank(p)) for name, p in module.named_parameters() if name in self._index}
        self._needs: dict[nn.Module, set[str]] = {}
        self._copies = Copies(chunks)
        self._show(False)
        lies_in = {storage_of(chunk.data): chunk.slots[0].name for chunk in chunks}

        def whose(kept: Tensor) -> str:
            """Names a parameter with which a tensor that a module keeps comes into memory; "" for none."""
            return self._names.get(id(kept)) or lies_in.get(storage_of(kept), "")

        closed = {id(inner) for outer in together for inner in outer.modules() if inner is not outer}
        closed |= {id(inner) for part in scripted_parts(module).values() for inner in part.modules()}
        for each in module.modules():
            if id(each) in closed:
                continue
            as_one = any(each is outer for outer in together) or isinstance(each, nn.RNNBase)
            needs = {self._names[id(p)] for p in each.parameters(recurse=as_one)} & self._index.keys()
            runs_alone = as_one or all(child is each for child in each.modules())
            kept = {whose(leaf) for inner in (each.modules() if as_one else [each]) for leaf in attributes(inner)}
            kept |= {self._names[id(p)] for child in each.children() if is_scripted(child) for p in child.parameters()}
            self._needs[each] = (needs if runs_alone else set()) | (kept & self._index.keys())
            each.register_forward_pre_hook(self._enter, prepend=True)
            each.register_forward_hook(self._leave, always_call=True)
            if not as_one:
                each._parameters = Asked(each._parameters, self._asked)
        for name, parameter in module.named_parameters():
            if name in self._index and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(weakly(self._came), name))

    @contextmanager
    def step(self, kind: Hashable) -> Iterator[None]:
        """Context of a pass, the same each time for the same `kind`: all microbatches of a step, or an evaluation."""
        if self._all_there and torch.is_grad_enabled():
            raise inside_whole_weights()
        if self._all_there or (self.executor.active and not torch.is_grad_enabled()):
            yield  # in the middle of a step of the caller's loop it is a part of that
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
        """Context of forwards for shapes alone, no part of a pass: all weights are zeros in the same memory.

        Not every kernel takes the blank ones of one element.
        """
        largest: dict[torch.dtype, int] = {}
        for _, view, _ in self._views.values():
            largest[view.dtype] = max(view.numel(), largest.get(view.dtype, 0))
        device = self._chunks[0].data.device
        zeros = {dtype: torch.zeros(numel, dtype=dtype, device=device) for dtype, numel in largest.items()}
        for parameter, view, _ in self._views.values():
            parameter.data = zeros[view.dtype][: view.numel()].view(view.shape)
        before = {name: parameter._version for name, (parameter, _, _) in self._views.items()}
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False
            if found := [name for name, version in before.items() if self._views[name][0]._version != version]:
                self._copies.found = one_of(found)
            self._show(self.executor.active or bool(self._all_there))

    def left(self) -> None:
        """Ends a stage's forward, in the middle of modules: an exception that no hook sees has ended it."""
        del self._running[1:]
        self._saved.forward_is_over()

    def begin(self, kind: Hashable) -> None:
        """Begins a pass that is no block of code: forwards `watching` and backwards, until `end` or `abandon`. Raises
        UserError inside `whole`."""
        if self._all_there:
            raise inside_whole_weights()
        self._show(True)
        self._running.append(set())
        self.executor.begin(kind)
        self._copies.begin()

    def watching(self) -> AbstractContextManager[Any]:
        """Context in which a graph is made: autograd keeps of weights only where they lie."""
        return nullcontext() if self._all_there else self._saved.watching()

    def end(self) -> None:
        """Ends the pass. Raises BudgetExceeded if it was the first of its kind and needs more than there is."""
        try:
            self._clear()
            if self.executor.active:
                self.executor.end()
            self._copies.found = self._copies.found or self._bound_anew()
            self._copies.check()
        finally:
            self._show(bool(self._all_there))

    def abandon(self) -> None:
        """Ends a pass that was cut short: nothing is learned from it."""
        self._clear()
        self.executor.forget()
        self._show(bool(self._all_there))

    def backward_begins(self) -> None:
        """Makes sure that no rank is in a forward that asks for weights."""
        self.executor.backward()

    def backward_is_over(self) -> None:
        """Forgets what the loss function asked for and what this backward recomputed."""
        if self._running:
            self._running[0].clear()
        self._until_gradients.clear()
        self._saved.backward_is_over()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which all weights are there; all ranks enter together."""
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
                self._copies.begin()
                for chunk in self._passing():
                    chunk.let_go()
        if self._copies.found:
            raise inside_whole_weights(self._copies.found)

    def _passing(self) -> list[Chunk]:
        return [chunk for chunk in self._chunks if chunk.passes]

    def stays(self, chunk: Chunk) -> None:
        """Leaves `chunk` alone from now on: its weights are always there."""
        index = self._chunks.index(chunk)
        self._saved.stays(chunk)
        for slot in chunk.slots:
            del self._index[slot.name]
            parameter, view, _ = self._views.pop(slot.name)
            parameter.data = view
            for needs in self._needs.values():
                needs.discard(slot.name)
        self.executor.forget_block(index)

    def again(self, module: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Makes contexts of a second forward of `module`, during which its hooks do not run."""
        return partial(self._again, module, torch._C._autograd._get_sequence_nr())

    @contextmanager
    def _again(self, module: nn.Module, begin: int) -> Iterator[None]:
        with self._until_gradients.of(begin):
            self._enter(module)
            try:
                yield
            finally:
                self._leave()

    def _bound_anew(self) -> str:
        """Names a parameter that somebody has bound to other memory; "" for none."""
        return next((name for name, (p, view, _) in self._views.items() if storage_of(p) != storage_of(view)), "")

    def between(self) -> AbstractContextManager[None]:
        """Context of what leaves weights alone. Raises UserError where it writes to one that is blank."""
        shown = {name: (each, none) for name, (each, _, none) in self._views.items()}
        return nullcontext() if self._all_there or self.executor.active else left_blank(shown)

    def _show(self, views: bool) -> None:
        """Makes parameters views of their chunks, or blank."""
        for parameter, view, none in self._views.values():
            parameter.data = view if views else none

    def __deepcopy__(self, _: Any) -> Gather:
        """Returns itself: the hooks that a copy of the module has need somebody, though it is not watched."""
        return self

    def _clear(self) -> None:
        self._running.clear()
        self.backward_is_over()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if self.executor.active and not self._is_aside:
            self._running.append(set())
            self._ask(self._needs.get(module, set()))

    def _leave(self, _: Any = None, __: Any = None, given: Any = None) -> None:
        """Ends what `_enter` began; weights of which `given`, what the module returns, has views stay for its
        caller."""
        if self.executor.active and len(self._running) > 1 and not self._is_aside:
            ended = self._running.pop()
            if ended:
                self._running[-1] |= ended & self._saved.chunks_of(given)

    def _asked(self, parameter: Tensor) -> None:
        """Notes that a module's parameter was read."""
        name = self._names.get(id(parameter))
        if self.executor.active and name in self._index and not self._is_aside:
            self._ask({name})

    def _ask(self, names: set[str]) -> None:
        """Asks for `names` while what runs now goes on; in a second forward, until their gradients have come."""
        if not names:
            return
        indices = {self._index[name] for name in names}
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            self._until_gradients.ask(names)
        are_held = indices <= set().union(*self._running)
        self._running[-1] |= indices
        if in_backward or not are_held:
            self._use(indices)

    def _came(self, name: str, _: Tensor) -> None:
        self._until_gradients.came(name)

    def _use(self, indices: Iterable[int]) -> None:
        if not self.executor.active:
            raise UserError(
                "backward asks for weights of a step that is over: keep no graph beyond the loss function that made it"
            )
        self.executor.use(frozenset(indices).union(*self._running, self._until_gradients))
