"""The optimizer's side of the chunks: parameter groups, fp32 masters, gradients as views, the apply of a committed step."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shoal.chunks import Chunk, Slot
from shoal.errors import UserError
from shoal.optim.fused import ChunkwiseOptimizer, FlatOptimizer, coupled, refusal
from shoal.optim.fused.host_adam import HostAdam
from shoal.optim.fused.optimizer import OptimizerFactory, per_element_keys
from shoal.optim.tiers.deferred_update import Later
from shoal.optim.tiers.page import Page
from shoal.optim.tiers.pager import Pager

GroupRule = Callable[[str, nn.Parameter], Mapping[str, Any]]

CHOICES = ("fused", "foreach", "capturable", "differentiable")
"""Options that say how an optimizer runs here, not what it computes: never taken from a checkpoint."""


def decay_matrices_only(weight_decay: float) -> GroupRule:
    """The usual rule for transformers: weight decay on tensors of two or more dimensions, none on biases and norms."""

    def rule(name: str, parameter: nn.Parameter) -> Mapping[str, Any]:
        return {"weight_decay": weight_decay if parameter.dim() >= 2 else 0.0}

    return rule


def group_options(
    names: Iterable[tuple[str, nn.Parameter]], rule: GroupRule | None
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Distinct options in order of appearance, and each parameter's index into them."""
    groups: list[dict[str, Any]] = []
    member: dict[str, int] = {}
    for name, parameter in names:
        options = dict(rule(name, parameter)) if rule else {}
        if options not in groups:
            groups.append(options)
        member[name] = groups.index(options)
    return groups, member


