"""Expert parallelism as an axis: ranks have other experts, and tokens travel to them. Also what is to be known of a
model's experts where every rank has all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from shoal.comm import Group, World
from shoal.errors import UserError
from shoal.mesh import Mesh
from shoal.models.moe import Router
from shoal.module.stand_in import whole_model
from shoal.parallel.axis import Axis
from shoal.parallel.context import Context
from shoal.parallel.expert.counts import ExpertCounts
from shoal.parallel.expert.mixtures import mixtures, nearly
from shoal.parallel.expert.shared import share_routing
from shoal.parallel.expert.spread import Spread
from shoal.parallel.expert.weights import expert_weights
from shoal.parallel.layout import Layout
from shoal.parallel.tensor import Region, Rules, kind_of


class ExpertParallel(Axis):
    """The experts of `module`, which `rules` name or which have the usual form (see `mixtures`).

    replicas: the ranks that have the same experts, where these are spread
    parts: the ranks that then have other parts of the model than this one, expert or matrix
    """

    name = "ep"

    def __init__(self, mesh: Mesh, world: World, module: nn.Module, rules: Rules) -> None:
        super().__init__(mesh, world)
        self.lockstep = self.size > 1
        if self.size > 1:
            self.replicas = world.group("edp", mesh.ranks("edp"))
            self.parts = world.group("ep-parts", mesh.peers("expert parts")[1])
        self._module = module
        modules = list(whole_model(module))  # all stages refuse and count alike
        self._mixtures = mixtures(module, [name for name, _ in modules if kind_of(name, rules) == "experts"])
        self._routers = [part for _, part in modules if isinstance(part, Router)]
        self._others = [mixture for mixture in self._mixtures if not isinstance(mixture.router, Router)]

    @property
    def names(self) -> list[str]:
        """The modules with stacked experts."""
        return [mixture.name for mixture in self._mixtures]

    def spread(self) -> Spread | None:
        """Spreads the experts over the ranks; None where each has all. Raises UserError for experts that cannot be."""
        if self.size == 1:
            return None
        if not self._mixtures:
            raise UserError(
                f"plan.ep = {self.size}: {type(self._module).__name__} has no experts (modules with num_experts, of "
                "stacked matrices, that are called with tokens, experts and weights)"
                f"{nearly(self._module)}: take plan.ep = 1"
            )
        for mixture in self._mixtures:
            if any(isinstance(part, _DropoutNd) and part.p > 0 for part in mixture.experts.modules()):
                raise UserError(
                    f"plan.ep > 1: {mixture.name} drops inside its experts, where rows come from several ranks in "
                    "another order"
                )
        return Spread(self.group, self._lane())

    def share(self, mesh: Mesh, axes: Sequence[Axis], context: Context | None, region: Region | None) -> bool:
        """Routes the tokens of a microbatch as one where ranks along `axes` share them (see `share_routing`); returns
        whether there are balance losses of all of them then."""
        if not axes or not (self._mixtures or self._routers):
            return not axes
        names = [axis.name for axis in axes]
        group = self._world.group("-".join(["routing", *names]), mesh.ranks(*names))
        return share_routing(self._routers, self._others, group, context, region)

    def watch(self, module: nn.Module) -> None:
        """Refuses losses that compute with the experts in `module`, where these are spread."""
        self._weights = expert_weights(module, self.size)

    def around_loss(self) -> AbstractContextManager[None]:
        return self._weights.looking()

    @property
    def moves_biases(self) -> bool:
        """Whether a router balances its experts by a bias, which follows the counts of all replicas."""
        return any(router.cfg.balance_rate for router in self._routers)

    def counts(self, here: Iterable[nn.Module], device: torch.device, among: Group | None) -> ExpertCounts:
        """Makes the counters of tokens per expert (see ExpertCounts)."""
        return ExpertCounts(self._routers, self._others, set(here), device, among)

    @property
    def variants(self) -> Mapping[str, Group]:
        return {"experts": self.replicas}

    def why_no_hook(self, layout: Layout | None) -> str | None:
        if layout is not None and not layout.of_experts:
            return None
        return f"plan.ep = {self.size}: it lies on ranks that get tokens of several microbatches"
