"""The parts of a model that stages consist of, and their distribution over stages.

A part is a repeated block (found by `compiling.blocks`, or the modules of a Sequential), or any other module that has
parameters of its own, with the modules in it. A stage has contiguous parts, in the order in which the model's forward
calls them. What the model computes between parts is computed on every stage that needs the result. A module around
blocks that has parameters beside them (a scale of logits, a class token) computes with those between parts, so every
stage has them, and their gradients are summed (split.Tied). So it is with those of a module that has no forward (an
nn.ParameterList), which another computes with.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import nn

from shoal.errors import UserError
from shoal.module.closest import closest
from shoal.module.compiling import blocks, recomputable
from shoal.module.scripted import is_scripted
from shoal.pipeline.balance import balance
from shoal.pipeline.order import children_called, is_named

Stages = Sequence[int] | Sequence[Sequence[str]]
"""A cut by hand: the number of blocks of each stage, or the names (or leading parts of names) of its parts."""


@dataclass(frozen=True)
class Unit:
    """A part of a model.

    name: of the module in the model
    module: the part itself
    work: elements of its matrices, roughly the cost of a sample; an embedding lookup costs none
    is_block: True for one of the repeated blocks
    """

    name: str
    module: nn.Module
    work: int
    is_block: bool


def units_of(module: nn.Module) -> list[Unit]:
    """Returns the parts of `module` in the order in which the model calls them.

    It is the order of the pipeline plan that a model of `transformers` brings, or else of its forward's source (see
    order). A part that lies in blocks too (positions that they share), and that no forward around them names, comes
    behind the first of these, in whose stage it is then.
    """
    repeated = {id(block) for block in _blocks(module)}
    within = {id(each) for block in _blocks(module) for each in list(block.modules())[1:]}
    found: list[Unit] = []
    aside: list[Unit] = []
    seen: set[int] = set()
    names = {id(each): name for name, each in module.named_modules()}  # of one with several, the first
    inside = tuple(f"{names[each]}." for each in repeated)

    def visit(name: str, part: nn.Module, to: list[Unit]) -> None:
        if id(part) in seen:
            return  # registered under another name too
        seen.add(id(part))
        if id(part) in repeated or _is_part(part, repeated) or is_scripted(part):
            first = names[id(part)]
            to.append(Unit(name if first.startswith(inside) else first, part, _work(part), id(part) in repeated))
            return
        for key, child in children_called(part):
            theirs = aside if id(child) in within and not is_named(part, key) else to
            visit(f"{name}.{key}".lstrip("."), child, theirs)

    visit("", module, found)
    for unit in reversed(aside):
        having = (at for at, each in enumerate(found, 1) if any(unit.module is own for own in each.module.modules()))
        found.insert(next(having, len(found)), unit)
    return _as_planned(module, found or [Unit("", module, _work(module), False)])


def stages_of(units: Sequence[Unit], stages: int, wanted: Stages | None = None) -> list[int]:
    """Returns the stage of each unit.

    units: in the order of calls
    stages: their number
    wanted: the user's cut; None: balanced, so that the stage with most work has as little as possible

    Raises UserError for a cut that does not fit the model.
    """
    if wanted is None:
        pieces = pieces_of(units)
        if len(pieces) < stages <= len(units):
            raise UserError(
                f"plan.pp: a model of {len(pieces)} blocks has no {stages} stages that are cut between these: take at "
                f"most {len(pieces)}, or name the parts of each stage (plan.stages), of which there are {len(units)}"
            )
        cuts = balance(
            [sum(unit.work for unit in piece.own) for piece in pieces],
            stages,
            sum(unit.work for unit in pieces[0].before),
            sum(unit.work for unit in pieces[-1].behind),
        )
        return [stage for stage, cut in enumerate(cuts) for place in cut for _ in pieces[place].units]
    check_cut(wanted)
    if len(wanted) != stages:
        raise UserError(f"plan.stages names {len(wanted)} stages, the schedule has {stages} (plan.pp times its chunks)")
    if all(isinstance(each, int) for each in wanted):
        return _by_number(units, [each for each in wanted if isinstance(each, int)])
    return _by_name(units, [each for each in wanted if not isinstance(each, int)])


@dataclass(frozen=True)
class Piece:
    """A block with the parts that are called around it, never cut apart."""

    before: list[Unit]
    own: list[Unit]
    behind: list[Unit]

    @property
    def units(self) -> list[Unit]:
        return [*self.before, *self.own, *self.behind]


def pieces_of(units: Sequence[Unit]) -> list[Piece]:
    """Groups units into the pieces that stages consist of, in order."""
    if not any(unit.is_block for unit in units):
        return [Piece([], [unit], []) for unit in units]
    found: list[Piece] = []
    before: list[Unit] = []
    for unit in units:
        if unit.is_block:
            found.append(Piece(before, [unit], []))
            before = []
        elif found:
            found[-1].behind.append(unit)
        else:
            before.append(unit)
    return found


def _by_number(units: Sequence[Unit], numbers: Sequence[int]) -> list[int]:
    pieces = pieces_of(units)
    check_numbers(numbers, len(pieces))
    return [stage for stage, piece in zip(_repeat(numbers), pieces, strict=True) for _ in piece.units]


def check_cut(wanted: object) -> None:
    """Raises UserError unless a user's cut is numbers of blocks, or names of parts, for each stage."""
    given = wanted if _is_row(wanted) else None
    named = [_is_row(each) and all(isinstance(name, str) for name in each) for each in given or ()]
    if not given or not (all(named) or all(type(each) is int for each in given)):
        raise UserError(
            f"plan.stages = {wanted!r:.100}: give a whole number of blocks for each stage, such as [3, 5], or the "
            'names of its parts, such as [["embedding", "blocks.0"], ["blocks.1", "head"]]'
        )


