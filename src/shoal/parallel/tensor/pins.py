"""Placements that a plan gives: "column", "row", "vocabulary" or "whole" by patterns of layer names; the rest is as the
rules, or the model's own graph, have it.

A layer can be cut in one way, or stay whole; and the two ends of a cut go together: what one layer's rows are, another
one's columns are behind it, so both are cut or none is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from shoal.errors import UserError, check_choice
from shoal.module.stand_in import whole_model
from shoal.parallel.tensor.graph.dims import leaves
from shoal.parallel.tensor.graph.find import traces_of
from shoal.parallel.tensor.graph.found import Found
from shoal.parallel.tensor.graph.select import followed
from shoal.parallel.tensor.graph.trace import fake_mode
from shoal.parallel.tensor.rules import Rules, check_pattern, kind_of, matches

Placements = Mapping[str, str]
"""From patterns of layer names (see rules) to how they are cut."""
CUT_AS = {
    "column": "column",
    "qkv": "column",
    "packed": "column",
    "gathered": "column",
    "row": "row",
    "split": "row",
    "vocabulary": "vocabulary",
    "head": "vocabulary",
}
"""What a placement calls the kinds of layers."""
KNOWN = ("column", "row", "vocabulary", "whole")
"""What a placement may be."""
_ALONE = ("gathered", "split")
"""Kinds that are cut without another end."""


def wanted_of(name: str, placements: Placements) -> str | None:
    """Returns how the module `name` is to be cut; None where nothing is said. The last pattern that matches counts."""
    found = None
    for pattern, each in placements.items():
        if matches(pattern, name):
            found = each
    return found


def cut_of(name: str, placements: Placements) -> str | None:
    """Returns how a module is to be cut; None where nothing is said, or where it is to stay whole."""
    wanted = wanted_of(name, placements)
    return None if wanted == "whole" else wanted


def is_whole(name: str, placements: Placements) -> bool:
    """Whether a module, or one around it, is to stay whole."""
    while name:
        if wanted_of(name, placements) == "whole":
            return True
        name = name.rpartition(".")[0]
    return False


def names_blocks(placements: Placements) -> bool:
    """Whether some of the patterns are of single blocks, by their numbers, so that what holds of one block may not hold
    of others."""
    return any(part.strip("*").isdigit() for pattern in placements for part in pattern.split("."))


def check_placements(module: nn.Module, placements: Placements) -> None:
    """Raises UserError for what is no table of placements, and for a pattern that matches no module."""
    check_kinds(placements)
    names = [name for name, _ in whole_model(module)]
    for pattern in placements:
        check_pattern("plan.placements", pattern, names)


def check_kinds(placements: Placements) -> None:
    """Raises UserError for what is no table of placements, whatever layers there are."""
    if not isinstance(placements, Mapping):
        raise UserError(
            f"plan.placements = {placements!r:.100}: give a table, from names of layers to how they are cut"
        )
    for pattern, kind in placements.items():
        check_choice(f"plan.placements[{pattern!r}] = {kind!r:.100} is none of", kind, KNOWN)


def refused(name: str, wanted: str, may_be: Sequence[str], why: str = "") -> UserError:
    """The error for a layer that cannot be cut as it is wanted."""
    one_of = " or ".join(f'"{each}"' for each in dict.fromkeys([*may_be, "whole"]))
    return UserError(
        f'plan.placements: {name} cannot be "{wanted}"{f" ({why})" if why else ""}: leave it out, or give {one_of}'
    )


def placed_by_rules(module: nn.Module, rules: Rules, placements: Placements) -> Rules:
    """Returns the rules with what `placements` want whole, and all that goes with it.

    Raises UserError for a layer that the rules do not cut as it is wanted, and for two that go together and are wanted
    otherwise.
    """
    names = [name for name, _ in module.named_modules()]
    kinds = {name: kind for name in names if (kind := kind_of(name, rules)) not in ("whole", "sequence", "overlap")}
    wanted = {name: each for name in names if (each := wanted_of(name, placements)) is not None}
    layers = [name for name, kind in kinds.items() if kind in CUT_AS or kind == "experts"]
    for name, each in wanted.items():
        if each != "whole" and CUT_AS.get(kinds.get(name, "")) != each:
            inside = [other for other in layers if other.startswith(f"{name}.")]
            why = f"it holds {', '.join(inside[:3])}: name those" if inside else ""
            raise refused(name, each, [CUT_AS[kinds[name]]] if kinds.get(name) in CUT_AS else [], why)
    left: list[str] = []
    for group in _groups(module, kinds, layers):  # in the order of the model, as all ranks say the same
        off = [name for name in group if is_whole(name, placements)]
        kept = [name for name in group if name in wanted and name not in off]
        if off and kept:
            raise UserError(
                f'plan.placements: {off[0]} cannot be "whole" while {kept[0]} is "{wanted[kept[0]]}": these go '
                "together, so leave out one of them"
            )
        left += group if off else []
    return {**rules, **_without(names, kinds, left, rules)}


def check_found(module: nn.Module, found: Found, placements: Placements, otherwise: Callable[[], Found]) -> None:
    """Raises UserError for a layer that was not found to be cut as `placements` say; `otherwise`: what is found
    without them."""
    for name, _ in module.named_modules():
        wanted = cut_of(name, placements)
        if wanted is not None and CUT_AS.get(found.kinds.get(name, "")) != wanted:
            kind = CUT_AS.get(otherwise().kinds.get(name, ""))
            if kind == wanted:
                raise UserError(
                    f'plan.placements: {name} cannot be "{wanted}" beside the others: layers that it goes together '
                    "with are to stay whole, or are cut otherwise; leave out one of them"
                )
            raise refused(name, wanted, [] if kind is None else [kind], found.why(name))


def _without(names: Sequence[str], kinds: Mapping[str, str], left: Sequence[str], rules: Rules) -> dict[str, str]:
    """Returns the rules that leave the layers `left` whole, and what is set for them: the heads of attention around
    them, norms inside of it, and each rank's own tokens where such a layer takes all."""
    if not left:
        return {}
    found = dict.fromkeys(left, "whole")
    attentions = {name for name, kind in kinds.items() if kind == "attention"}
    gone = {name for name in attentions if any(each.startswith(f"{name}.") for each in left)}
    for name in names:
        if name in gone or (name in kinds and any(name.startswith(f"{each}.") for each in gone)):
            found[name] = "whole"
    all_tokens = any(name in gone or kinds.get(name) in ("vocabulary", "head", "experts") for name in found)
    if all_tokens and kind_of("", rules) != "whole":
        found[""] = "whole"
    return found


