"""Tensor, context and expert parallelism applied to a built model: what this rank keeps of it, and its groups."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from shoal.comm import Group, Lane, World
from shoal.errors import UserError
from shoal.mesh import Mesh
from shoal.models.moe import Router
from shoal.module.build import Built
from shoal.module.stand_in import whole_model
from shoal.parallel.context import Context, Parts
from shoal.parallel.expert import Spread, Tally, mixtures
from shoal.parallel.expert.shared import share_routing
from shoal.parallel.layout import Layout
from shoal.parallel.tensor import CutLayers, Region, Rules, TokenRing, cut_among, kind_of, rules_for
from shoal.plan import Plan

LOG = logging.getLogger(__name__)


class Parted:
    """Cuts `built` for this rank, as plan.tp, plan.cp and plan.ep say.

    built: the whole module; the attribute `built` is the module with this rank's parts
    rules: the user's tensor rules, laid over those of the model; None: the model's own
    attention: the attention of one device, with the signature of `F.scaled_dot_product_attention`
    elsewhere: names of the modules that another stage of the pipeline has

    Attributes: `layouts` by parameter name; `layers`, what became of each layer; `region` and `context`, None without
    tp or cp; `experts`, the group of the ranks that have the same experts, None without ep; `beside`, the group of the
    ranks along ep and tp, which have other parts of the model. Raises UserError, on every rank alike, for a model that
    the plan cannot cut.
    """

    def __init__(
        self,
        built: Built,
        plan: Plan,
        mesh: Mesh,
        world: World,
        rules: Rules | None,
        attention: Callable[..., Tensor],
        elsewhere: Collection[str] = (),
    ) -> None:
        tp = world.group("tp", mesh.ranks("tp"))
        self._device, self._lanes = world.device, list[Lane]()
        self.region, self.layers = None, CutLayers()
        if plan.tp > 1:
            self.region = Region(tp, partial(world.group, "tp-sharers"), TokenRing(tp, self._lane(world)))
        self.experts = world.group("edp", mesh.ranks("edp")) if plan.ep > 1 else None
        self.beside = tp if plan.ep == 1 else world.group("ep-tp", mesh.ranks("ep", "tp"))
        known = dict(rules_for(built.module, rules)) if self.region is not None else {}
        given = {pattern: kind for pattern, kind in (rules or {}).items() if kind == "experts"}
        self.whole = [part for _, part in whole_model(built.module)]  # all stages refuse and count alike
        named = [name for name, _ in whole_model(built.module) if kind_of(name, {**known, **given}) == "experts"]
        found = self.mixtures = mixtures(built.module, named)
        self._routers = [part for part in self.whole if isinstance(part, Router)]
        self._others = [mixture for mixture in found if not isinstance(mixture.router, Router)]
        spread = self._spread(plan, mesh, world, built.module) if plan.ep > 1 else None
        if self.region is not None or spread is not None:
            inside = self.region or Region(tp, partial(world.group, "tp-sharers"))
            sliced = cut_among(built, inside, known, spread, [mixture.name for mixture in found], elsewhere)
            self.built, self.layouts, self.layers = sliced.built, sliced.layouts, sliced.layers
            if world.rank == mesh.ranks("tp")[0]:
                LOG.debug("what plan.tp and plan.ep made of each layer of rank %d\n%s", world.rank, self.layers)
        else:
            named_parameters = built.module.named_parameters()
            self.built, self.layouts = (
                built,
                {name: Layout.replicated(tuple(each.shape)) for name, each in named_parameters},
            )
        self.context = (
            self._share_rows(plan, world.group("cp", mesh.ranks("cp")), attention, world) if plan.cp > 1 else None
        )
        in_sequence = self.region is not None and self.region.sequence
        axes = [axis for axis, shared in (("cp", plan.cp > 1), ("tp", in_sequence)) if shared]
        self.losses_of_all_tokens = True
        if axes and (found or self._routers):
            group = world.group("-".join(["routing", *axes]), mesh.ranks(*axes))
            self.losses_of_all_tokens = share_routing(self._routers, self._others, group, self.context, self.region)

    @property
    def parts(self) -> Parts | None:
        """Says which elements of a sample this rank has; None: all."""
        return None if self.region is None and self.context is None else Parts(self.region, self.context)

    @property
    def moves_biases(self) -> bool:
        """True if a router balances its experts by a bias, which follows the counts of all replicas."""
        return any(router.cfg.balance_rate for router in self._routers)

    def tally(self) -> Tally | None:
        """Returns the counters of tokens per expert; None if the model has no experts on any stage."""
        among = self.region.group if self.region is not None and self.region.sequence else None
        if not self._routers and not self._others:
            return None
        return Tally(self._routers, self._others, set(self.built.module.modules()), self._device, among)

    def close(self) -> None:
        """Closes the lanes; no microbatch may follow."""
        for lane in self._lanes:
            lane.close()

    def _spread(self, plan: Plan, mesh: Mesh, world: World, module: nn.Module) -> Spread:
        if not self.mixtures:
            raise UserError(
                f"plan.ep = {plan.ep}: {type(module).__name__} has no experts (modules with num_experts, of stacked "
                "matrices, that are called with tokens, experts and weights)"
            )
        for mixture in self.mixtures:
            if any(isinstance(part, _DropoutNd) and part.p > 0 for part in mixture.experts.modules()):
                raise UserError(
                    f"plan.ep > 1: {mixture.name} drops inside its experts, where rows come from several ranks in "
                    "another order"
                )
        return Spread(world.group("ep", mesh.ranks("ep")), self._lane(world))

    def _share_rows(self, plan: Plan, group: Group, attention: Callable[..., Tensor], world: World) -> Context:
        if any(isinstance(part, _BatchNorm) for part in self.whole):
            raise UserError(
                "plan.cp > 1 gives each rank a part of each row: the model's BatchNorm would count them as samples"
            )
        context = Context(group, attention, self._lane(world) if plan.context == "ring" else None)
        context.watch(self.built.module)
        return context

    def _lane(self, world: World) -> Lane:
        self._lanes.append(world.lane())
        return self._lanes[-1]
