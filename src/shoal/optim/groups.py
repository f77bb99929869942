"""Parameter groups and their options, and what an optimizer is like, learned from a small one with the same options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.optim.fused import coupled, refusal
from shoal.optim.fused.host_adam import HostAdam
from shoal.optim.fused.optimizer import OptimizerFactory, per_element_keys
from shoal.optim.fused.trial import for_real

GroupRule = Callable[[str, nn.Parameter], Mapping[str, Any]]

CHOICES = ("fused", "foreach", "capturable", "differentiable")
"""Options that say how an optimizer runs here, not what it computes: never taken from a checkpoint."""


class ParamGroups(NamedTuple):
    """`options` of each group, and `member[name]`: the index of a parameter's group in them."""

    options: list[dict[str, Any]]
    member: Mapping[str, int]

    def members(self, names: Iterable[str]) -> list[list[str]]:
        """Divides `names` into groups; each keeps their order."""
        found: list[list[str]] = [[] for _ in self.options]
        for name in names:
            found[self.member[name]].append(name)
        return found


def decay_matrices_only(weight_decay: float) -> GroupRule:
    """Makes the usual rule of transformers: weight decay on tensors of two or more dimensions, not on biases, norms."""

    def rule(name: str, parameter: nn.Parameter) -> Mapping[str, Any]:
        return {"weight_decay": weight_decay if parameter.dim() >= 2 else 0.0}

    return rule


def group_options(names: Iterable[tuple[str, nn.Parameter]], rule: GroupRule | None) -> ParamGroups:
    """Groups parameters of equal options, in order of appearance."""
    groups: list[dict[str, Any]] = []
    member: dict[str, int] = {}
    for name, parameter in names:
        options = dict(rule(name, parameter)) if rule else {}
        if options not in groups:
            groups.append(options)
        member[name] = groups.index(options)
    return ParamGroups(groups, member)


