"""A deep model some of whose blocks backward computes again, from one with fewer blocks of each kind.

Blocks of one stage that follow each other and are treated alike are a run. Those of a long run but its first and its
last do the same, so a run of `SHALLOW` blocks says what one of any more does, as `depth` has it for a whole model; and
of stages with equal runs between the first and the last of a pipeline one says what all do, as `deep_stages` has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise

from shoal.module.chosen_blocks import as_ranges
from shoal.plan import Option
from shoal.planner.deep_stages import End, ends_of, moved
from shoal.planner.depth import Blocks
from shoal.planner.recording import Event, OneStage, Recording, Staged
from shoal.planner.repeats import SHALLOW, Shift, alive, more_parameters, turns_of

Runs = tuple[tuple[str, int], ...]
"""The blocks of a stage in order: how each run of them is treated, and how many it has."""


def runs_by_stage(ways: Mapping[int, str], numbers: Sequence[int]) -> list[Runs]:
    """The runs of stages with so many blocks each. `ways`: how blocks are treated, by their places, "none" where they
    are not named."""
    ends = [0, *accumulate(numbers)]
    stages = ([ways.get(place, "none") for place in range(*each)] for each in pairwise(ends))
    return [tuple((way, len(list(run))) for way, run in groupby(own)) for own in stages]


def fewer(runs: Sequence[Runs], most: int) -> list[Runs]:
    """The stages of a small pipeline that says what stages with these `runs` do: its first, those between that differ,
    and its last, with at most so many blocks in a run."""
    short = [tuple((way, min(number, most)) for way, number in own) for own in runs]
    return [*short[:1], *dict.fromkeys(short[1:-1]), *short[1:][-1:]]


def more_of(runs: Sequence[Runs], few: Sequence[Runs], most: int) -> list[Runs]:
    """Another small pipeline than `few` that says it too: with more blocks in long runs, or with a stage more."""
    found = fewer(runs, most)
    return found if found != list(few) else [*found[:2], *found[1:]]


def number_of(runs: Sequence[Runs]) -> int:
    """Blocks in all."""
    return sum(number for own in runs for _, number in own)


def recompute_of(runs: Sequence[Runs]) -> Option:
    """The plan's `recompute` by which blocks are treated so."""
    ways = [way for own in runs for way, number in own for _ in range(number)]
    places = {way: [place for place, each in enumerate(ways) if each == way] for way in ("full", "selective")}
    named = {way: as_ranges(own) for way, own in places.items() if own}
    return {"name": "blocks", **named} if named else "none"


class TreatedStages:
    """Stages of a `run` dry, which have these `runs`, of models that differ in the number of their `blocks` alone."""

    def __init__(self, blocks: Blocks, run: Staged, runs: Sequence[Runs]) -> None:
        self._blocks, self._run, self._number = blocks, run, number_of(runs)
        self._shifted = Shift(blocks.name)
        self._stages: dict[tuple[End, tuple[str, ...]], list[tuple[Runs, OneStage]]] = {}
        for stage, end, own, first in zip(run.stages, ends_of(runs), runs, _firsts(runs), strict=True):
            known = own, moved(stage, -first, self._shifted)
            self._stages.setdefault((end, _ways(own)), []).append(known)

    def of(self, runs: Sequence[Runs]) -> Staged | None:
        """The stages of a model with these runs, which `fewer` has shortened to those that are known; None where blocks
        of a run differ in what they do."""
        more = number_of(runs) - self._number
        parameters = more_parameters(self._run.parameters, more, self._shifted, self._number)
        if parameters is None or (number_of(runs[:1]) == 1 and not self._blocks.from_second):
            return None
        stages, made = list[OneStage](), dict[tuple[End, Runs], OneStage | None]()
        for end, own, first in zip(ends_of(runs), runs, _firsts(runs), strict=True):
            if (end, own) not in made:
                made[end, own] = self._made(end, own)
            found = made[end, own]
            if found is None:
                return None
            stages.append(moved(found, first, self._shifted))
        whole = self._run.num_parameters + more * self._blocks.parameters
        return replace(self._run, num_parameters=whole, parameters=parameters, stages=tuple(stages))

    def _made(self, end: End, own: Runs) -> OneStage | None:
        for runs, known in self._stages.get((end, _ways(own)), []):
            if all(few == many or SHALLOW <= few <= many for (_, few), (_, many) in zip(runs, own, strict=True)):
                return lengthened(known, runs, own, self._blocks, self._shifted)
        return None


