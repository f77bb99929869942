"""How many tokens each expert was given, and how many were dropped: counted by hooks on the routers, added up over a step by its ballot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm import Group
from shoal.models.moe import Router, Routing, counted
from shoal.parallel.expert.mixtures import Mixture


class Tally:
    """Of the layers `found` that have a router, in order. `row` [layers x (experts + 1)] counts this step's pairs on this rank by expert, before anything was dropped, and behind them those that
    were; `among` have other tokens of the same layers (sequence parallel). Forwards in evaluation, inside transforms of torch.func, and those that backward runs again are not counted."""

    def __init__(self, found: Sequence[Mixture], device: torch.device, among: Group | None = None) -> None:
        self._layers = [(mixture.router, mixture.number) for mixture in found if mixture.router is not None]
        self._device, self._muted = device, False
        self._among, self._sums = among, list[Tensor]()
        self.begin()
        for place, (router, _) in enumerate(self._layers):
            assert router is not None
            router.register_forward_hook(lambda module, _, output, place=place: self._count(place, module, output))

    def __len__(self) -> int:
        return sum(number + 1 for _, number in self._layers)

    def begin(self) -> None:
        """A new step."""
        self._counts = [torch.zeros(number + 1, dtype=torch.int64, device=self._device) for _, number in self._layers]

    def row(self) -> Tensor:
        row = torch.cat(self._counts).double()
        return row if self._among is None else self._among.all_reduce(row, purpose="routing")

    def read(self, row: Tensor) -> list[Tensor]:
        """`row`, added up over the ranks, by layer: what `balance` goes by."""
        self._sums = list(row.split([number + 1 for _, number in self._layers]))
        return self._sums

    def balance(self, skip: Tensor | None = None) -> None:
        """After an update: lets the routers that balance by a bias know what all ranks counted; on a device not where `skip` (0-dim) is true."""
        for (router, _), counts in zip(self._layers, self._sums, strict=True):
            if isinstance(router, Router) and router.cfg.balance_rate:
                router.balance(counts[:-1] if skip is None else counts[:-1] * ~skip)

    def again(self, module: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Makes contexts in which forwards are not counted (see Recompute)."""
        return self.mute

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Forwards inside are not counted."""
        before, self._muted = self._muted, True
        try:
            yield
        finally:
            self._muted = before

    @torch.compiler.disable
    def _count(self, place: int, module: nn.Module, output: Any) -> None:
        if self._muted or not module.training or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        _, number = self._layers[place]
        with torch.no_grad():
            if isinstance(output, Routing):
                chosen, dropped = output.chosen, (output.experts == number).sum()
            else:  # of transformers: logits, weights and, last, numbers of experts
                chosen = next(each for each in reversed(output) if not each.is_floating_point())
                dropped = chosen.new_zeros(())
            self._counts[place] += torch.cat([counted(chosen.flatten(), number), dropped[None]])
