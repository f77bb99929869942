"""A model of which backward computes some blocks again, made from one with fewer, equals its own dry run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shoal import Plan
from shoal.jobs import dry_runs
from shoal.jobs.choose import Settled, opened, under
from shoal.jobs.dry_runs import DryRuns
from shoal.jobs.forecast import Forecast
from shoal.jobs.read import parse_job
from shoal.planner import Machine, Subject
from shoal.planner.policies import by_place
from shoal.planner.recording import equal
from shoal.planner.treated import fewer, more_of, number_of, recompute_of, runs_by_stage
from shoal.precision import precision

NUMBER = 40
FULL = {"name": "blocks", "full": "0-19, 22-39"}
BOTH = {"name": "blocks", "full": "0-9", "selective": "10-20"}
PLANS = [
    Plan(recompute=FULL),
    Plan(recompute=BOTH, cp=2),
    Plan(recompute={"name": "blocks", "full": 13}, dp=2, zero=3, memory={"activations": 0.5}),
    Plan(recompute={"name": "blocks", "full": "0-29"}, pp=4),
    Plan(recompute=BOTH, pp=2, stages=[10, 30]),
    Plan(recompute={"name": "blocks", "full": "0-12, 14, 16"}, pp=10, schedule="interleaved", stages=[1, *[2] * 18, 3]),
]


@pytest.fixture
def settled(tmp_path: Path) -> Callable[..., Settled]:
    (tmp_path / "text.txt").write_text("one fish, two fish, red fish, blue fish. " * 40)

    def made(plan: Plan, **model: Any) -> Settled:
        gpt = {"name": "gpt", "layers": NUMBER, "d_model": 32, "heads": 4, "vocab_size": 257, **model}
        data = {"source": str(tmp_path / "text.txt"), "sequence": 16, "validation": 0.0}
        train = {"steps": 2, "global_batch": 16, "microbatch": 2, "precision": "bf16"}
        return opened(*parse_job({"model": gpt, "data": data, "train": train, "plan": plan.to_dict()}))

    return made


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks of each model that is run dry."""
    found: list[int] = []

    def counted(run: Callable[[Subject], Any], subject: Subject) -> Any:
        found.append(len(subject.factory().blocks))  # type: ignore[arg-type]
        return run(subject)

    for name in ("dry_run", "dry_run_stages"):
        monkeypatch.setattr(dry_runs, name, partial(counted, getattr(dry_runs, name)))
    return found


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_what_follows_from_fewer_blocks_is_what_all_of_them_do(plan, settled, ran):
    job = settled(plan)
    runs, table = DryRuns(job, precision("bf16")), job.job.model
    found = runs.treated(table, "layers", plan)
    assert found is not None and len(ran) == 2 and sum(ran) < NUMBER
    own = runs.whole(table, plan)
    assert ran[2:] == [NUMBER] and len(found) == len(own) == plan.pp
    for one, other in zip(found, own, strict=True):
        assert equal(one, other) and one.stages == other.stages and one.lengths == other.lengths


def test_a_plan_that_names_blocks_is_looked_at_without_all_of_them(settled, ran):
    """As that of any other deep model is, and the same under other tiers is not run again."""
    job = settled(PLANS[0])
    first = Forecast(job, Machine(2**33, 2**33), 0)
    assert len(first.of(job.job.plan, [0])) == 1 and max(ran) < NUMBER
    before = list(ran)
    other = replace(job.job.plan, dp=2, zero=3)
    Forecast(under(job, other, None), Machine(2**33, 2**33, 2), 0, first.runs).of(other, [0])
    assert ran == before


def test_what_a_model_does_with_the_number_of_its_blocks_is_seen(settled, ran):
    """The auxiliary losses of all blocks are stacked: a tensor grows with their number."""
    job = settled(PLANS[0], moe={"experts": 4, "per_token": 2, "d_ff": 32})
    runs, table = DryRuns(job, precision("bf16")), job.job.model
    assert runs.treated(table, "layers", PLANS[0]) is None and len(ran) == 2
    assert runs.treated(table, "layers", PLANS[0]) is None and len(ran) == 2, "it is asked once"


@pytest.mark.parametrize("plan", PLANS[::4], ids=str)
def test_what_lives_until_the_end_is_not_told(plan, settled, ran):
    """Keys of dropout, of each block, go when the last of them does."""
    job = settled(plan, dropout=0.1)
    assert DryRuns(job, precision("bf16")).treated(job.job.model, "layers", plan) is None and len(ran) == 2


def test_runs_of_blocks():
    runs = runs_by_stage(by_place({"full": "0-6, 8", "selective": [7]}, 12), [6, 3, 3])
    assert runs == [(("full", 6),), (("full", 1), ("selective", 1), ("full", 1)), (("none", 3),)]
    few = fewer([*runs[:2], runs[1], runs[2]], 4)
    assert few == [(("full", 4),), runs[1], runs[2]] and number_of(few) == 10
    assert recompute_of(few) == {"name": "blocks", "full": "0-4, 6", "selective": "5"}
    assert more_of(runs, few, 5) == [(("full", 5),), *few[1:]]
    assert more_of(few, few, 5) == [few[0], few[1], few[1], few[2]], "no run is longer: a stage more"
    assert recompute_of(runs[2:]) == "none" and fewer(runs[:1], 4) == few[:1]


@pytest.mark.parametrize("layers", [2, 3, 4, 5, 9])
def test_deep_pipelines_follow_from_a_model_of_any_number_of_blocks(layers, settled, ran):
    """Of one with exactly four, each larger model was run dry whole: minutes for the largest that fits."""
    job = settled(Plan(pp=2), layers=layers)
    assert DryRuns(job, precision("bf16")).proved(job.job.model, "layers", job.job.plan) and max(ran) <= 10
