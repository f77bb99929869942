"""What the axes inside a stage make of a built model: what this rank keeps of it, and the axes themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from torch import Tensor

from shoal.comm import Group, World
from shoal.errors import UserError
from shoal.mesh import Mesh
from shoal.module.build import Built
from shoal.module.stand_in import whole_model
from shoal.parallel.axis import Axis
from shoal.parallel.context import Context, Parts
from shoal.parallel.context.axis import ContextParallel
from shoal.parallel.expert import ExpertCounts
from shoal.parallel.expert.axis import ExpertParallel
from shoal.parallel.layout import Layout
from shoal.parallel.tensor import CutLayers, Cuts, Region
from shoal.parallel.tensor.axis import TensorParallel
from shoal.plan import Plan

LOG = logging.getLogger(__name__)


class Parallelized:
    """Cuts `built` for this rank, as the plan says.

    built: the whole module; the attribute `built` is the module with this rank's parts
    cuts: how its layers are cut
    attention: the attention of one device, with the signature of `F.scaled_dot_product_attention`
    elsewhere: names of the modules that another stage of the pipeline has

    Attributes: `axes`, those of several ranks, innermost first; `layouts` by parameter name; `layers`, what became of
    each layer. Raises UserError, on every rank alike, for a model that the plan cannot cut.
    """

    def __init__(
        self,
        built: Built,
        plan: Plan,
        mesh: Mesh,
        world: World,
        cuts: Cuts,
        attention: Callable[..., Tensor],
        elsewhere: Collection[str] = (),
    ) -> None:
        self._tensor = TensorParallel(mesh, world, cuts)
        self._experts = ExpertParallel(mesh, world, built.module, {**cuts.rules, **cuts.experts})
        self._rows = ContextParallel(mesh, world, plan.context, attention)
        self.axes = [axis for axis in (self._tensor, self._experts, self._rows) if axis.size > 1]
        self._device = world.device
        if cuts.found is not None and cuts.found.draws and self._rows in self.axes:
            raise UserError(
                f"{next(iter(cuts.found.draws))} drops elements of what plan.tp = {self._tensor.size} cuts as the "
                "model's own graph says, and plan.cp > 1 cuts the same rows: set its dropout to 0, or plan.cp = 1"
            )

        spread = self._experts.spread()
        if self._tensor in self.axes or spread is not None:
            sliced = self._tensor.cut(built, spread, self._experts.names, elsewhere)
            self.built, self.layouts, self.layers = sliced.built, sliced.layouts, sliced.layers
            if self._tensor.group.rank == 0:
                LOG.debug("what plan.tp and plan.ep made of each layer of rank %d\n%s", world.rank, self.layers)
        else:
            named = built.module.named_parameters()
            self.built, self.layers = built, CutLayers()
            self.layouts = {name: Layout.replicated(tuple(each.shape)) for name, each in named}
        if self._tensor in self.axes:
            self._tensor.watch(self.built.module, self.layouts)
        if self._experts in self.axes:
            self._experts.watch(self.built.module)
        if self._rows in self.axes:
            self._rows.watch(self.built.module, (part for _, part in whole_model(built.module)))
        sharing: list[Axis] = [axis for axis in (self._rows, self._tensor) if axis in self.axes and axis.shares_tokens]
        self.losses_of_all_tokens = self._experts.share(mesh, sharing, self.context, self.region)

    @property
    def region(self) -> Region | None:
        """Where ranks compute parts of the same result; None where each computes all."""
        return self._tensor.region if self._tensor in self.axes else None

    @property
    def context(self) -> Context | None:
        """The cut of rows into the tokens of each rank; None where rows are whole."""
        return self._rows.context if self._rows in self.axes else None

    @property
    def experts(self) -> Group | None:
        """The ranks that have the same experts; None where each has all."""
        return self._experts.replicas if self._experts in self.axes else None

    @property
    def beside(self) -> Group:
        """The ranks that have other parts of the model, experts and matrices."""
        return self._experts.parts if self._experts in self.axes else self._tensor.group

    @property
    def parts(self) -> Parts | None:
        """Says which elements of a sample this rank has; None: all."""
        return None if self.region is None and self.context is None else Parts(self.region, self.context)

    @property
    def moves_biases(self) -> bool:
        """Whether a router balances its experts by a bias, which follows the counts of all replicas."""
        return self._experts.moves_biases

    def counts(self) -> ExpertCounts:
        """Makes the counters of tokens per expert."""
        among = self._tensor.group if self._tensor.shares_tokens else None
        return self._experts.counts(self.built.module.modules(), self._device, among)
