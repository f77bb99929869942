"""The cut that is found from a module's graph, as plain data; and how it is put on the module of a rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from shoal.parallel.tensor.graph.kinds import Buffers, Draws, Entered, Enters, Leaves, Stretches, Takes, Uses
from shoal.parallel.tensor.graph.local import set_attributes
from shoal.parallel.tensor.graph.multihead import Multihead
from shoal.parallel.tensor.layers import become
from shoal.parallel.tensor.own_parts import OwnParts
from shoal.parallel.tensor.piece import Piece
from shoal.parallel.tensor.region import Region
from shoal.parallel.tensor.spans import Span

T = TypeVar("T")
Parts = tuple[int, tuple[Stretches, ...]]
"""A dim, and the stretches of it that each rank has."""


@dataclass(frozen=True)
class Found:
    """What modules of a model become, by their names.

    kinds: "column", "row", "multihead", "head" and "vocabulary"
    parts: of parameters, by name, those of each rank
    patches: attributes that are set
    inside: parameters of which gradients are summed, as ranks use them on different activations
    entered: modules whose output enters the region
    sliced: arguments of which a rank takes a part, by their place
    buffers: buffers of which a rank uses a part
    draws: the parts of which dropouts are, in the order of their calls, by the module in which they are
    whole: why layers stay whole that a product could have been cut by
    gives: modules of which something cut comes out
    crossed: modules into which, or out of which, something goes that has the gradient of a part on each rank
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, Parts] = field(default_factory=dict)
    patches: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    inside: Mapping[str, frozenset[str]] = field(default_factory=dict)
    entered: Collection[str] = ()
    sliced: Mapping[str, Mapping[int, Piece]] = field(default_factory=dict)
    buffers: Mapping[str, Mapping[str, Parts]] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    draws: Mapping[str, Sequence[Piece | None]] = field(default_factory=dict)
    gives: Collection[str] = ()
    crossed: Collection[str] = ()

    @property
    def rules(self) -> dict[str, str]:
        """The layers that become what they do by rules: the vocabulary and the head."""
        return {name: kind for name, kind in self.kinds.items() if kind in ("head", "vocabulary")}

    def within(self, name: str) -> Found:
        """Returns what was found of the module `name`, by names in it."""
        if not name:
            return self

        def own(table: Mapping[str, T]) -> dict[str, T]:
            return {
                each.removeprefix(name).removeprefix("."): value
                for each, value in table.items()
                if f"{each}.".startswith(f"{name}.")
            }

        return Found(
            own(self.kinds),
            own(self.parts),
            own(self.patches),
            own(self.inside),
            list(own(dict.fromkeys(self.entered))),
            own(self.sliced),
            own(self.buffers),
            own(self.whole),
            own(self.draws),
        )

    def why(self, name: str) -> str:
        """Returns why a layer stays whole; "" if it does not, or if nothing is known of it."""
        return self.whole.get(name, "")

    def kind(self, name: str, module: nn.Module) -> str:
        """Returns the kind of a module for the table of layers; "" for one that stays as it is."""
        if name in self.kinds:
            return self.kinds[name]
        if any(f"{name}.{each}".lstrip(".") in self.parts for each, _ in module.named_parameters(recurse=False)):
            return "part"
        return "inside" if name in self.inside else ""

    def put_on(self, name: str, module: nn.Module, own: OwnParts, region: Region) -> None:
        """Makes of the module `name` what a rank of `region` has of it, and notes its parameters in `own`."""
        if name in self.rules:
            return
        for each, _ in list(module.named_parameters(recurse=False)):
            parts = self.parts.get(f"{name}.{each}".lstrip("."))
            if parts is not None:
                dim, by_rank = parts
                own.cut(name, module, each, dim, [Span(start, stop) for start, stop in by_rank[region.rank]])
        kind = self.kinds.get(name)
        if kind == "multihead":
            module._qkv_same_embed_dim = False  # type: ignore[assignment] # torch's fused layers take whole weights
            become(module, Multihead, _region=region)
        elif kind == "column":
            become(module, Enters, _region=region)
        elif kind == "row":
            become(module, Leaves, _region=region)
        set_attributes(module, self.patches.get(name, {}))
        if name in self.inside:
            become(module, Uses, _region=region, _shared=self.inside[name])
        if name in self.buffers:
            used = {each: (dim, by_rank[region.rank]) for each, (dim, by_rank) in self.buffers[name].items()}
            become(module, Buffers, _region=region, _used=used)
        if name in self.draws:
            become(module, Draws, _region=region, _order=tuple(self.draws[name]))
        if name in self.sliced:
            become(module, Takes, _region=region, _places=self.sliced[name])
        if name in self.entered:
            become(module, Entered, _region=region)
