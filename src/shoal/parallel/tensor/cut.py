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
    why: why it stays whole, where its own graph was asked
    """

    name: str
    kind: str
    whole: tuple[int, ...]
    own: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True)
class CutLayers:
    """All modules that have weights of their own or that a rule names, in the order of the model.

    As text it is a table, in which layers that differ only by the numbers in their names are one line; below it stands
    why a layer stays whole, where that is known.
    """

    layers: tuple[CutLayer, ...] = ()

    def __str__(self) -> str:
        rows_alike = Counter(
            (alike(each.name) or "(model)", each.kind, *map(_shape, (each.whole, each.own))) for each in self.layers
        )
        rows = [
            (*row, f"{number} layers" if number > 1 else "")
            for row, number in [(("layer", "kind", "whole", "on a rank"), 1), *rows_alike.items()]
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        reasons = {(alike(each.name), alike(each.why)): None for each in self.layers if each.why}
        return "\n".join([*lines, *(f"{name} stays whole: {why}" for name, why in reasons)])


def alike(name: str) -> str:
    """Returns a pattern of names that differ from `name` by its numbers alone."""
    return re.sub(r"(?<=\.)\d+\b", "*", name)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "-"