def _is_row(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def check_numbers(numbers: Sequence[int], blocks: int) -> None:
    """Raises UserError unless each stage has some of a model's `blocks`, and together they have all."""
    if sum(numbers) != blocks or min(numbers) < 1:
        raise UserError(
            f"plan.stages = {list(numbers)}: the model has {blocks} blocks; give each stage at least 1 of them, and "
            f"all of them together ({sum(numbers)} are given)"
        )


def _repeat(numbers: Sequence[int]) -> list[int]:
    return [stage for stage, number in enumerate(numbers) for _ in range(number)]


def _by_name(units: Sequence[Unit], names: Sequence[Sequence[str]]) -> list[int]:
    found = []
    for unit in units:
        having = [
            stage
            for stage, each in enumerate(names)
            if any(unit.name == name or unit.name.startswith(f"{name}.") for name in each)
        ]
        if len(having) != 1:
            raise UserError(
                f"plan.stages gives {unit.name} to {'no stage' if not having else f'the stages {having}'}: each part "
                "is to be named once, or what it lies in"
            )
        found += having
    parts = [unit.name for unit in units]
    around = list(
        dict.fromkeys(
            ".".join(words[:most]) for words in (part.split(".") for part in parts) for most in range(1, 1 + len(words))
        )
    )
    for name in (name for each in names for name in each):
        if name not in around:
            raise UserError(
                f'plan.stages: "{name}" is no part of the model.{closest(name, around, str.__eq__)} Its parts: '
                f"{', '.join(parts)}"
            )
    if set(found) != set(range(len(names))):
        raise UserError(f"plan.stages: each stage has at least one part, not {dict(zip(parts, found, strict=True))}")
    return found


def _blocks(module: nn.Module) -> list[nn.Module]:
    found = blocks(module)
    sequences = found == [module]
    if sequences:
        found = recomputable(module)  # no blocks: the model may be cut between any two of these
    found = [block for block in found if type(block) is not nn.Sequential and any(True for _ in block.parameters())]
    return [] if sequences and len(found) == 1 else found  # of one no stages could be made, of its parts they can


def _is_part(part: nn.Module, repeated: Collection[int]) -> bool:
    """True if a module outside of the `repeated` blocks has state of its own.

    With state in the modules in it (a norm with its activation has none there) that is a parameter, if it lies around
    no block; without, a parameter or a persistent buffer.
    """
    if type(part).forward is nn.Module.forward and "forward" not in vars(part):
        return False
    inside = list(part.modules())[1:]
    if any(map(_has_state, inside)):
        loose = any(True for _ in part.parameters(recurse=False))
        return loose and bool(repeated) and not any(id(each) in repeated for each in inside)
    return _has_state(part)


def _has_state(part: nn.Module) -> bool:
    persistent = set(part._buffers.keys()) - set(part._non_persistent_buffers_set)  # lists, of torch.jit
    return any(True for _ in part.parameters(recurse=False)) or bool(persistent)


def _work(part: nn.Module) -> int:
    return sum(
        parameter.numel()
        for owner in part.modules()
        if not isinstance(owner, nn.Embedding | nn.EmbeddingBag)
        for parameter in owner.parameters(recurse=False)
        if parameter.dim() > 1
    )


def _as_planned(module: nn.Module, units: list[Unit]) -> list[Unit]:
    """Returns units in the order of a `transformers` model's own pipeline plan, and those that it does not name (a
    head) last; as they are where their order says the same of all that it names, since it says more of the others (a
    projection of embeddings, which comes before the blocks)."""
    base = getattr(module, "base_model", None)
    plan = list(getattr(getattr(module, "config", None), "base_model_pp_plan", None) or ())
    if not isinstance(base, nn.Module) or not plan:
        return units
    prefix = next((f"{name}." for name, each in module.named_modules() if each is base and name), "")

    def place(unit: Unit) -> int:
        inside = unit.name.removeprefix(prefix) if unit.name.startswith(prefix) else ""
        named = [number for number, name in enumerate(plan) if inside == name or inside.startswith(f"{name}.")]
        return named[0] if named else len(plan)

    known = [at for at in map(place, units) if at < len(plan)]
    return units if known == sorted(known) else sorted(units, key=place)
