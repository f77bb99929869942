"""Rotary embeddings of transformers whose frequencies follow the longest position of a microbatch ("dynamic",
"longrope"): a rank has a part of the positions, and would choose others than its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shoal.comm import Group

PURPOSE = "attention"
_KINDS = ("dynamic", "longrope")


def tell_the_longest(module: nn.Module, group: Group, is_open: Callable[[], bool]) -> None:
    """Has such parts of `module` see the longest position of the whole rows while some are open, of which the ranks of
    `group` have parts: as one more token, whose result is left out."""

    def longer(part: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not is_open():
            return None
        named = "position_ids" in kwargs
        positions: Tensor = kwargs["position_ids"] if named else args[1]
        own = positions.amax() if positions.numel() else positions.new_zeros(())
        longest = group.all_reduce(own, "max", PURPOSE)
        more = torch.cat([positions, longest.expand(*positions.shape[:-1], 1)], -1)
        return (args, {**kwargs, "position_ids": more}) if named else ((args[0], more, *args[2:]), kwargs)

    def without_it(part: nn.Module, args: Any, output: Any) -> Any:
        return tree_map_only(Tensor, lambda each: each[..., :-1, :], output) if is_open() else None

    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        each = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(isinstance(kind, str) and any(one in kind for one in _KINDS) for kind in each):
            part.register_forward_pre_hook(longer, with_kwargs=True)
            part.register_forward_hook(without_it)
