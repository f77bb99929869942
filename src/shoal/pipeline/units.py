"""The parts of a model that stages are made of, and which stage has which.

A part is a repeated block (what `compiling.blocks` finds, or the modules of a Sequential), or any other module that has parameters of its own, with the modules in it. A stage has contiguous parts,
in the order in which the model's forward calls them; what it computes between parts is computed wherever its results are needed. A module around blocks that has parameters beside them (a scale of
logits, a class token) computes with those between parts, so every stage has them, and their gradients are summed (split.Tied).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from shoal.errors import UserError, did_you_mean
from shoal.module.compiling import blocks, recomputable
from shoal.pipeline.balance import balance
from shoal.pipeline.order import children_as_called

Stages = Sequence[int] | Sequence[Sequence[str]]
"""By hand: how many blocks each stage has, or which parts, by name or by the beginning of it."""


@dataclass(frozen=True)
class Unit:
    """A part by its `name`. `work`: elements of its matrices, about what a sample takes; a lookup takes none. `is_block`: one of the repeated parts."""

    name: str
    module: nn.Module
    work: int
    is_block: bool


def units_of(module: nn.Module) -> list[Unit]:
    """In the order in which the model calls them: that of the pipeline plan that a model of `transformers` comes with, or as its forward is written (see order)."""
    repeated = {id(block) for block in _blocks(module)}
    found: list[Unit] = []
    seen: set[int] = set()

    def visit(name: str, part: nn.Module) -> None:
        if id(part) in seen:
            return  # by another name
        seen.add(id(part))
        if id(part) in repeated or _is_part(part, repeated):
            found.append(Unit(name, part, _work(part), id(part) in repeated))
            return
        for key, child in children_as_called(part):
            visit(f"{name}.{key}".lstrip("."), child)

    visit("", module)
    return _as_planned(module, found)


def stages_of(units: Sequence[Unit], stages: int, wanted: Stages | None = None) -> list[int]:
    """The stage of each unit: as `wanted`, else so that the one with most work has as little as can be. UserError for what does not come out."""
    if wanted is None:
        pieces = pieces_of(units)
        cuts = balance(
            [sum(unit.work for unit in piece.own) for piece in pieces],
            stages,
            sum(unit.work for unit in pieces[0].before),
            sum(unit.work for unit in pieces[-1].behind),
        )
        return [stage for stage, cut in enumerate(cuts) for place in cut for _ in pieces[place].units]
    if len(wanted) != stages:
        raise UserError(f"plan.stages names {len(wanted)} stages, the schedule has {stages} (plan.pp times its chunks)")
    if all(isinstance(each, int) for each in wanted):
        return _by_number(units, [each for each in wanted if isinstance(each, int)])
    return _by_name(units, [each for each in wanted if not isinstance(each, int)])


@dataclass(frozen=True)
class Piece:
    """A block with what is called around it: nothing is cut there."""

    before: list[Unit]
    own: list[Unit]
    behind: list[Unit]

    @property
    def units(self) -> list[Unit]:
        return [*self.before, *self.own, *self.behind]


def pieces_of(units: Sequence[Unit]) -> list[Piece]:
    """What stages are made of, in order."""
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
    if sum(numbers) != len(pieces) or min(numbers) < 1:
        raise UserError(f"plan.stages = {list(numbers)}: the model has {len(pieces)} blocks; give each stage at least 1 of them")
    return [stage for stage, piece in zip(_repeat(numbers), pieces, strict=True) for _ in piece.units]


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
                f"plan.stages gives {unit.name} to {'no stage' if not having else f'the stages {having}'}: each part is to be named once, or what it lies in"
            )
        found += having
    parts = [unit.name for unit in units]
    for name in (name for each in names for name in each):
        if not any(part == name or part.startswith(f"{name}.") for part in parts):
            raise UserError(
                f'plan.stages: "{name}" is no part of the model.{did_you_mean(name, parts)} Its parts: {", ".join(parts)}'
            )
    if set(found) != set(range(len(names))):
        raise UserError(f"plan.stages: each stage has at least one part, not {dict(zip(parts, found, strict=True))}")
    return found


def _blocks(module: nn.Module) -> list[nn.Module]:
    found = blocks(module)
    if found == [module]:
        found = recomputable(module)  # none: cut between any two
    return [block for block in found if type(block) is not nn.Sequential and any(True for _ in block.parameters())]


def _is_part(part: nn.Module, repeated: Collection[int]) -> bool:
    """Whether a module around no `repeated` one has something of its own that is trained, or, where there is no module in it, written down."""
    inside = [id(each) for each in part.modules()][1:]
    if inside:
        loose = any(True for _ in part.parameters(recurse=False))
        return loose and bool(repeated) and not any(each in repeated for each in inside)
    persistent = part._buffers.keys() - part._non_persistent_buffers_set
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
    """In the order of a `transformers` model's own pipeline plan: what it names comes as it says, the rest (a head) behind."""
    base = getattr(module, "base_model", None)
    plan = list(getattr(getattr(module, "config", None), "base_model_pp_plan", None) or ())
    if not isinstance(base, nn.Module) or not plan:
        return units
    prefix = next((f"{name}." for name, each in module.named_modules() if each is base and name), "")

    def place(unit: Unit) -> int:
        inside = unit.name.removeprefix(prefix) if unit.name.startswith(prefix) else ""
        named = [number for number, name in enumerate(plan) if inside == name or inside.startswith(f"{name}.")]
        return named[0] if named else len(plan)

    return sorted(units, key=place)
