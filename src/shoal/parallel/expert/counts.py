"""Counts the tokens given to each expert and those dropped: counted by hooks, added up over the ranks once a step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm import Group
from shoal.models.moe import Router, Routing
from shoal.parallel.expert.mixtures import Mixture


class ExpertCounts:
    """Counts the pairs of token and expert of each layer in a step.

    routers: our own routers of the whole model
    others: mixtures with other routers; their pairs are counted at the experts' input
    here: the modules that this rank has; the rest is not counted on it
    device: of the counts
    among: ranks that have other tokens of the same layers (sequence parallel); None: no others

    `row` [sum over layers of experts + 1] counts this rank's pairs by expert, before any are dropped, and behind those
    of a layer the dropped ones. Forwards in evaluation, inside transforms of torch.func, and those that backward runs
    again are not counted.
    """

    def __init__(
        self,
        routers: Sequence[Router],
        others: Sequence[Mixture],
        here: Collection[nn.Module],
        device: torch.device,
        among: Group | None = None,
    ) -> None:
        self._layers: list[tuple[Router | None, int]] = [
            (router if router in here else None, router.cfg.experts) for router in routers
        ]
        self._layers += [(None, mixture.number) for mixture in others]
        self._widths = [number + 1 for _, number in self._layers]
        self._device, self._muted = device, False
        self._among = among
        self._sums: Sequence[Tensor] = ()
        self.begin()
        for place, router in enumerate(routers):
            if router in here:
                router.register_forward_hook(partial(self._routed, place))
        for place, mixture in enumerate(others, len(routers)):
            if mixture.experts in here:
                mixture.experts.register_forward_pre_hook(partial(self._asked, place), with_kwargs=True)

    def begin(self) -> None:
        """Sets the counts to zero for a new step."""
        self._row = torch.zeros(sum(self._widths), dtype=torch.int64, device=self._device)
        self._counts = self._row.split(self._widths)

    def row(self) -> Tensor:
        """Returns this rank's counts of the step, all layers in one float64 tensor; empty without experts."""
        row = self._row.double()
        return row if self._among is None or not self._layers else self._among.all_reduce(row, purpose="routing")

    def read(self, row: Tensor) -> Sequence[Tensor]:
        """Splits `row`, added up over all ranks and stages, by layer; keeps it for `balance` and returns it."""
        self._sums = row.split(self._widths)
        return self._sums

    def balance(self, skip: Tensor | None = None) -> None:
        """Moves the biases of the routers that balance by one, by the counts of all ranks; called after an update.

        `skip` (0-dim bool on the device): no bias moves if it is true.
        """
        for (router, _), counts in zip(self._layers, self._sums, strict=True):
            if router is not None and router.cfg.balance_rate:
                router.balance(counts[:-1] if skip is None else counts[:-1] * ~skip)

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Switches counting off inside the context."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    def _routed(self, place: int, module: nn.Module, _: Any, routing: Routing) -> None:
        self._count(place, module, routing.chosen, routing.experts)

    def _asked(self, place: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        chosen = next((each for each in given if not (each.is_floating_point() or each.dtype == torch.bool)), None)
        if chosen is not None:
            self._count(place, module, chosen)

    @torch.compiler.disable
    @torch.no_grad()
    def _count(self, place: int, module: nn.Module, chosen: Tensor, left: Tensor | None = None) -> None:
        """Counts the pairs of a forward by expert. `left`: what is left of `chosen`, the number of experts in place of
        those dropped; None: `chosen` is."""
        again = torch._C._current_graph_task_id() != -1  # a forward that backward runs again
        if self._muted or again or not module.training or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        pairs = chosen.flatten().long()
        self._counts[place].scatter_add_(0, pairs, torch.ones_like(pairs))  # the number of experts is that of dropped
        if left is not None:
            self._counts[place][-1] += (left == self._layers[place][1]).sum()
