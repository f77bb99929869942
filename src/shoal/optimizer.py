"""The optimizer's side of the chunks: parameter groups, fp32 masters, gradients as views, the apply of a committed step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.chunks import Chunk, Slot
from shoal.errors import UserError
from shoal.fused import FlatOptimizer, coupled, refusal
from shoal.fused.host_adam import HostAdam
from shoal.fused.optimizer import OptimizerFactory

GroupRule = Callable[[str, nn.Parameter], Mapping[str, Any]]


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


def needs_whole_parameters(factory: OptimizerFactory, options: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> bool:
    """Whether the optimizer of `factory` may not update a parameter in parts, as it looks at whole matrices (Muon, Adafactor, LAMB). Raises UserError if
    it looks at several parameters at once: then each replica must have all of them."""
    groups = [{**each, "params": [nn.Parameter(torch.zeros(2, 2, dtype=dtype))]} for each in options]
    if _is_fused(_make(factory, groups)) or refusal(factory, groups) is None:
        return False
    if (why := coupled(factory, groups)) is not None:
        raise UserError(
            f"plan.zero and plan.memory leave each parameter's update to one owner: {why}. Take plan.zero = 0 without plan.memory"
        )
    return True


class ChunkOptimizer:
    """A torch optimizer over the masters of `chunks`, of what this rank owns of them.

    `parameters[name]` is what it updates: the module's parameter itself, or a view of the fp32 master beside low-precision data. Its
    `.grad` is a view of the gradient chunk while it updates. `rows[name]` are those of a sparse gradient that are not zero (None: all), which
    SparseAdam gets as such; other optimizers do the same with the dense view. `fused` is switched on where the factory takes it and leaves it open.
    `turn`: the step of the next update, where rounding draws. `slots[name]` says which part of the parameter that is, where chunks are cut; `members` names each group's parameters, whoever owns them.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        chunks: Sequence[Chunk],
        module_parameters: Mapping[str, nn.Parameter],
        options: list[dict[str, Any]],
        member: Mapping[str, int],
    ) -> None:
        parameters: dict[str, nn.Parameter] = {}
        self.turn = -1
        self.rows: Mapping[str, Tensor | None] = {}
        self.slots: dict[str, Slot] = {}
        for chunk in chunks:
            owned = chunk.owned
            for slot in owned.slots:
                is_seen = not chunk.is_cut and chunk.master is chunk.data
                self.slots[slot.name] = slot
                parameters[slot.name] = module_parameters[slot.name] if is_seen else nn.Parameter(slot.view(owned.master))
        self._watch(chunks)
        self._parameters = {name: parameters[name] for name in module_parameters if name in parameters}
        trained = {slot.name for chunk in chunks for slot in chunk.slots}
        ordered = [name for name in module_parameters if name in trained]
        members = [[name for name in ordered if member[name] == index] for index in range(len(options))]
        groups = [
            {"params": [self.parameters[name] for name in names if name in self.parameters], **extra}
            for names, extra in zip(members, options, strict=True)
            if names
        ]
        self.members = [names for names in members if names]
        self.torch = _make(factory, groups)
        if self._owned and not _is_fused(self.torch):
            # with a stand-in for each group's parameters: every owner decides alike, also one that has none of a group
            like = self._owned[0].master
            stand_ins = [{**group, "params": [nn.Parameter(like.new_zeros(2, 2))]} for group in groups]
            if refusal(factory, stand_ins) is None:
                self.torch = FlatOptimizer(factory, groups, self._owned, self.parameters)
        self._host = self._host_step()
        fp32 = all(grad.dtype == torch.float32 for grad in self._grads.values())  # the scale that kernels take is fp32
        self._scales = fp32 and _is_fused(self.torch) and bool(getattr(self.torch, "_step_supports_amp_scaling", False))

    def _host_step(self) -> HostAdam | None:
        """Our own kernel in place of torch's fused one, where it does the same."""
        if not _is_fused(self.torch) or not HostAdam.takes(self.torch, self._owned):
            return None
        return HostAdam(self.torch, self._owned, self._parameters)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those of this rank by name, in the module's order. Masters that rest (see chunks.masters) are opened."""
        for owned in self._owned:
            _ = owned.master
        return self._parameters

    def _watch(self, chunks: Sequence[Chunk]) -> None:
        self._chunks, self._owned = chunks, [chunk.owned for chunk in chunks if chunk.owned.slots]
        self._grads = {slot.name: slot.view(owned.gradient) for owned in self._owned for slot in owned.slots}

    def follow(self, chunks: Sequence[Chunk]) -> None:
        """Goes on with other chunks of the same parameters, to which `chunks.move` has moved them."""
        self._watch(chunks)
        self.slots = {slot.name: slot for chunk in chunks for slot in chunk.owned.slots}
        if isinstance(self.torch, FlatOptimizer):
            self.torch.follow(self._owned)
        self._host = self._host_step()

    def apply(self, factor: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None:
        """Updates with gradients times `factor` (0-dim), then publishes the masters.

        `untouched` parameters are left alone, as torch leaves those whose gradient is None. `skip` (0-dim float, on the device)
        not zero leaves everything alone without the host having to know; only fused optimizers take it.
        """
        if self._host is not None:
            if skip is None or not bool(skip):
                self._host.step(float(factor), set(untouched))
            for chunk in self._chunks:
                chunk.publish(self.turn)
            return
        if self._scales:
            self.torch.grad_scale = factor.reciprocal().float()  # type: ignore[attr-defined]
            self.torch.found_inf = skip  # type: ignore[attr-defined]
        elif float(factor) != 1.0:
            for owned in self._owned:
                owned.gradient.mul_(factor)
        for name, parameter in self.parameters.items():
            parameter.grad = None if name in untouched else self._grads[name]
            rows = self.rows.get(name)
            if rows is not None and parameter.grad is not None and isinstance(self.torch, torch.optim.SparseAdam):
                parameter.grad = torch.sparse_coo_tensor(rows[None], parameter.grad[rows], parameter.shape, is_coalesced=True)
        self.torch.step()
        for parameter in self._parameters.values():
            parameter.grad = None  # autograd's next gradient must be its own tensor, not a sum into the chunk
        for chunk in self._chunks:
            chunk.publish(self.turn)

    def state_tensors(self) -> dict[tuple[str, str], Tensor]:
        """The tensors of the state by (parameter, key)."""
        return {
            (name, key): value
            for name, parameter in self._parameters.items()
            for key, value in self.torch.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    @property
    def skips_on_device(self) -> bool:
        """Whether `apply` honours `skip` without a wait of the host."""
        return self._scales

    def grad(self, name: str) -> Tensor:
        """The gradient's view in its chunk."""
        return self._grads[name]


def _make(factory: OptimizerFactory, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
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


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it runs torch's fused kernel; a subclass may do anything beside."""
    return type(optimizer).__module__.startswith("torch.optim.") and all(group.get("fused") for group in optimizer.param_groups)
