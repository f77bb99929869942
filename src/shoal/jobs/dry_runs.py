"""Dry runs of a job's model and of others of its family, each made once, and what follows from them for models of other
depths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from shoal.errors import UserError
from shoal.jobs.choose import Settled, microbatches_of
from shoal.models import ModelSpec, build
from shoal.optim.groups import decay_matrices_only
from shoal.pipeline import schedule_of
from shoal.plan import Plan, option_parameters
from shoal.planner import (
    SHALLOW,
    Blocks,
    KnownStages,
    Recording,
    Staged,
    Subject,
    alike_blocks,
    blocks_by_stage,
    deepened,
    dry_run,
    dry_run_stages,
    equal,
    equal_stages,
)
from shoal.planner.policies import by_place
from shoal.planner.treated import (
    Runs,
    TreatedStages,
    fewer,
    more_of,
    number_of,
    recompute_of,
    runs_by_stage,
    with_runs,
)
from shoal.precision import Precision

Places = tuple[Recording, ...]
"""What the ranks of a pipeline do, by their places in it; without stages of one alone."""
WORTH = 0.75
"""The share of a model's blocks that is run dry at most where the others follow from these."""
COMPARED = 6
"""Blocks of the pipeline, of up to three stages, that is compared with what follows from a deeper one."""

_COMPARED: dict[str, Blocks | None] = {}
"""What comparisons of models have found, by the settings of both."""


def compared(shallow: ModelSpec, deep: ModelSpec, numbers: Precision) -> Blocks | None:
    """See `alike_blocks`. A process compares models of the same settings once."""
    key = repr(((shallow.name, shallow.values), (deep.name, deep.values), numbers))
    if key not in _COMPARED:
        _COMPARED[key] = alike_blocks(shallow.factory, deep.factory, numbers)
    return _COMPARED[key]


