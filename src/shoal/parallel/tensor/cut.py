"""The record of what the rules made of each layer, printed by `print(engine.tensor_layers)` and `shoal plan job.toml
--memory`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class CutLayer:
    """A module and how it was cut.

    kind: the kind that the rules give it
    whole: shape of its weight before; of attention the numbers of heads (queries, keys and values)
    own: the same numbers for this rank
    """

    name: str
    kind: str
    whole: tuple[int, ...]
    own: tuple[int, ...]


@dataclass(frozen=True)
class CutLayers:
    """All modules that have weights of their own or that a rule names, in the order of the model.

    As text it is a table, in which layers that differ only by the numbers in their names are one line.
    """

    layers: tuple[CutLayer, ...] = ()

    def __str__(self) -> str:
        alike = Counter(
            (re.sub(r"\b\d+\b", "*", each.name) or "(model)", each.kind, *map(_shape, (each.whole, each.own)))
            for each in self.layers
        )
        rows = [
            (*row, f"{number} layers" if number > 1 else "")
            for row, number in [(("layer", "kind", "whole", "on a rank"), 1), *alike.items()]
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join(
            "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "-"