def make_optimizer(factory: OptimizerFactory, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Calls `factory`, with `fused` switched on where it takes that and leaves it open. Raises UserError for what is no
    optimizer, or none that goes by one gradient."""
    try:
        open_choices = inspect.signature(factory).parameters
        takes_fused = "fused" in open_choices and open_choices["fused"].default in (None, False)
        chosen = getattr(factory, "keywords", {})
    except (TypeError, ValueError):
        takes_fused, chosen = False, {}
    if takes_fused and not {"fused", "foreach", "differentiable", "capturable"} & set(chosen):
        try:
            own = [dict(group) for group in groups]  # torch writes the choice into them, and would keep it below
            fused = factory(own, fused=True)  # type: ignore[call-arg]
        except (RuntimeError, ValueError, NotImplementedError):
            return factory(groups)  # this optimizer has no fused kernel for these dtypes or this device
        if type(fused) is torch.optim.SGD:
            if any(group["momentum"] and group["dampening"] for group in fused.param_groups):
                return factory(groups)  # which the first gradient of a parameter does not have
            fused.register_step_pre_hook(_begin_momentum)
        return fused
    _check_matrices(factory, groups)
    optimizer = factory(groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer gave a {type(optimizer).__name__}, not a torch.optim.Optimizer: "
            "pass e.g. partial(torch.optim.AdamW, lr=3e-4)"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"optimizer: {type(optimizer).__name__} evaluates the loss several times a step, and a step has one "
            "gradient of its global batch: take one that goes by that, e.g. partial(torch.optim.AdamW, lr=3e-4)"
        )
    return optimizer


def _check_matrices(factory: OptimizerFactory, groups: list[dict[str, Any]]) -> None:
    """Raises UserError where torch's Muon is given more than matrices, such as the biases and norms of most models."""
    if getattr(factory, "func", factory) is not torch.optim.Muon:
        return
    shapes = [tuple(each.shape) for group in groups for each in group["params"] if each.dim() != 2]
    if shapes:
        raise UserError(
            f"optimizer: torch's Muon takes matrices alone, and {len(shapes)} parameters are none, such as one of "
            f"shape {shapes[0]}: give a factory of an optimizer of your own that updates those another way, or train "
            "matrices alone (requires_grad_(False) of the others)"
        )


def _begin_momentum(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Begins the momentum of parameters that get their first gradient after others: torch's fused SGD takes it of all
    of them, or of none."""
    state = optimizer.state  # of all chunks, where each has an optimizer of its own
    if all(each in state for group in optimizer.param_groups for each in group["params"]):
        return
    for group in optimizer.param_groups:
        due = [each for each in group["params"] if each.grad is not None] if group["momentum"] else []
        new = [each for each in due if state.get(each, {}).get("momentum_buffer") is None]
        for each in new if len(new) < len(due) else ():
            state[each]["momentum_buffer"] = torch.zeros_like(each)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it runs torch's fused kernel; a subclass may do anything beside."""
    return type(optimizer).__module__.startswith("torch.optim.") and all(
        group.get("fused") for group in optimizer.param_groups
    )


def goes_with_parameter(key: str, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer of torch has the state under `key` on the device of its parameter, of that `group`: a count
    of steps only where a kernel reads it there, else the host would wait for each."""
    return key != "step" or bool(group.get("fused") or group.get("capturable"))


def small_groups(options: Sequence[Mapping[str, Any]], like: Tensor) -> list[dict[str, Any]]:
    """Groups with the `options` of real ones, each over one small parameter like `like`."""
    return [{**each, "params": [nn.Parameter(like.clone())]} for each in options]


def small_optimizer(factory: OptimizerFactory, options: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
    """Makes the optimizer over one small parameter a group, to learn of which kind it is."""
    return make_optimizer(factory, small_groups(options, torch.zeros(2, 2)))


@for_real()
def state_keys(factory: OptimizerFactory, options: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> list[str]:
    """Keys of the optimizer's state under which each element of a parameter has a value."""
    return sorted(per_element_keys(factory, small_groups(options, torch.zeros(2, 2, dtype=dtype))))


@for_real()
def kept_for(factory: OptimizerFactory, options: Mapping[str, Any], dims: int) -> set[str]:
    """Keys of the state that the optimizer keeps for a parameter of `dims` dimensions, seen by updating a small one."""
    trial = nn.Parameter(torch.zeros([2] * dims))
    optimizer = make_optimizer(factory, [{**options, "params": [trial]}])
    for _ in range(2):
        grad = torch.zeros_like(trial)
        trial.grad = grad.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else grad
        optimizer.step()
    return set(optimizer.state[trial])


@for_real()
def moves_untouched(factory: OptimizerFactory, options: Mapping[str, Any]) -> bool:
    """Whether the optimizer changes rows of a matrix, or what it keeps of them, whose gradient is zero: by momentum,
    moments that decay, or weight decay. Seen by updating a small one, of which the second row has a gradient at first
    alone."""
    trial = nn.Parameter(torch.ones(2, 2))
    optimizer = make_optimizer(factory, [{**options, "params": [trial]}])
    seen: list[list[Tensor]] = []
    for second in (1.0, 0.0, 0.0):
        trial.grad = torch.tensor([[1.0, 1.0], [second, second]])
        optimizer.step()
        state = [value for value in optimizer.state[trial].values() if isinstance(value, Tensor) and value.dim()]
        if any(value.shape != trial.shape for value in state):
            return True
        seen.append([value[1].clone() for value in (trial.detach(), *state)])
    return not all(torch.equal(one, other) for one, other in zip(seen[0], seen[-1], strict=True))


def updates_on_host(factory: OptimizerFactory, options: Sequence[Mapping[str, Any]]) -> bool:
    """Whether our own kernel does the optimizer's work on the host, with fp32 masters."""
    optimizer = small_optimizer(factory, options)
    return is_fused(optimizer) and HostAdam.takes(optimizer, [])


@for_real()
def needs_whole_parameters(factory: OptimizerFactory, options: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> bool:
    """Whether the optimizer needs whole parameters, since it looks at matrices (Muon, Adafactor, LAMB).

    Raises UserError if it looks at several parameters at once: then each replica must have all of them.
    """
    groups = small_groups(options, torch.zeros(2, 2, dtype=dtype))
    if is_fused(make_optimizer(factory, groups)) or refusal(factory, groups) is None:
        return False
    if (why := coupled(factory, groups)) is not None:
        raise UserError(
            f"plan.tp, plan.ep, plan.zero and plan.memory leave each parameter's update to one owner: {why}. "
            "Take plan.dp alone"
        )
    return True
