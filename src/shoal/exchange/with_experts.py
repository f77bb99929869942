"""One algorithm over two sets of ranks: the replicas of a model whose experts are spread (plan.ep), and for the experts those that have the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from shoal.chunks import Chunk
from shoal.comm import Group
from shoal.errors import UserError
from shoal.exchange.algorithm import Algorithm, Holds, Replica, State
from shoal.plan import Option, option_name


@dataclass(kw_only=True)
class WithExperts(Algorithm):
    """`dense` and `experts` are two of a kind. The latter works on the chunks of experts, among `group`; `among` makes groups of some of its ranks, by their places."""

    dense: Algorithm
    experts: Algorithm
    group: Group = field(repr=False)
    among: Callable[[str, Sequence[int]], Group] = field(repr=False)

    def __post_init__(self) -> None:
        self.chunk_bytes = self.dense.chunk_bytes
        self.reduces_in_place = self.dense.reduces_in_place  # type: ignore[misc]

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        dense = [chunk for chunk in replica.chunks if not chunk.of_experts]
        experts = [chunk for chunk in replica.chunks if chunk.of_experts]
        self._parts = []
        if dense:
            self.dense.attach(replace(replica, chunks=dense))
            self._parts.append(self.dense)
        if experts:
            self.experts.attach(replace(replica, chunks=experts, group=self.group, among=self.among))
            self._parts.append(self.experts)

    def partners_of(self, chunk: Chunk) -> Group:
        return self.group if chunk.of_experts else self.partners

    def holds(self, step: int) -> Holds:
        return self.dense.holds(step)

    def begin(self, step: int) -> None:
        for part in self._parts:
            part.begin(step)

    def reduce(self, chunk: Chunk, own_mean: Tensor) -> None:
        (self.experts if chunk.of_experts else self.dense).reduce(chunk, own_mean)

    def exchanged(self, step: int, to_mean: Tensor) -> None:
        for part in self._parts:
            part.exchanged(step, to_mean)

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
    """UserError where `chosen` lets replicas train apart, whose routers balance by biases that follow the counts of all."""
    if type(chosen).drifts is not Algorithm.drifts:
        raise UserError(
            f'plan.exchange = "{option_name(option, "exchange")}" lets replicas train apart, and routers with balance_rate follow the counts of all of them: take a balance '
            "loss instead"
        )


def check_experts(chosen: Algorithm, option: Option) -> None:
    """UserError with the reason where `chosen` does not go with experts that are spread over the replicas (plan.ep)."""
    kind, reason = type(chosen), chosen.of_whole_models
    if kind.drifts is not Algorithm.drifts:
        reason = "its replicas train apart, and tokens of one would go to experts of another"
    elif kind.update is not Algorithm.update:
        reason = "it averages each replica's own gradients, and those of experts come from tokens of several"
    elif getattr(chosen, "ranks_per_host", None) is not None:
        reason = "ranks_per_host counts replicas of the model, and experts have fewer: leave it out, and hosts count as they are"
    if reason is not None:
        raise UserError(f'plan.exchange = "{option_name(option, "exchange")}" does not go with plan.ep: {reason}')
