"""Clip: the norm of the gradient, and the one factor that makes of its sum the clipped mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.chunks import Chunk, norms, sum_of_squares
from shoal.exchange import Algorithm, Holds
from shoal.parallel.layout import Layout
from shoal.training.norms import ClipRule, clip_by, norms_by_name
from shoal.training.setup import StepGroups


@dataclass(frozen=True)
class ClipSettings:
    """How a step clips.

    - `limit`: largest norm of the global gradient, or a rule of the user's
    - `keeps`: the gradients of the last step are kept
    - `norms_every`: so many steps have norms by name, 0 for none
    """

    limit: float | ClipRule | None
    keeps: bool
    norms_every: int
    layouts: Mapping[str, Layout]


@dataclass(frozen=True)
class Clipped:
    """What is done to the gradients.

    - `norm`: of the gradient's mean, before clipping (0-dim)
    - `factor`: what the gradient chunks are multiplied by, mean and clipping in one (0-dim)
    - `to_mean`: what turns their sum into the mean (0-dim)
    - `norms`: by name, where this step has them
    - `gradients`: of each chunk what is owned here, before clipping, where they are kept
    """

    norm: Tensor
    factor: Tensor
    to_mean: Tensor
    norms: Mapping[str, float]
    gradients: list[Tensor]


class Clip:
    """Clips as `settings` say what `algorithm` has left in the chunks.

    `pull`: adds to the mean gradient that a rank owns of a chunk (`chunk.owned.gradient`), before it is clipped; for
    algorithms that leave the sum. None: nothing is added.
    """

    def __init__(self, settings: ClipSettings, groups: StepGroups, algorithm: Algorithm, device: torch.device) -> None:
        self._settings, self._groups, self._algorithm, self._device = settings, groups, algorithm, device
        self.pull: Callable[[Chunk], None] | None = None

    def clip(self, step: int, count: Tensor, squares: Tensor, expected: float) -> Clipped:
        """Finds the factor of `step`, whose sums were divided by `expected` and count `count` (0-dim).

        `squares`: squared norm of the group's sum (0-dim).
        """
        settings, partners, holds = self._settings, self._groups.partners, self._algorithm.holds(step)
        mean = torch.where(count > 0, expected / count, 0.0)
        if holds is Holds.LOCAL_SUM:
            mean = mean * partners.size  # the replicas' means, weighted by their counts, average to the group's
        self._algorithm.exchanged(step, mean)
        is_mean = holds in (Holds.MEAN, Holds.LOCAL_MEAN, Holds.LATE, Holds.NOTHING)
        if pulled := self.pull is not None and holds is Holds.SUM:
            self._add_pull(mean)
        unit = torch.ones_like(mean) if is_mean or pulled else mean
        norm = (squares if holds is Holds.SUM and not pulled else self._squares_here()).sqrt() * unit
        chunks, gradients = self._algorithm.replica.chunks, list[Tensor]()
        if settings.keeps:
            gradients = [chunk.owned.gradient * unit.to(chunk.owned.gradient.device) for chunk in chunks]
        factor, due = unit, settings.norms_every > 0 and (step + 1) % settings.norms_every == 0
        rule = settings.limit if callable(settings.limit) and math.isfinite(norm) else None
        norms: Mapping[str, float] = {}
        if due or rule is not None:
            norms = norms_by_name(chunks, settings.layouts, float(unit), self._groups)
        if rule is not None:
            factor = unit * clip_by(rule, norms, chunks)
        elif settings.limit is not None and not callable(settings.limit):
            factor = unit * (settings.limit / (norm + 1e-6)).clamp(max=1.0)
        return Clipped(self._agreed(norm, holds), factor, mean, norms, gradients)

    @torch.no_grad()
    def _add_pull(self, mean: Tensor) -> None:
        """Makes the mean of the sums in the chunks, and adds the pull."""
        assert self.pull is not None
        for chunk in self._algorithm.replica.chunks:
            chunk.owned.gradient.mul_(mean.to(chunk.owned.gradient.device))
            self.pull(chunk)

    def _agreed(self, norm: Tensor, holds: Holds) -> Tensor:
        """Makes each replica's own norm one by which all vote alike, for the update is one that they make together."""
        partners = self._groups.partners
        if holds not in (Holds.LOCAL_SUM, Holds.LOCAL_MEAN) or partners.size == 1:
            return norm
        mean = (partners.all_reduce(norm.square(), purpose="norm") / partners.size).sqrt()
        return mean if holds is Holds.LOCAL_MEAN else torch.where(torch.isfinite(mean), norm, mean)

    def _squares_here(self) -> Tensor:
        """Sums the squares of all gradients that the chunks hold now; of chunks that are cut, or apart, each owner adds
        its part."""
        chunks = self._algorithm.replica.chunks
        apart = [chunk for chunk in chunks if chunk.is_cut or chunk.spec.variant]
        sharers = [self._algorithm.partners_of(chunk) for chunk in apart]
        owned = zip(apart, sharers, strict=True)
        parts = [piece for chunk, group in owned for piece in chunk.norm_pieces(group.rank, group.size)]
        everywhere = [
            piece for chunk in chunks if not (chunk.is_cut or chunk.spec.variant) for piece in chunk.norm_pieces()
        ]
        whole, cut = (sum_of_squares(norms(pieces), self._device) for pieces in (everywhere, parts))
        if apart:
            cut = self._groups.partners.all_reduce(cut, purpose="norm")
        return self._groups.squared_norm(whole + cut)
