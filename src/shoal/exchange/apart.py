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
from shoal.errors import UserError
from shoal.exchange.algorithm import Algorithm, Holds, Replica, State
from shoal.plan import Option, option_name


@dataclass(kw_only=True)
class Apart(Algorithm):
    """Runs `usual`, and one algorithm of its kind for each variant of chunks.

    - `usual`: the algorithm of the chunks without a variant
    - `apart`: the algorithm of each variant
    - `groups`: the ranks that share each variant
    - `among`: makes a group of some ranks of a group, by name and ranks in it
    """

    usual: Algorithm
    apart: Mapping[str, Algorithm]
    groups: Mapping[str, Group] = field(repr=False)
    among: Callable[[Group, str, Sequence[int]], Group] = field(repr=False)

    def __post_init__(self) -> None:
        self.chunk_bytes = self.usual.chunk_bytes
        self.reduces_in_place = self.usual.reduces_in_place  # type: ignore[misc]

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        self._parts = []
        for kind, part in {"": self.usual, **self.apart}.items():
            chunks = [chunk for chunk in replica.chunks if chunk.spec.variant == kind]
            if not chunks:
                continue
            own = replace(replica, chunks=chunks)
            if kind:
                group = self.groups[kind]
                own = replace(own, group=group, among=partial(self.among, group))
            part.attach(own)
            self._parts.append(part)

    def partners_of(self, chunk: Chunk) -> Group:
        return self.groups.get(chunk.spec.variant, self.partners)

    def holds(self, step: int) -> Holds:
        return self.usual.holds(step)

    def begin(self, step: int) -> None:
        for part in self._parts:
            part.begin(step)

    def reduce(self, chunk: Chunk, own_mean: Tensor) -> None:
        self.apart.get(chunk.spec.variant, self.usual).reduce(chunk, own_mean)

    def exchanged(self, step: int, to_mean: Tensor) -> None:
        for part in self._parts:
            part.exchanged(step, to_mean)

    def due(self, step: int, untouched: Sequence[str]) -> Sequence[str]:
        due = untouched
        for part in self._parts:  # all of them take the step's, and give the same
            due = part.due(step, untouched)
        return due

    @property
    def keeps_back(self) -> bool:
        return self.usual.keeps_back

    def renew(self, to_mean: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None:
        for part in self._parts:
            part.renew(to_mean, skip, untouched)

    def end(self, step: int) -> None:
        for part in self._parts:
            part.end(step)

    def settle(self) -> None:
        for part in self._parts:
            part.settle()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def state(self) -> dict[str, State]:
        found: dict[str, State] = {}
        for part in self._parts:
            for name, state in part.state().items():
                before = found[name].tensors if name in found else {}
                found[name] = State({**before, **state.tensors}, state.on_resize)
        return found

    def restored(self) -> None:
        for part in self._parts:
            part.restored()


def check_biases(chosen: Algorithm, option: Option) -> None:
    """Raises UserError where replicas train apart: routers that balance by biases follow the counts of all replicas."""
    if chosen.trains_apart:
        raise UserError(
            f'plan.exchange = "{option_name(option, "exchange")}" lets replicas train apart, and routers with '
            "balance_rate follow the counts of all of them: take a balance loss instead"
        )


def check_experts(chosen: Algorithm, option: Option) -> None:
    """Raises UserError where `chosen` does not go with experts that are spread over the replicas (plan.ep)."""
    kind, reason = type(chosen), chosen.of_whole_models
    if chosen.trains_apart:
        reason = "its replicas train apart, and tokens of one would go to experts of another"
    elif kind.update is not Algorithm.update:
        reason = "it averages each replica's own gradients, and those of experts come from tokens of several"
    elif getattr(chosen, "ranks_per_host", None) is not None:
        reason = (
            "ranks_per_host counts replicas of the model, and experts have fewer: leave it out, and hosts count as "
            "they are"
        )
    if reason is not None:
        raise UserError(f'plan.exchange = "{option_name(option, "exchange")}" does not go with plan.ep: {reason}')


def check_stages(chosen: Algorithm, option: Option) -> None:
    """Raises UserError where `chosen` does not go with a model that is cut into stages (plan.pp)."""
    kind, reason = type(chosen), chosen.of_whole_models
    if chosen.trains_apart:
        reason = "its replicas train apart, each with a norm and a vote of its own, and a stage has a part of a replica"
    elif kind.holds is not Algorithm.holds or kind.update is not Algorithm.update:
        reason = "it weighs each replica's gradients by their own mean, and only the last stage knows what counts"
    if reason is not None:
        raise UserError(f'plan.exchange = "{option_name(option, "exchange")}" does not go with plan.pp: {reason}')
