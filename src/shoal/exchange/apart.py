"""One algorithm over several groups of ranks, for parameters that do not belong to all replicas alike.

Most chunks belong to the replicas of a model, or of a stage of it; others have a group of their own: the ranks with the
same experts where these are spread (plan.ep), and with the same weights where they are tied across stages (plan.pp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from shoal.chunks import Chunk
from shoal.comm import Group
from shoal.exchange.algorithm import Algorithm, Replica, State
from shoal.exchange.composed import Composed
from shoal.exchange.named import algorithm
from shoal.plan import Option

Among = Callable[[Group, str, Sequence[int]], Group]
"""Makes another group of some ranks of a group, given a name and their ranks in it."""


@dataclass(kw_only=True)
class Apart(Composed):
    """Runs `usual`, and one algorithm of its kind for each variant of chunks.

    - `usual`: the algorithm of the chunks without a variant
    - `apart`: the algorithm of each variant
    - `groups`: the ranks that share each variant
    - `among`: makes a group of some ranks of a group, by name and ranks in it
    """

    usual: Algorithm
    apart: Mapping[str, Algorithm]
    groups: Mapping[str, Group] = field(repr=False)
    among: Among = field(repr=False)

    def __post_init__(self) -> None:
        self.first = self.usual
        self.chunk_bytes = self.usual.chunk_bytes
        self.reduces_in_place = self.usual.reduces_in_place  # type: ignore[misc]

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        parts: list[Algorithm] = []
        for kind, part in {"": self.usual, **self.apart}.items():
            chunks = [chunk for chunk in replica.chunks if chunk.spec.variant == kind]
            if not chunks:
                continue
            own = replace(replica, chunks=chunks)
            if kind:
                group = self.groups[kind]
                own = replace(own, group=group, among=partial(self.among, group))
            part.attach(own)
            parts.append(part)
        self.parts = parts

    def partners_of(self, chunk: Chunk) -> Group:
        return self.groups.get(chunk.spec.variant, self.partners)

    def reduce(self, chunk: Chunk, own_mean: Tensor) -> None:
        self._of(chunk).reduce(chunk, own_mean)

    def reduce_part(self, chunk: Chunk, own_mean: Tensor) -> None:
        self._of(chunk).reduce_part(chunk, own_mean)

    def reduce_sum(self, chunk: Chunk, own: Tensor) -> None:
        self._of(chunk).reduce_sum(chunk, own)

    def _of(self, chunk: Chunk) -> Algorithm:
        return self.apart.get(chunk.spec.variant, self.usual)

    def state(self) -> dict[str, State]:
        found: dict[str, State] = {}
        for part in self.parts:
            for name, state in part.state().items():
                before = found[name].tensors if name in found else {}
                found[name] = State({**before, **state.tensors}, state.on_resize)
        return found


def with_variants(chosen: Algorithm, option: Option, groups: Mapping[str, Group], among: Among) -> Algorithm:
    """Returns `chosen`, the algorithm of `option`, with another one of its kind for each variant of parameters.

    `groups`: the ranks that share each variant (see parallel.layout); `among`: makes groups of some of them.
    """
    if not groups:
        return chosen
    return Apart(usual=chosen, apart={kind: algorithm(option) for kind in groups}, groups=groups, among=among)
