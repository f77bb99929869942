"""Ballot: ranks add up what each of them brings of a step, in one collective where that can be.

That every rank came to the ballot is the vote that all of them got through the step. Replicas that train alone have
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.device import is_accelerator, to_device
from shoal.exchange.hooks import UserHooks
from shoal.training.effects import Effects
from shoal.training.forward import Forward
from shoal.training.reduce import Reduced
from shoal.training.setup import StepGroups
from shoal.training.totals import Totals


@dataclass(frozen=True)
class Answer:
    """What the ballot has found.

    - `totals`: the step's sums over all ranks, laid out as Totals.values
    - `squares`: squared norm of the gradient's sum over the group (0-dim)
    - `untouched`: the parameters that no rank's backward has reached (of partners, where stages are `told`)
    - `experts`: how many tokens each expert was given, by layer
    """

    totals: Tensor
    squares: Tensor
    untouched: list[str]
    experts: Sequence[Tensor] = ()


class Ballot:
    """Adds up over partners, then over the ranks that have other parts of the model.

    - `told`: these have told each other their totals already, count no experts here, and tell each other elsewhere
      what their backwards have reached
    """

    def __init__(self, forward: Forward, groups: StepGroups, hooks: UserHooks, told: bool = False) -> None:
        self._groups, self._hooks, self._told = groups, hooks, told
        self._effects, self._device = forward.effects, forward.randomness.device
        self._streams = forward.streams

    def cast(self, totals: Tensor, reduced: Reduced, ran: int, after: int, alone: bool) -> Answer:
        """One ballot carries the sums, the squared norms of the ranks' parts, which parameters were touched, whether
        buffers changed, and running statistics.

        - `totals`: this rank's, as Totals.values
        - `ran`, `after`: microbatches here, and on the partners behind this rank
        - `alone`: replicas train alone in this step
        """
        experts = totals.new_empty(0) if self._told else self._effects.experts.row()
        if self._groups.partners.size == 1 or alone:
            untouched = [name for name, seen in reduced.touched.items() if not seen]
            return self._over_axes(totals, reduced.squares, untouched, reduced, experts)
        effects, touched = self._effects, list(reduced.touched.values())
        flags = torch.tensor([*touched, bool(self._hooks.reshaped), *effects.buffers.flags(ran)], dtype=torch.float64)
        partners, parts = self._groups.partners, [totals, reduced.squares, experts]
        if len(effects.statistics) and effects.merges_statistics:
            mine = effects.statistics.updates()
            told = partners.all_gather(mine.new_empty(partners.size * len(mine)), mine, purpose="ballot")
            parts.append(effects.statistics.term(told.view(partners.size, -1)[partners.rank + 1 :].sum(0)))
        if aside := len(effects.buffers) > 0 and is_accelerator(self._device):
            # The host needs each step's flags, and has them: they do not go by the device, for which it would wait.
            flags = partners.all_reduce(flags, purpose="ballot")
        else:
            parts.insert(2, to_device(flags, self._device))
        ballot = partners.all_reduce(torch.cat(parts), purpose="ballot")
        totals, squares, *others = ballot.split([len(part) for part in parts])
        if not aside:
            flags = others.pop(0)
        experts, *statistics = others
        if statistics:
            effects.statistics.commit(statistics[0])
        if self._hooks.hooked and flags[-3] > 0:
            raise self._hooks.refusal()
        self._merge_buffers(flags, ran, after)
        untouched = []
        if not all(touched):
            untouched = [name for name, ranks in zip(reduced.touched, flags.tolist(), strict=False) if ranks == 0]
        return self._over_axes(totals, squares, untouched, reduced, experts)

    def _merge_buffers(self, flags: Tensor, ran: int, after: int) -> None:
        """Makes buffers equal that a rank has changed, where `flags` say so; new rules are told first."""
        buffers, partners = self._effects.buffers, self._groups.partners
        if len(buffers) and flags[-2] > 0:
            if flags[-1] > 0:
                buffers.agree(partners.all_gather_object(buffers.rules), partners.size, self._streams)
            buffers.merge(partners, ran, after, self._streams == 1)

    def _over_axes(
        self, totals: Tensor, squares: Tensor, untouched: list[str], reduced: Reduced, experts: Tensor
    ) -> Answer:
        """Adds what ranks with other parts of the model bring: not all of them have seen the loss, or the same
        experts."""
        for axis in self._groups.axes:
            if not self._told:
                totals, experts = axis.add_sums([totals, experts], "ballot")
                untouched = axis.untouched(untouched, reduced.touched)
        counted = () if self._told else self._effects.experts.read(experts)
        return Answer(totals, self._groups.squared_norm(squares), untouched, counted)


def agree(totals: Totals, effects: Effects, groups: StepGroups, streams: int, alone: bool) -> None:
    """Tells, at the first step, ranks without a microbatch, or without the loss, the names of the auxiliary losses, and
    all what forwards do to buffers. `streams`: ranks that share each row; `alone`: replicas train alone in this step.

    Raises UserError where ranks that share matrices have other losses of the same samples.
    """
    if totals.agreed:
        return
    totals.agreed = True
    names, buffers = totals.names, effects.buffers
    rules = everywhere = [buffers.rules]
    if groups.partners.size > 1:
        names, everywhere = _merged(groups.partners.all_gather_object((names, everywhere)))
        rules = everywhere
    for axis in groups.axes:
        axis.check_sums(totals.values)
        names, everywhere = _merged(axis.gather_seen((names, everywhere)))
    buffers.agree(rules, 1 if alone else groups.partners.size, streams, everywhere)
    totals.learn(names)


def _merged(told: Sequence[tuple[Any, list[Any]]]) -> tuple[Any, list[Any]]:
    """Merges what ranks have told: the names that the first of them knows, and the rules of all."""
    names = next((each for each, _ in told if each is not None), None)
    return names, [each for _, theirs in told for each in theirs]
