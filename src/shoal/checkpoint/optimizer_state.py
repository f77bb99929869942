"""The state of the optimizer in a checkpoint: tensors by parameter, and options and counters as JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shoal.checkpoint.given import as_json, options_to_go_on, state_that_fits
from shoal.checkpoint.pieces import Want, wants_of
from shoal.checkpoint.role import WriterRole
from shoal.comm import Group
from shoal.native.heap import in_large_pages
from shoal.optim.groups import CHOICES, goes_with_parameter
from shoal.optim.optimizer import ChunkOptimizer

NUMBERS = frozenset({"step", "mu_product", "mu", "eta"})
"""What torch's optimizers keep beside a parameter as a single number, also beside one that is a single number itself:
steps of most, NAdam's product of momenta, the course of ASGD."""


def in_the_form_of(fresh: Any, saved: Any) -> Any:
    """Returns `saved`, which went through JSON, with the types of `fresh`: number keys, tuples, classes of mappings."""
    if isinstance(fresh, Mapping) and isinstance(saved, Mapping):
        numbers = bool(fresh) and all(isinstance(key, int) for key in fresh)
        back = {int(key) if numbers else key: value for key, value in saved.items()}
        return type(fresh)(  # type: ignore[call-arg]
            {key: in_the_form_of(fresh.get(key), value) for key, value in back.items()}
        )
    if isinstance(fresh, (list, tuple)) and isinstance(saved, list):
        if len(fresh) != len(saved):
            return type(fresh)(saved)
        return type(fresh)(in_the_form_of(a, b) for a, b in zip(fresh, saved, strict=True))
    return saved


def plain_numbers(options: Any) -> Any:
    """Returns options, or the state of a schedule, with numbers for tensors, for JSON."""
    return tree_map_only(Tensor, Tensor.tolist, options)


def optimizer_extra(optimizer: ChunkOptimizer, owners: Group | None, across: Group | None = None) -> dict[str, Any]:
    """Returns options and plain values of the optimizer, for JSON. Collective over both groups.

    optimizer: of this rank
    owners: the ranks that have the parts of its state; None: it is whole
    across: the ranks that have other pipeline stages; None: there are none
    """
    groups = [
        {
            "members": members,
            "options": plain_numbers({key: value for key, value in group.items() if key not in ("params", *CHOICES)}),
            "given": as_json(given),
        }
        for members, group, given in zip(optimizer.members, optimizer.torch.param_groups, optimizer.given, strict=True)
    ]
    plain = {
        name: {
            key: value
            for key, value in optimizer.torch.state.get(parameter, {}).items()
            if not isinstance(value, Tensor)
        }
        for name, parameter in optimizer.known.items()
    }
    plain = {name: values for name, values in plain.items() if values}
    for theirs in owners.all_gather_object(plain) if owners is not None else ():
        plain.update(theirs)
    if across is not None:
        stages = across.all_gather_object((groups, plain))
        groups = [group for theirs, _ in stages for group in theirs]
        plain = {name: values for _, theirs in stages for name, values in theirs.items()}
    return {"groups": groups, "optim": plain, "optimizer": optimizer.kind}


def that_fits(
    about: Mapping[str, Any], optimizer: ChunkOptimizer, saved: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[int, ...]], dict[str, dict[str, Any]], str]:
    """Returns the `saved` tensors and the plain values of the JSON state `about`, without optimizer state that
    `optimizer` does not take over, and a line about that."""
    keys, anew = state_that_fits(optimizer, about, saved)
    kept = {
        title: shape
        for title, shape in saved.items()
        if not _is_optimizer_state(title) or title.rpartition(".")[2] in keys
    }
    plain = {name: {key: value for key, value in each.items() if key in keys} for name, each in about["optim"].items()}
    return kept, plain, anew


def _is_optimizer_state(title: str) -> bool:
    return (title.split(".", 2)[2] if title.startswith("replica.") else title).startswith("optim.")


def states_wanted(
    optimizer: ChunkOptimizer, states: Mapping[str, Mapping[str, Tensor]], role: WriterRole, own: str
) -> list[Want]:
    wants = []
    for name, values in states.items():
        for key, tensor in values.items():
            slot = optimizer.slots[name]
            layout = role.layout(name, tensor, slot)
            start = slot.start if layout is role.layouts[name] else 0
            wants += wants_of(f"{own}optim.{name}.{key}", layout, tensor, start)
    return wants


