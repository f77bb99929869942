"""What cutting each layer along tp saves, as the engine would run it, and which layers are better left whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shoal.parallel.tensor import Cuts, cuts_of
from shoal.parallel.tensor.cut import alike
from shoal.parallel.tensor.head_counts import HeadCounts
from shoal.parallel.tensor.pins import CUT_AS, together, wanted_of
from shoal.planner.operators import problem_of, traced
from shoal.planner.placements import Problem, Rates, best
from shoal.planner.prepare import Subject, blank, in_one_line

TAKES_ALL = frozenset(["qkv", "vocabulary", "head"])
"""Kinds of layers that, where they are whole, take all tokens."""


@dataclass(frozen=True)
class Together:
    """Layers that are cut together, by patterns of their names.

    kinds: how each is cut; `best`: what each is in the placements that take the least time of all
    number: of such groups
    saved: seconds of a microbatch that cutting all of them saves; below 0 it costs time
    pinned: whether a user has said how some of them are cut
    """

    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    best: tuple[str, ...]
    number: int
    saved: float
    pinned: bool


@dataclass(frozen=True)
class Layers:
    """The groups of a model's layers among `ranks`, and seconds of a microbatch of what was traced: as the engine cuts
    them all, with those whole that are better so, and of the placements that take the least time. `share_tokens`:
    whether ranks have tokens of their own between layers that are all cut."""

    ranks: int
    groups: tuple[Together, ...]
    cut: float
    chosen: float
    least: float
    share_tokens: bool

    @property
    def whole(self) -> dict[str, str]:
        """Placements of the layers that are better left whole. Where ranks share tokens, none if they would go on to:
        what then travels instead is weights, and not counted."""
        names = [name for group in self.groups for name in group.layers]
        left = [
            group
            for group in self.groups
            if group.saved < 0 and not group.pinned and all(names.count(each) == 1 for each in group.layers)
        ]
        if self.share_tokens and not any(TAKES_ALL.intersection(group.kinds) for group in left):
            return {}
        return {name: "whole" for group in left for name in group.layers}


def layers_of(subject: Subject, rates: Rates, placements: Mapping[str, str] | None = None) -> Layers:
    """Finds what cutting the layers of `subject` saves on these ranks; `placements`: those that are given. Raises
    UserError for a model that cannot be run or cut."""
    with in_one_line():
        module = blank(subject.factory).module
        cuts = cuts_of(module, rates.ranks, subject.tensor_rules, None, placements)
        kinds = cuts.kinds(module)
        problem = problem_of(traced(subject), rates)
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for names in together(module, kinds):
        if _can_be_judged(names, module, cuts, problem, rates.ranks):
            groups.setdefault(tuple(dict.fromkeys(map(alike, names))), []).append(names)
    judged = {name for each in groups.values() for names in each for name in names}
    fixed = {name: CUT_AS[kinds[name]] if name in judged else "whole" for name in problem.layers}
    share_tokens = kinds.get("") in ("sequence", "overlap")
    without = {"data"} if share_tokens else {"data", "sequence"}
    least, cut = best(problem), best(problem, fixed, without).seconds
    found, wholes = [], dict(fixed)
    for patterns, copies in groups.items():
        whole = {name: "whole" for names in copies for name in names}
        saved = best(problem, {**fixed, **whole}, without).seconds - cut
        firsts = [next(name for names in copies for name in names if alike(name) == pattern) for pattern in patterns]
        pinned = any(wanted_of(name, placements or {}) for name in whole)
        if saved < 0 and not pinned:
            wholes |= whole
        its = tuple(kinds[name] for name in firsts)
        found.append(Together(patterns, its, tuple(least.layers[name] for name in firsts), len(copies), saved, pinned))
    chosen = best(problem, wholes, without).seconds
    return Layers(rates.ranks, tuple(found), cut, chosen, least.seconds, share_tokens)


def _can_be_judged(names: list[str], module: nn.Module, cuts: Cuts, problem: Problem, ranks: int) -> bool:
    """Whether the graph has strategies for all of the layers as they are cut: not where ranks share heads of keys."""
    kinds = cuts.kinds(module)
    for name in names:
        place = problem.layers.get(name)
        if place is None or CUT_AS[kinds[name]] not in problem.names[place]:
            return False
        above = name.rpartition(".")[0]
        if kinds.get(above) == "attention" and HeadCounts(above, module.get_submodule(above), ranks).keys % ranks:
            return False
    return True
