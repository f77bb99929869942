"""Optimizer over chunks: masters as parameters, gradients as views, the update of a committed step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shoal.chunks import Buffer, Chunk
from shoal.optim import choose
from shoal.optim.fused import ChunkwiseOptimizer, FlatOptimizer
from shoal.optim.fused.host_adam import HostAdam
from shoal.optim.fused.optimizer import OptimizerFactory
from shoal.optim.groups import CHOICES, ParamGroups, goes_with_parameter, kept_for
from shoal.optim.tiers.in_turn import InTurn
from shoal.optim.tiers.page import Page


class ChunkOptimizer:
    """A torch optimizer over the masters of `chunks`, of what this rank owns of them.

    - `factory`: makes the optimizer from a list of groups; its fused kernel is switched on where that is left open
    - `groups`: options, and which parameter of `module_parameters` has which
    - `clip_value`: the largest absolute value of an element of the gradient that it updates with
    - `in_turn`: chunks are updated one after the other, and this surrounds that; None: all at once

    For others:

    - `given`: the options of each group as they were at first
    - `members`: names of each group's parameters, whoever owns them
    - `slots[name]`: which part of the parameter this rank has, where chunks are cut
    - `rows[name]`: the rows of a sparse gradient that are not zero, None for all. SparseAdam gets them as such
    - `turn`: the step of the next update, a key of stochastic rounding
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        chunks: Sequence[Chunk],
        module_parameters: Mapping[str, nn.Parameter],
        groups: ParamGroups,
        clip_value: float | None = None,
        in_turn: InTurn | None = None,
    ) -> None:
        self.turn, self._clip_value, self._factory = -1, clip_value, factory
        self.rows: Mapping[str, Tensor | None] = {}
        self._unshared: Sequence[Chunk] = ()
        around = in_turn or InTurn()
        self._pager, self._deferred, self._settled = around.pager, around.deferred, around.settled
        self._watch(chunks)
        masters = self._masters_of(chunks, module_parameters)
        self._parameters = {name: masters[name] for name in module_parameters if name in masters}
        trained = {slot.name for chunk in chunks for slot in chunk.slots}
        members = groups.members(name for name in module_parameters if name in trained)
        self.members = [names for names in members if names]
        real: list[dict[str, Any]] = [
            {"params": [self._parameters[name] for name in names if name in self._parameters], **extra}
            for names, extra in zip(members, groups.options, strict=True)
            if names
        ]
        real = real or [{"params": [], **groups.options[0]}]  # a pipeline stage in which nothing is trained
        make = choose.at_once if in_turn is None else choose.chunkwise
        self.torch = choose.with_own_options(make(factory, real, self._owned, self._parameters))
        choose.check_options(groups.options, self.torch.defaults, self.kind)
        own = ("params", *CHOICES)
        self.given = [{k: deepcopy(v) for k, v in each.items() if k not in own} for each in self.torch.param_groups]
        for page in self.pages:
            page.bind(self._parameters, lambda name: self.torch.state[self._parameters[name]])
        self._host = choose.on_host(self.torch, self._owned, self._parameters)
        self._scales = choose.scales(self.torch, self._grads.values())

    def _masters_of(self, chunks: Sequence[Chunk], module: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Parameters to update, by name: the module's own where that is the master, else a view of the masters."""
        away = {id(page.chunk) for page in self.pages if page.has_master}
        found: dict[str, nn.Parameter] = {}
        for chunk in chunks:
            owned, is_seen = chunk.owned, not chunk.is_cut and chunk.owned.masters is None
            flat = owned.master_like if id(owned) in away else owned.master
            for slot in owned.slots:
                found[slot.name] = module[slot.name] if is_seen else nn.Parameter(slot.view(flat))
        return found

    @property
    def kind(self) -> str:
        """Class name of the user's torch optimizer."""
        return type(self.torch.inner if isinstance(self.torch, FlatOptimizer) else choose.one_of(self.torch)).__name__

    @property
    def kernel(self) -> str:
        """What runs its updates (see `choose`)."""
        return choose.kernel_of(self.torch, self._host)

    def keys_of(self, dims: int) -> set[str]:
        """Keys of the state that it keeps for a parameter of `dims` dimensions."""
        return kept_for(self._factory, self.given[0], dims)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that it updates on this rank, by name, in the module's order; masters that are closed open."""
        self.settle()
        for owned in self._owned:
            _ = owned.master
        return self._parameters

    @property
    def known(self) -> dict[str, nn.Parameter]:
        """`parameters` for names, shapes and as keys: their values may be elsewhere."""
        return self._parameters

    def _watch(self, chunks: Sequence[Chunk]) -> None:
        self._chunks, self._owned = chunks, [chunk.owned for chunk in chunks if chunk.owned.slots]
        for chunk in chunks if self._deferred is not None else ():
            chunk.before_fill = self._deferred.wait_for  # type: ignore[union-attr]
        self._grads = {slot.name: slot.view(owned.gradient) for owned in self._owned for slot in owned.slots}
        self.slots = {slot.name: slot for owned in self._owned for slot in owned.slots}

    def follow(self, chunks: Sequence[Chunk]) -> None:
        """Goes on with other chunks of the same parameters, to which `chunks.move` has moved them."""
        self._watch(chunks)
        if isinstance(self.torch, FlatOptimizer):
            self.torch.follow(self._owned)
        self._host = choose.on_host(self.torch, self._owned, self._parameters)

    @torch.no_grad()
    def stays(self, chunk: Chunk) -> None:
        """Follows `chunk`, which is on the device now (see Chunk.stay), with its parameters, gradients and state."""
        owned, group = chunk.owned, choose.one_of(self.torch).param_groups[0]
        for slot in owned.slots:
            parameter = self._parameters[slot.name]
            parameter.data = slot.view(owned.master)
            for key, value in self.torch.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and goes_with_parameter(key, group):
                    value.data = value.to(owned.data.device)
            self._grads[slot.name] = slot.view(owned.gradient)
        chunk.rest()

    def apply(self, factor: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None:
        """Updates what this rank owns with gradients times `factor` (0-dim); `share` brings the weights together.

        `untouched` parameters are left alone, as torch leaves those whose gradient is None. A `skip` (0-dim float, on
        the device) that is not zero leaves everything alone, and the host need not know; only fused optimizers take it.
        """
        self._unshared = self._chunks
        if self._host is None and not isinstance(self.torch, ChunkwiseOptimizer):
            self._update(self._owned, self._clip(self._owned, factor), skip, set(untouched))
            for chunk in self._chunks:
                chunk.rest(self.turn)
            return
        if skip is not None and bool(skip):
            return
        for updater in (self._host, self.torch):
            if isinstance(updater, HostAdam | ChunkwiseOptimizer):
                updater.begin()
        left_out, factor = set(untouched), factor.cpu()  # read beside the next forward, it would wait for that
        if self._deferred is None:
            deque(self._updates(self._chunks, factor, left_out), maxlen=0)
        else:
            deque(self._updates([chunk for chunk in self._chunks if not chunk.passes], factor, left_out), maxlen=0)
            waits = [chunk for chunk in self._chunks if chunk.passes]
            self._deferred.start(waits, self._updates(waits, factor, left_out))
        self.torch._opt_called = True  # type: ignore[attr-defined]  # what a schedule looks for

    def _updates(self, chunks: Sequence[Chunk], factor: Tensor, untouched: Collection[str]) -> Iterator[Chunk]:
        """Updates `chunks` one after the other and yields each: the deepest layers first or, beside the next forward,
        in its order. A page is in memory while it is the turn of its chunk."""
        turn, indices = self.turn, {id(owned): index for index, owned in enumerate(self._owned)}
        whole = {id(chunk.owned): chunk for chunk in chunks}
        away = [page for page in self.pages if id(page.chunk) in whole]
        here = [chunk for chunk in chunks if id(chunk.owned) not in {id(page.chunk) for page in away}]
        forward = self._deferred is not None
        pages = self._pager.turn(forward) if self._pager is not None and away else ()
        in_turn = (whole[id(page.chunk)] for page in pages)
        for chunk in chain(here[::-1], in_turn) if forward else chain(in_turn, here):  # on the disk is what is deepest
            if chunk.owned.slots:
                left = self._clip([chunk.owned], factor)
                if self._host is not None and chunk.owned.master_like.is_cpu:
                    self._host.step(chunk.owned, float(left), untouched)
                else:
                    self._update([chunk.owned], left, None, untouched, indices[id(chunk.owned)])
            chunk.rest(turn)
            yield chunk

    def share(self) -> None:
        """Brings the stretches of all ranks together that were updated since the last call; all of them call it."""
        shared, self._unshared = self._unshared, ()
        for chunk in shared:
            chunk.share()

    def _clip(self, owned: Sequence[Buffer], factor: Tensor) -> Tensor:
        """Clips each element of the gradients times `factor`, if that is asked for; returns the factor that is left."""
        if self._clip_value is None:
            return factor
        for each in owned:
            each.gradient.mul_(factor.to(each.gradient.device)).clamp_(-self._clip_value, self._clip_value)
        return torch.ones_like(factor)

    def end_of_step(self) -> None:
        """Settles, unless updates may go on in the next step."""
        if self._deferred is None:
            self.settle()

    def settle(self) -> None:
        """Returns when no update is under way."""
        if self._deferred is not None:
            self._deferred.settle()
        if self._settled is not None:
            self._settled(self)

    def close(self) -> None:
        """Ends what goes on beside the step."""
        if self._deferred is not None:
            try:
                self.settle()
            finally:
                self._deferred.close()

    def _update(
        self,
        owned: Sequence[Buffer],
        factor: Tensor,
        skip: Tensor | None,
        untouched: Collection[str],
        index: int | None = None,
    ) -> None:
        """Runs the torch optimizer over the chunks `owned`: all of them, or the one at `index`."""
        if self._scales:
            one: Any = self.torch
            one.grad_scale, one.found_inf = choose.beside_masters(owned, factor.reciprocal().float(), skip)
        elif float(factor) != 1.0:
            for each in owned:
                each.gradient.mul_(factor.to(each.gradient.device))
        for each in owned:
            _ = each.master  # is there from here on
        parameters = {slot.name: self._parameters[slot.name] for each in owned for slot in each.slots}
        for name, parameter in parameters.items():
            parameter.grad = None if name in untouched else self._grads[name].to(parameter.device)
            if name in self.rows and parameter.grad is not None and isinstance(self.torch, torch.optim.SparseAdam):
                parameter.grad = choose.by_rows(parameter.grad, self.rows[name])
        if index is None:
            self.torch.step()
        else:
            assert isinstance(self.torch, ChunkwiseOptimizer)
            self.torch.step_chunk(index)
        for parameter in parameters.values():
            parameter.grad = None  # autograd's next gradient must be its own tensor, not a sum into the chunk

    def state_tensors(self) -> dict[tuple[str, str], Tensor]:
        """Tensors of the state by (parameter, key), not to be changed: those on a disk as they lie there."""
        self.settle()
        states = {
            (name, key): value
            for name, parameter in self._parameters.items()
            for key, value in self.torch.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        for page in self.pages:
            states.update({at: value for at, value in page.seen().items() if at in states})
        return states

    @property
    def pages(self) -> Sequence[Page]:
        """Pages of the chunks that it updates."""
        return self._pager.pages if self._pager is not None else []

    def state_dict(self) -> dict[str, Any]:
        """State dict of the torch optimizer, with copies of what lies on a disk."""
        self.settle()
        saved, names = self.torch.state_dict(), {id(parameter): name for name, parameter in self._parameters.items()}
        away = {at: value for page in self.pages for at, value in page.seen().items()}
        for group, packed in zip(self.torch.param_groups, saved["param_groups"], strict=True):
            for parameter, number in zip(group["params"], packed["params"], strict=True):
                values, name = saved["state"].get(number, {}), names[id(parameter)]
                if values:
                    copies = {key: away[name, key].clone() for key in values if (name, key) in away}
                    saved["state"][number] = {**values, **copies}
        return saved

    def masters(self) -> dict[str, Tensor]:
        """Each parameter's master, in the module's order, not to be changed: those on a disk as they lie there."""
        self.settle()
        seen: dict[str, Tensor] = {}
        for owned in self._owned:
            flat = owned.master_to_read
            seen.update({slot.name: slot.view(flat) for slot in owned.slots})
        return {name: seen[name] for name in self._parameters}

    @property
    def skips_on_device(self) -> bool:
        """Whether `apply` honours `skip` without a wait of the host."""
        return self._scales

    def grad(self, name: str) -> Tensor:
        """View of the gradient in its chunk."""
        return self._grads[name]