def small_state(optimizer: ChunkOptimizer) -> dict[str, Tensor]:
    """Returns the optimizer state outside of pages, which a generation on the disk needs besides pages and buffers."""
    paged = {(name, key) for page in optimizer.pages for name, keys in page.known().items() for key in keys}
    return {
        f"optim.{name}.{key}": value
        for name, parameter in optimizer.known.items()
        for key, value in optimizer.torch.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and (name, key) not in paged
    }


def empty_states(
    saved: Mapping[str, tuple[int, ...]], optimizer: ChunkOptimizer, role: WriterRole, own: str, names: Collection[str]
) -> dict[str, dict[str, Tensor]]:
    """Returns tensors without values yet, to read the saved state of the parameters `names` into, by parameter and
    key."""
    states: dict[str, dict[str, Tensor]] = {}
    for title, shape in saved.items():
        name, _, key = title.removeprefix(f"{own}optim.").rpartition(".")
        if name not in names or not title.startswith(f"{own}optim."):
            continue
        like = optimizer.known[name]
        if key not in NUMBERS and shape == role.layouts[name].shape:
            empty = in_large_pages(torch.empty(optimizer.slots[name].shape, dtype=like.dtype, device=like.device))
        else:  # torch counts steps in fp32, and has the rest in the parameter's dtype
            empty = torch.empty(shape, dtype=like.dtype if like.dtype == torch.float64 and key != "step" else None)
        states.setdefault(name, {})[key] = empty
    return states


def put_back(optimizer: ChunkOptimizer, states: Mapping[str, dict[str, Tensor]], extra: Mapping[str, Any]) -> None:
    """Hands the state to the optimizer through its own `load_state_dict`, which knows where each key belongs."""
    saved = {name: group for group in extra["groups"] for name in group["members"]}
    names = {id(parameter): name for name, parameter in optimizer.known.items()}
    current = optimizer.torch.state_dict()
    state: dict[int, dict[str, Any]] = {}
    described = zip(
        optimizer.torch.param_groups, current["param_groups"], optimizer.members, optimizer.given, strict=True
    )
    for group, packed, members, given in described:
        packed.update(deepcopy(given))
        if members[0] in saved:
            packed.update(options_to_go_on(packed, saved[members[0]], given))
        for parameter, index in zip(group["params"], packed["params"], strict=True):
            name = names[id(parameter)]
            values = {**states.get(name, {}), **extra["optim"].get(name, {})}
            if values:
                state[index] = values
    handle = optimizer.torch.register_load_state_dict_post_hook(_with_numbers_of_torch(optimizer))
    try:
        optimizer.torch.load_state_dict({"state": state, "param_groups": current["param_groups"]})
    finally:
        handle.remove()


def _with_numbers_of_torch(optimizer: ChunkOptimizer) -> Callable[[torch.optim.Optimizer], None]:
    """Returns what gives single numbers beside a parameter, such as NAdam's product of momenta, the dtype again in
    which torch's optimizers make them: loaded they have the parameter's, and a run in fp64 would go on otherwise."""
    is_of_torch = hasattr(torch.optim, optimizer.kind)
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32

    def put(loaded: torch.optim.Optimizer) -> None:
        for values in loaded.state.values() if is_of_torch else ():
            for key, value in values.items():
                if key in NUMBERS and isinstance(value, Tensor):
                    values[key] = value.to(dtype)

    return put


def put_back_of(
    names: Collection[str], optimizer: ChunkOptimizer, states: Mapping[str, dict[str, Tensor]], extra: Mapping[str, Any]
) -> None:
    """Hands the optimizer the state of the parameters `names` alone, each value where it would have made it."""
    groups = {id(parameter): group for group in optimizer.torch.param_groups for parameter in group["params"]}
    for name in names:
        parameter = optimizer.known[name]
        group, values = groups[id(parameter)], {**states.get(name, {}), **extra["optim"].get(name, {})}
        optimizer.torch.state[parameter] = {
            key: value.to(parameter.device) if isinstance(value, Tensor) and goes_with_parameter(key, group) else value
            for key, value in values.items()
        }
    _with_numbers_of_torch(optimizer)(optimizer.torch)