def with_runs(few: Recording, known: Runs, wanted: Runs, blocks: Blocks) -> Recording | None:
    """The recording of a model without stages, whose blocks are the runs `wanted`, from one with `known`; None where
    blocks of a run differ in what they do."""
    more, shifted = number_of([wanted]) - number_of([known]), Shift(blocks.name)
    whole = OneStage(few.events, 0, frozenset(), few.buffers)
    found = lengthened(whole, known, wanted, blocks, shifted)
    parameters = more_parameters(few.parameters, more, shifted, number_of([known]))
    if found is None or parameters is None:
        return None
    elements = few.num_parameters + more * blocks.parameters
    return replace(few, num_parameters=elements, parameters=parameters, buffers=found.buffers, events=found.events)


def lengthened(one: OneStage, known: Runs, wanted: Runs, blocks: Blocks, shifted: Shift) -> OneStage | None:
    """A stage whose blocks, from 0 on, are the runs `wanted`, from `one` with `known`; None where the blocks of a run,
    but its first and its last, differ in what they do, or something of them lives on."""
    if known == wanted:
        return one
    number, sources = number_of([known]), _sources(known, wanted)
    starts = turns_of(one.events, shifted, number)
    if starts is None or number < 2:
        return None
    turns = [one.events[a:b] for a, b in pairwise([*starts, len(one.events)])]
    forward, last, back = turns[: number - 1], turns[number - 1], turns[: number - 1 : -1]
    if not all(_alike(turns, shifted) for own in (forward, back) for turns in _repeated(own, known, wanted)):
        return None
    deeper: list[Event] = list(one.events[: starts[0]])
    for place, source in enumerate(sources[:-1]):
        deeper += shifted.events(forward[source], place - source)
    deeper += shifted.events(last, len(sources) - number)
    for place, source in reversed([*enumerate(sources)][1:-1]):
        deeper += shifted.events(back[source], place - source)
    events = (*deeper, *back[0])
    if alive(events) != alive(one.events):  # keys of dropout, which live until the end: when they go is not said
        return None
    forwards = one.forwards + sum(len(forward[each]) for each in sources[:-1]) - sum(map(len, forward))
    own: dict[int | None, list[str]] = {}
    for name in one.names:
        own.setdefault(shifted.block(name), []).append(name)
    names = frozenset(
        shifted.name(name, place - source) for place, source in enumerate(sources) for name in own.get(source, [])
    )
    buffers = one.buffers + (len(sources) - number) * blocks.buffers
    return OneStage(events, forwards, names.union(own.get(None, [])), buffers, one.sent)


def _sources(known: Runs, wanted: Runs) -> list[int]:
    """For each block of the runs `wanted` the one of `known` that does the same."""
    found, start = list[int](), 0
    for (_, few), (_, many) in zip(known, wanted, strict=True):
        found += [start + min(place, few - 2) if place < many - 1 else start + few - 1 for place in range(many)]
        start += few
    return found


def _repeated(turns: Sequence[Sequence[Event]], known: Runs, wanted: Runs) -> list[Sequence[Sequence[Event]]]:
    """What the blocks of `known` but the first and the last of each run do, where `wanted` has more of them."""
    starts = accumulate((few for _, few in known), initial=0)
    longer = zip(starts, known, wanted, strict=False)
    return [turns[start + 1 : start + few - 1] for start, (_, few), (_, many) in longer if many > few]


def _alike(turns: Sequence[Sequence[Event]], shifted: Shift) -> bool:
    return all([*shifted.events(one, 1)] == [*other] for one, other in pairwise(turns))


def _ways(runs: Runs) -> tuple[str, ...]:
    return tuple(way for way, _ in runs)


def _firsts(runs: Sequence[Runs]) -> list[int]:
    """The number of the first block of each stage."""
    return [*accumulate((number_of([own]) for own in runs[:-1]), initial=0)]
