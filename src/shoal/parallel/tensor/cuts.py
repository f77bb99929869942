"""How the layers of a model are cut: by rules where there are any, else as its own graph says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from shoal.parallel.expert.mixtures import unlike
from shoal.parallel.tensor.graph.find import found_in
from shoal.parallel.tensor.graph.found import Found
from shoal.parallel.tensor.pins import Placements, check_found, cut_of, is_whole, placed_by_rules
from shoal.parallel.tensor.region import Region
from shoal.parallel.tensor.rules import Rules, UnknownStyle, check_sequence, kind_of, matches, rules_for, table_of


@dataclass(frozen=True)
class Cuts:
    """The kind of each layer that rules name, and what was found from the model's graph.

    experts: the rules of the user that name experts, which count without tp too
    """

    rules: Rules = field(default_factory=dict)
    found: Found | None = None
    experts: Rules = field(default_factory=dict)

    def kinds(self, module: nn.Module) -> dict[str, str]:
        """Returns the kind of each module of the whole model that is cut, by its name."""
        by_rules = {name: kind_of(name, self.rules) for name, _ in module.named_modules()}
        found = {} if self.found is None else dict(self.found.kinds)
        return {name: kind for name, kind in (by_rules | found).items() if kind != "whole"}


def cuts_of(
    module: nn.Module,
    ranks: int,
    given: Rules | None,
    region: Region | None = None,
    placements: Placements | None = None,
) -> Cuts:
    """Returns how the layers of `module`, as it was built, are cut among `ranks` along tp.

    region: of these ranks, who confirm together what is found; None: it is not confirmed
    placements: what a plan says of layers, which has to go with the rules. Raises UserError for what cannot be so
    given: rules of the user, laid over those that are known; where nothing is known of the model, or what it brings
        leaves layers out, and they name only what stays "whole", the rest is found from its graph
    """
    given = given or {}
    experts = {pattern: kind for pattern, kind in given.items() if kind == "experts"}
    if ranks == 1:
        return Cuts(experts=experts)
    pinned = all(kind == "whole" for kind in given.values())
    try:
        rules = rules_for(module, given)
    except UnknownStyle:
        if not pinned:
            raise
        rules = given
    if pinned and rules != given and _leaves_out(module, rules):
        rules = given
    if rules and not (pinned and rules == given):
        rules = placed_by_rules(module, rules, placements) if placements else rules
        check_sequence(module, rules)
        return Cuts(rules, None, experts)

    def stays_whole(name: str) -> bool:
        return _is_pinned(name, given) or is_whole(name, placements or {})

    if not placements:
        found = found_in(module, ranks, stays_whole, region)
    else:
        found = found_in(module, ranks, stays_whole, region, partial(cut_of, placements=placements))
        check_found(module, found, placements, lambda: found_in(module, ranks, partial(_is_pinned, given=given)))
    return Cuts({**found.rules, **given}, found)


def _leaves_out(module: nn.Module, rules: Rules) -> bool:
    """True if rules that a model of `transformers` brings do not say enough: they name no parameters that lie inside
    attention (a norm of heads), or beside a column and its row (an activation that is trained), or experts that are
    not stacked in one module as ours."""
    if table_of(module) is not None:
        return False
    kinds = {name: kind_of(name, rules) for name, _ in module.named_modules()}
    attentions = [name for name, kind in kinds.items() if kind == "attention"]
    inside = tuple(f"{name}." for name in (*attentions, *_with_columns_and_rows(kinds, attentions)))
    for name, each in module.named_modules():
        if kinds[name] == "experts" and unlike(each):
            return True
        own = any(True for _ in each.parameters(recurse=False))
        if own and f"{name}.".startswith(inside) and not any(matches(pattern, name) for pattern in rules):
            return True
    return False


def _with_columns_and_rows(kinds: Mapping[str, str], attentions: Iterable[str]) -> list[str]:
    """Returns the modules that have a layer cut by columns and one by rows, and no attention in them."""
    own: dict[str, set[str]] = {}
    for name, kind in kinds.items():
        own.setdefault(name.rpartition(".")[0], set()).add(kind)
    around = {"", *(name[:at] for name in attentions for at, each in enumerate(f"{name}.") if each == ".")}
    return [name for name, has in own.items() if "row" in has and has & {"column", "packed"} and name not in around]


def _is_pinned(name: str, given: Rules) -> bool:
    """True if a rule of the user has the module `name` stay whole."""
    return bool(given) and kind_of(name, {"**": "", "": "", **given}) == "whole"