def state_keys(factory: OptimizerFactory, options: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> list[str]:
    """The keys of the optimizer's state under which each element of a parameter has a value."""
    return sorted(per_element_keys(factory, _small_groups(options, torch.zeros(2, 2, dtype=dtype))))


def _small_groups(options: Sequence[Mapping[str, Any]], like: Tensor) -> list[dict[str, Any]]:
    """Groups of an optimizer with the `options` of real ones, each over one small parameter like `like`."""
    return [{**each, "params": [nn.Parameter(like.clone())]} for each in options]


def small_optimizer(factory: OptimizerFactory, options: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer over one small parameter a group, to learn of which kind it is."""
    return make_optimizer(factory, _small_groups(options, torch.zeros(2, 2)))


def updates_on_host(factory: OptimizerFactory, options: Sequence[Mapping[str, Any]]) -> bool:
    """Whether our own kernel does the optimizer's work on the host, with fp32 masters."""
    optimizer = small_optimizer(factory, options)
    return is_fused(optimizer) and HostAdam.takes(optimizer, [])


def needs_whole_parameters(factory: OptimizerFactory, options: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> bool:
    """Whether the optimizer of `factory` may not update a parameter in parts, as it looks at whole matrices (Muon, Adafactor, LAMB).
    Raises UserError if it looks at several parameters at once: then each replica must have all of them."""
    groups = _small_groups(options, torch.zeros(2, 2, dtype=dtype))
    if is_fused(make_optimizer(factory, groups)) or refusal(factory, groups) is None:
        return False
    if (why := coupled(factory, groups)) is not None:
        raise UserError(
            f"plan.tp, plan.ep, plan.zero and plan.memory leave each parameter's update to one owner: {why}. Take plan.dp alone"
        )
    return True


class ChunkOptimizer:
    """A torch optimizer over the masters of `chunks`, of what this rank owns of them.

    `parameters[name]` is what it updates: the module's parameter itself, or a view of the fp32 master beside low-precision data. Its
    `.grad` is a view of the gradient chunk while it updates. `rows[name]` are those of a sparse gradient that are not zero (None: all), which
    SparseAdam gets as such; other optimizers do the same with the dense view. `fused` is switched on where the factory takes it and leaves it open.
    `pager`: brings the masters and state of chunks that have pages on a disk. `chunkwise`: chunks are updated one after the other, with
    `later` while the next forward goes on already, until `settle`, which calls `settled` with it.
    `turn`: the step of the next update, where rounding draws. `slots[name]` says which part of the parameter that is, where chunks are
    cut; `members` names each group's parameters, whoever owns them.
    `clip_value`: the largest absolute value of an element of the gradient that it updates with.
    `given`: the options of each group as they were at first; `kind`: the class of the torch optimizer.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        chunks: Sequence[Chunk],
        module_parameters: Mapping[str, nn.Parameter],
        options: list[dict[str, Any]],
        member: Mapping[str, int],
        clip_value: float | None = None,
        pager: Pager | None = None,
        chunkwise: bool = False,
        later: Later | None = None,
        settled: Callable[[ChunkOptimizer], None] | None = None,
    ) -> None:
        parameters: dict[str, nn.Parameter] = {}
        self.turn, self._clip_value = -1, clip_value
        self.rows: Mapping[str, Tensor | None] = {}
        self.slots: dict[str, Slot] = {}
        self._pager, self._chunkwise = pager, chunkwise or pager is not None
        self._later, self._settled = later, settled
        away = {id(page.chunk) for page in self.pages if page.has_master}
        for chunk in chunks:
            owned = chunk.owned
            master = owned.master_like if id(owned) in away else owned.master
            for slot in owned.slots:
                is_seen = not chunk.is_cut and master is chunk.data
                self.slots[slot.name] = slot
                parameters[slot.name] = module_parameters[slot.name] if is_seen else nn.Parameter(slot.view(master))
        self._watch(chunks)
        self._parameters = {name: parameters[name] for name in module_parameters if name in parameters}
        trained = {slot.name for chunk in chunks for slot in chunk.slots}
        ordered = [name for name in module_parameters if name in trained]
        members = [[name for name in ordered if member[name] == index] for index in range(len(options))]
        groups = [
            {"params": [self._parameters[name] for name in names if name in self._parameters], **extra}
            for names, extra in zip(members, options, strict=True)
            if names
        ]
        self.members = [names for names in members if names]
        groups = groups or [{"params": [], **options[0]}]  # a stage of a pipeline in which nothing is trained
        self._factory = factory
        self.torch = self._choose(factory, groups)
        own = ("params", *CHOICES)
        self.given = [{key: copy(value) for key, value in each.items() if key not in own} for each in self.torch.param_groups]
        for page in self.pages:
            page.bind(self._parameters, lambda name: self.torch.state[self._parameters[name]])
        self._host = self._host_step()
        fp32 = all(grad.dtype == torch.float32 for grad in self._grads.values())  # the scale that kernels take is fp32
        self._scales = fp32 and is_fused(self._one) and bool(getattr(self._one, "_step_supports_amp_scaling", False))

    def _choose(self, factory: OptimizerFactory, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """torch's fused kernel, chunk after chunk where their state is not all in memory, flat, or as it is."""
        if self._chunkwise:
            parameters = [[self._parameters[slot.name] for slot in owned.slots] for owned in self._owned]
            return ChunkwiseOptimizer(partial(make_optimizer, factory), groups, parameters)
        optimizer = make_optimizer(factory, groups)
        if self._owned and not is_fused(optimizer):
            # with a stand-in for each group's parameters: every owner decides alike, also one that has none of a group
            stand_ins = _small_groups(groups, self._owned[0].master_like.new_zeros(2, 2))
            if refusal(factory, stand_ins) is None:
                return FlatOptimizer(factory, groups, self._owned, self.parameters)
        return optimizer

    def _host_step(self) -> HostAdam | None:
        """Our own kernel in place of torch's fused one, where it does the same."""
        one = self._one
        if not is_fused(one) or not HostAdam.takes(one, self._owned):
            return None
        return HostAdam(self.torch, self._parameters, decoupled=type(one) is torch.optim.AdamW)

    @property
    def _one(self) -> torch.optim.Optimizer:
        """The torch optimizer, or one of those of the chunks."""
        return self.torch.first if isinstance(self.torch, ChunkwiseOptimizer) else self.torch

    @property
    def kind(self) -> str:
        return type(self.torch.inner if isinstance(self.torch, FlatOptimizer) else self._one).__name__

    def keys_of(self, dims: int) -> set[str]:
        """What it keeps for a parameter of so many dimensions, from two updates of a small one."""
        trial = nn.Parameter(torch.zeros([2] * dims))
        optimizer = make_optimizer(self._factory, [{**self.given[0], "params": [trial]}])
        for _ in range(2):
            grad = torch.zeros_like(trial)
            trial.grad = grad.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else grad
            optimizer.step()
        return set(optimizer.state[trial])

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those of this rank by name, in the module's order. Masters that rest (see chunks.masters) are opened."""
        self.settle()
        for owned in self._owned:
            _ = owned.master
        return self._parameters

    @property
    def known(self) -> dict[str, nn.Parameter]:
        """The same as they are, for names, shapes and as keys: their values may be elsewhere."""
        return self._parameters

    def _watch(self, chunks: Sequence[Chunk]) -> None:
        self._chunks, self._owned = chunks, [chunk.owned for chunk in chunks if chunk.owned.slots]
        for chunk in chunks if self._later is not None else ():
            chunk.before_fill = self._later.wait_for  # type: ignore[union-attr]
        self._grads = {slot.name: slot.view(owned.gradient) for owned in self._owned for slot in owned.slots}

    def follow(self, chunks: Sequence[Chunk]) -> None:
        """Goes on with other chunks of the same parameters, to which `chunks.move` has moved them."""
        self._watch(chunks)
        self.slots = {slot.name: slot for chunk in chunks for slot in chunk.owned.slots}
        if isinstance(self.torch, FlatOptimizer):
            self.torch.follow(self._owned)
        self._host = self._host_step()

    @torch.no_grad()
    def stays(self, chunk: Chunk) -> None:
        """What is updated of `chunk` is on the device now, where its state goes too."""
        owned = chunk.owned
        for slot in owned.slots:
            parameter = self._parameters[slot.name]
            parameter.data = slot.view(owned.master)
            for value in self.torch.state.get(parameter, {}).values():
                if isinstance(value, Tensor):
                    value.data = value.to(owned.data.device)
            self._grads[slot.name] = slot.view(owned.gradient)
        chunk.rest()

    def apply(self, factor: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None:
        """Updates with gradients times `factor` (0-dim), then publishes the masters.

        `untouched` parameters are left alone, as torch leaves those whose gradient is None. `skip` (0-dim float, on the device)
        not zero leaves everything alone without the host having to know; only fused optimizers take it.
        """
        if self._host is None and not isinstance(self.torch, ChunkwiseOptimizer):
            self._update(self._owned, self._clip(self._owned, factor), skip, set(untouched))
            for chunk in self._chunks:
                chunk.publish(self.turn)
            return
        if skip is not None and bool(skip):
            return
        for updater in (self._host, self.torch):
            if isinstance(updater, HostAdam | ChunkwiseOptimizer):
                updater.begin()
        left_out = set(untouched)
        if self._later is None:
            deque(self._updates(self._chunks, factor, left_out), maxlen=0)
        else:
            deque(self._updates([chunk for chunk in self._chunks if not chunk.passes], factor, left_out), maxlen=0)
            waits = [chunk for chunk in self._chunks if chunk.passes]
            self._later.start(waits, self._updates(waits, factor, left_out))
        self.torch._opt_called = True  # type: ignore[attr-defined]  # what a schedule looks for

    def _updates(self, chunks: Sequence[Chunk], factor: Tensor, untouched: Collection[str]) -> Iterator[Chunk]:
        """Updates `chunks` one after the other, and gives each then: those of the deepest layers first, or in the order of the next
        forward, if that goes on meanwhile. What lies on a disk of one is there while it is its turn."""
        turn, places = self.turn, {id(owned): place for place, owned in enumerate(self._owned)}
        whole = {id(chunk.owned): chunk for chunk in chunks}
        away = [page for page in self.pages if id(page.chunk) in whole]
        here = [chunk for chunk in chunks if id(chunk.owned) not in {id(page.chunk) for page in away}]
        forward = self._later is not None
        in_turn = (whole[id(page.chunk)] for page in (self._pager.turn(forward) if self._pager is not None and away else ()))
        for chunk in chain(here[::-1], in_turn) if forward else chain(in_turn, here):  # on the disk is what is deepest
            if chunk.owned.slots:
                left = self._clip([chunk.owned], factor)
                if self._host is not None and chunk.owned.master_like.is_cpu:
                    self._host.step(chunk.owned, float(left), untouched)
                else:
                    self._update([chunk.owned], left, None, untouched, places[id(chunk.owned)])
            chunk.rest(turn)
            yield chunk
        for chunk in chunks:  # ranks wait for each other once all have updated what they own
            chunk.share()

    def _clip(self, owned: Sequence[Chunk], factor: Tensor) -> Tensor:
        """Clips each element of the gradients times `factor`, if that is asked for; returns what they are to be multiplied with yet."""
        if self._clip_value is None:
            return factor
        for each in owned:
            each.gradient.mul_(factor.to(each.gradient.device)).clamp_(-self._clip_value, self._clip_value)
        return torch.ones_like(factor)

    def end_of_step(self) -> None:
        """Settles, unless updates may go on in the next step."""
        if self._later is None:
            self.settle()

    def settle(self) -> None:
        """Returns when no update is under way."""
        if self._later is not None:
            self._later.settle()
        if self._settled is not None:
            self._settled(self)

    def close(self) -> None:
        """Ends what goes on beside the step."""
        if self._later is not None:
            try:
                self.settle()
            finally:
                self._later.close()

    def _update(
        self, owned: Sequence[Chunk], factor: Tensor, skip: Tensor | None, untouched: Collection[str], place: int | None = None
    ) -> None:
        """The torch optimizer's update of the chunks `owned`: all of them, or the one at `place`."""
        if self._scales:
            self.torch.grad_scale = factor.reciprocal().float()  # type: ignore[attr-defined]
            self.torch.found_inf = skip  # type: ignore[attr-defined]
        elif float(factor) != 1.0:
            for each in owned:
                each.gradient.mul_(factor.to(each.gradient.device))
        for each in owned:
            _ = each.master  # is there from here on
        parameters = {slot.name: self._parameters[slot.name] for each in owned for slot in each.slots}
        for name, parameter in parameters.items():
            parameter.grad = None if name in untouched else self._grads[name].to(parameter.device)
            rows = self.rows.get(name)
            if rows is not None and parameter.grad is not None and isinstance(self.torch, torch.optim.SparseAdam):
                parameter.grad = torch.sparse_coo_tensor(rows[None], parameter.grad[rows], parameter.shape, is_coalesced=True)
        if place is None:
            self.torch.step()
        else:
            assert isinstance(self.torch, ChunkwiseOptimizer)
            self.torch.step_chunk(place)
        for parameter in parameters.values():
            parameter.grad = None  # autograd's next gradient must be its own tensor, not a sum into the chunk

    def state_tensors(self) -> dict[tuple[str, str], Tensor]:
        """The tensors of the state by (parameter, key), for reading: of those on a disk as they lie there."""
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
        """What lies on a disk of the chunks that it updates."""
        return self._pager.pages if self._pager is not None else []

    def state_dict(self) -> dict[str, Any]:
        """The torch optimizer's, with copies of what lies on a disk."""
        self.settle()
        saved, names = self.torch.state_dict(), {id(parameter): name for name, parameter in self._parameters.items()}
        away = {at: value for page in self.pages for at, value in page.seen().items()}
        for group, packed in zip(self.torch.param_groups, saved["param_groups"], strict=True):
            for parameter, number in zip(group["params"], packed["params"], strict=True):
                values, name = saved["state"].get(number, {}), names[id(parameter)]
                whole = {key: away[name, key].clone() if (name, key) in away else value for key, value in values.items()}
                if whole:
                    saved["state"][number] = whole
        return saved

    def masters(self) -> dict[str, Tensor]:
        """Each parameter's master for reading, in the module's order: of those on a disk as they lie there."""
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
        """The gradient's view in its chunk."""
        return self._grads[name]


def make_optimizer(factory: OptimizerFactory, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    try:
        open_choices = inspect.signature(factory).parameters
        takes_fused = "fused" in open_choices and open_choices["fused"].default in (None, False)
        chosen = getattr(factory, "keywords", {})
    except (TypeError, ValueError):
        takes_fused, chosen = False, {}
    if takes_fused and not {"fused", "foreach", "differentiable", "capturable"} & set(chosen):
        try:
            return factory(groups, fused=True)  # type: ignore[call-arg]
        except (RuntimeError, ValueError, NotImplementedError):
            return factory(groups)  # this optimizer has no fused kernel for these dtypes or this device
    optimizer = factory(groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer gave a {type(optimizer).__name__}, not a torch.optim.Optimizer: pass e.g. partial(torch.optim.AdamW, lr=3e-4)"
        )
    return optimizer


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it runs torch's fused kernel; a subclass may do anything beside."""
    return type(optimizer).__module__.startswith("torch.optim.") and all(group.get("fused") for group in optimizer.param_groups)
