"""Learned positions, of which a model has more where its rows are longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from shoal.models.adapted import unadapted
from shoal.pipeline.units import Unit

SETTINGS = ("max_position_embeddings", "n_positions")
"""How configurations call the number of positions that a model has learned."""
BEFORE = 2
"""Rows of a table before the first position, as OPT and BART have them."""


class Positions(NamedTuple):
    """A table of learned positions: the part that has it, its rows, elements of each, and whether it is trained."""

    part: str
    rows: int
    width: int
    trained: bool


def positions_of(module: nn.Module, units: Sequence[Unit], sample: Mapping[str, Tensor]) -> tuple[Positions, ...]:
    """The tables of learned positions in the parts `units` of `module`: embeddings with a row for each token of
    `sample`, or each position that the model's configuration knows, and bare parameters with a dim of all tokens."""
    tokens, config = tokens_of(sample), getattr(unadapted(module), "config", None)
    known = [number for name in SETTINGS if isinstance(number := getattr(config, name, None), int)]
    numbers = {tokens, *known, *(number + BEFORE for number in known)}
    found = dict[int, Positions]()
    for unit in units:
        for owner in unit.module.modules():
            for name, each in owner.named_parameters(recurse=False):
                if isinstance(owner, nn.Embedding):
                    rows = each.shape[0] if each.shape[0] in numbers else 0
                else:  # a matrix may be as wide by chance
                    rows = tokens if name != "weight" and each.dim() > 1 and tokens in each.shape else 0
                if rows >= tokens > 1:
                    found.setdefault(id(each), Positions(unit.name, rows, each.numel() // rows, each.requires_grad))
    return tuple(found.values())


def tokens_of(sample: Mapping[str, Tensor]) -> int:
    """Tokens of a row; 0 where it has none."""
    return max((each.shape[0] for each in sample.values() if each.dim() == 1), default=0)