class DryRuns:
    """Dry runs for one job, of models that are given by their `[model]` tables."""

    def __init__(self, settled: Settled, precision: Precision) -> None:
        self._precision, self._microbatch = precision, microbatches_of(settled.job)[0]
        self._sample = settled.model.prepare_data(settled.data.train)[0]
        self._groups = decay_matrices_only(settled.job.train.weight_decay)
        self._recordings: dict[str, Places] = {}
        self._staged: dict[str, Staged] = {}
        self._models: dict[str, ModelSpec] = {}
        self._compared: dict[str, Blocks] = {}
        self._known: dict[str, KnownStages] = {}
        self._proofs: dict[str, bool] = {}

    def under(self, settled: Settled) -> DryRuns:
        """Returns those for the same job with another plan and microbatch; what is known of either is known of both."""
        found = copy(self)
        found._microbatch = microbatches_of(settled.job)[0]
        return found

    def model(self, table: Mapping[str, Any]) -> ModelSpec:
        """The model of a table, which is read once."""
        key = repr(table)
        if key not in self._models:
            self._models[key] = build(table)
        return self._models[key]

    def whole(self, table: Mapping[str, Any], plan: Plan) -> Places:
        """What the ranks do with a model, by a dry run of all of it."""
        key = self._key(table, plan)
        if key not in self._recordings:
            if plan.pipelined:
                found = _by_place(self._stages(table, plan), plan)
            else:
                found = (dry_run(self._subject(table, plan)),)
            self._recordings[key] = found
        return self._recordings[key]

    def proved(self, table: Mapping[str, Any], depth: str, plan: Plan) -> bool:
        """Whether what models with another `depth` than that of `table` do follows from dry runs of few blocks. This
        is tried, on the model itself if it is deep enough, once for a plan."""
        key = self._key(table, plan)
        if key not in self._proofs:
            try:
                found = (self._stages_follow if plan.pipelined else self._follows)(table, depth, plan)
            except UserError:  # the model cannot be as shallow
                found = False
            self._proofs[key] = found
        return self._proofs[key]

    def deep(self, table: Mapping[str, Any], depth: str, plan: Plan, sure: bool = True) -> Places | None:
        """What the ranks do with a model, from dry runs of others with fewer blocks; None where that does not say all.
        `sure`: the model is built and compared with the shallow one, also where another depth has been; if not, that
        is left to `as_assumed`."""
        shallow = {**table, depth: SHALLOW}
        blocks = self._blocks(shallow, table) if sure else self._assumed(table, depth)
        if blocks is None:
            return None
        if not plan.pipelined:
            one = deepened(self.whole(shallow, plan)[0], blocks)
            return None if one is None else (one,)
        numbers = blocks_by_stage(self.model(shallow).factory, blocks.number, plan)
        if numbers is None:
            return None
        known = self._known.setdefault(self._family(shallow, plan), KnownStages(blocks))
        if few := known.lacking(numbers):
            run = self._few_blocks(table, depth, few, plan)
            if run is None:
                return None
            known.add(run, few)
        staged = known.of(numbers)
        return None if staged is None else _by_place(staged, plan)

    def treated(self, table: Mapping[str, Any], depth: str, plan: Plan) -> Places | None:
        """What the ranks do with a model some of whose blocks `plan` has computed again, from dry runs of fewer; None
        where that does not say all, or would take about as long."""
        shallow = {**table, depth: SHALLOW}
        blocks = self._blocks(shallow, table)
        if blocks is None:
            return None
        numbers: tuple[int, ...] | None = (blocks.number,)
        if plan.pipelined:
            numbers = blocks_by_stage(self.model(shallow).factory, blocks.number, plan)
        if numbers is None:
            return None
        runs = runs_by_stage(by_place(option_parameters(plan.recompute), blocks.number), numbers)
        few = fewer(runs, SHALLOW)
        more = more_of(runs, few, SHALLOW + 1)
        if number_of(few) <= SHALLOW or number_of([*few, *more]) > WORTH * blocks.number:
            return None
        first = self._with_runs(table, depth, few, plan)
        if first is None:
            return None
        proof = f"{plan.pipelined} {self._family(shallow, replace(plan, recompute='none'))}"
        if proof not in self._proofs:
            second, follows = self._with_runs(table, depth, more, plan), _from_runs(first, few, more, blocks)
            self._proofs[proof] = second is not None and follows is not None and _equal(follows, second)
        found = _from_runs(first, few, runs, blocks) if self._proofs[proof] else None
        if found is None:
            return None
        return _by_place(found, plan) if isinstance(found, Staged) else (found,)

    def _with_runs(
        self, table: Mapping[str, Any], depth: str, runs: Sequence[Runs], plan: Plan
    ) -> Recording | Staged | None:
        """A dry run of the model with these runs of blocks in its stages, None if its blocks are not alike."""
        numbers = [number_of([own]) for own in runs]
        few, plan = {**table, depth: sum(numbers)}, replace(plan, recompute=recompute_of(runs))
        if self._blocks({**table, depth: SHALLOW}, few) is None:
            return None
        return self._stages(few, in_stages(plan, numbers)) if plan.pipelined else self.whole(few, plan)[0]

    def as_assumed(self, table: Mapping[str, Any], depth: str) -> bool:
        """Whether a model's blocks are what `deep` takes them for where it is not to be sure."""
        return self._blocks({**table, depth: SHALLOW}, table) == self._assumed(table, depth)

    def _assumed(self, table: Mapping[str, Any], depth: str) -> Blocks | None:
        """The blocks of a model as those of one with another depth that has been compared with the same shallow one;
        where none has, its own."""
        shallow = {**table, depth: SHALLOW}
        known, number = self._compared.get(repr(shallow)), self.model(table).values[depth]
        return self._blocks(shallow, table) if known is None or number <= SHALLOW else replace(known, number=number)

    def _follows(self, table: Mapping[str, Any], depth: str, plan: Plan) -> bool:
        if self.model(table).values[depth] <= SHALLOW:
            table = {**table, depth: SHALLOW + 1}
        deep = self.deep(table, depth, plan)
        return deep is not None and equal(deep[0], self.whole(table, plan)[0])

    def _stages_follow(self, table: Mapping[str, Any], depth: str, plan: Plan) -> bool:
        """Compares a pipeline of few blocks with what follows from the model's own; where that has short stages, from a
        deeper one in two stages."""
        shallow, number = {**table, depth: SHALLOW}, self.model(table).values[depth]
        numbers = blocks_by_stage(self.model(shallow).factory, number, plan) if number > SHALLOW else ()
        if numbers is None:
            return False
        if min(numbers, default=0) < SHALLOW:
            numbers = (SHALLOW + 1, SHALLOW + 1)
            table, plan = {**table, depth: sum(numbers)}, in_stages(plan, numbers)
        stages = min(len(numbers), 3)
        few = [COMPARED // stages] * stages
        blocks, small = self._blocks(shallow, table), self._few_blocks(table, depth, few, plan)
        if blocks is None or small is None:
            return False
        known, own = KnownStages(blocks), self._stages(table, plan)
        known.add(own, numbers)
        if not (equal_stages(known.of(few), small) and equal_stages(known.of(numbers), own)):
            return False
        self._known[self._family(shallow, plan)] = known
        return True

    def _few_blocks(self, table: Mapping[str, Any], depth: str, numbers: Sequence[int], plan: Plan) -> Staged | None:
        """A dry run of the model with so many blocks in each of its stages, None if these are not alike."""
        few = {**table, depth: sum(numbers)}
        if self._blocks({**table, depth: SHALLOW}, few) is None:
            return None
        return self._stages(few, in_stages(plan, numbers))

    def _stages(self, table: Mapping[str, Any], plan: Plan) -> Staged:
        key = self._key(table, plan)
        if key not in self._staged:
            self._staged[key] = dry_run_stages(self._subject(table, plan))
        return self._staged[key]

    def _subject(self, table: Mapping[str, Any], plan: Plan) -> Subject:
        model = self.model(table)
        return Subject(model.factory, model.loss, self._sample, self._microbatch, self._precision, plan, self._groups)

    def _key(self, table: Mapping[str, Any], plan: Plan) -> str:
        """Equal where a dry run is: by all settings of the model, since what one table leaves to a preset or a default,
        another may give."""
        model = self.model(table)
        settings = model.name, table.get("loss"), model.values
        return repr((*settings, self._microbatch, plan.recompute, plan.division))

    def _family(self, shallow: Mapping[str, Any], plan: Plan) -> str:
        """Equal for models that differ by their depth, and plans that differ by their stages alone."""
        return self._key(shallow, replace(plan, pp=1, schedule="1f1b", stages=None))

    def _blocks(self, shallow: Mapping[str, Any], deep: Mapping[str, Any]) -> Blocks | None:
        """See `compared`: of the models of two tables."""
        found = compared(self.model(shallow), self.model(deep), self._precision)
        if found is not None:
            self._compared[repr(shallow)] = found
        return found


def _from_runs(
    one: Recording | Staged, known: Sequence[Runs], wanted: Sequence[Runs], blocks: Blocks
) -> Recording | Staged | None:
    """What the ranks do with a model whose stages have the runs `wanted`, from `one` with `known`."""
    if isinstance(one, Staged):
        return TreatedStages(blocks, one, known).of(wanted)
    return with_runs(one, known[0], wanted[0], blocks)


def _equal(one: Recording | Staged, other: Recording | Staged) -> bool:
    """Whether they say the same of memory."""
    if isinstance(one, Staged):
        return isinstance(other, Staged) and equal_stages(one, other)
    return isinstance(other, Recording) and equal(one, other)


def in_stages(plan: Plan, numbers: Sequence[int]) -> Plan:
    """The plan with stages of so many blocks, one a rank."""
    return replace(plan, pp=len(numbers), schedule="1f1b", stages=list(numbers))


def _by_place(staged: Staged, plan: Plan) -> Places:
    one = schedule_of(plan, 1)
    return tuple(staged.of(one.stages_of(place)) for place in range(plan.pp))