def together(module: nn.Module, cuts: Rules) -> list[list[str]]:
    """Returns the layers that are cut together, by `cuts`: the kinds of single layers by their names."""
    return _groups(module, cuts, [name for name, kind in cuts.items() if kind in CUT_AS])


def _groups(module: nn.Module, kinds: Mapping[str, str], layers: Sequence[str]) -> list[list[str]]:
    """Returns the layers that are cut together: those that share a dim, or a parameter, which is cut; where the graph
    does not show a layer, those of one module."""
    joined: dict[str, set[object]] = {name: set() for name in layers}
    for name in layers:
        for each in module.get_submodule(name).parameters(recurse=False):
            joined[name].add(id(each))
    seen: set[str] = set()
    for trace in traces_of("", module, fake_mode(module)):
        flow = followed(trace, list(trace.calls[0].module.parameters()), trace.calls[0].name == "")
        for use in flow.uses:
            name = use.op.call.name
            if name in layers:
                seen.add(name)
            if name in layers and kinds[name] not in _ALONE and not (use.lookup or id(use.op) in flow.heads):
                dim = use.columns if CUT_AS.get(kinds[name]) == "row" else use.rows
                joined[name] |= {leaf for leaf in leaves(dim) if not leaf.blocked}
    for name in layers:
        if name not in seen:
            joined[name].add(name.rpartition(".")[0])
    return _connected(joined)


def _connected(joined: Mapping[str, set[object]]) -> list[list[str]]:
    """Returns the names that hang together by what is joined to them."""
    groups: list[tuple[list[str], set[object]]] = []
    for name, things in joined.items():
        near = [each for each in groups if each[1] & things]
        groups = [each for each in groups if not each[1] & things]
        groups.append(
            ([*(other for each in near for other in each[0]), name], things.union(*(each[1] for each in near)))
        )
    return [names for names, _ in groups]
