"""What a caller gives now wins over what a checkpoint was trained with, and each change is said; what nobody changed
goes on as saved."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR, StepLR

import shoal
from shoal.comm import World
from shoal.engine import Engine
from shoal.models import regression
from shoal.optim.groups import decay_matrices_only
from shoal.plan import Plan
from tests.parity.cases import vectors
from tests.pool import run_ranks

BEFORE, AFTER = 3, 3


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))


class Scaled(nn.Module):
    """Has a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = model(), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) * self.scale
        return out


def make(optimizer: Any = None, **options: Any) -> Engine:
    return Engine(model, regression, optimizer or partial(AdamW, lr=1e-2), **{"global_batch": 4, **options})


def trained(engine: Engine, steps: int) -> list[float]:
    """The learning rates that the steps were made with."""
    return [engine.step(batch).lr[0] for batch in engine.batches(vectors(), steps=steps)]


def resumed(directory: Path, before: Engine, after: Engine) -> tuple[list[float], list[str]]:
    """The learning rates of the steps after a resume, and what was said there."""
    trained(before, BEFORE)
    before.save(directory)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        after.load(directory)
    return trained(after, AFTER), [str(each.message) for each in said]


def steps_of(step: int, each: int) -> float:
    return 0.5 ** (step // each)


def two_parts(optimizer: torch.optim.Optimizer, end: int) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, total_iters=2), StepLR(optimizer, end, 0.5)]
    return SequentialLR(optimizer, parts, milestones=[2])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("then", "now", "line"),
    [
        (
            shoal.optim.lr.cosine(6, 1), shoal.optim.lr.cosine(12, 1),
            "schedule: total = 12 is used from here on; the checkpoint was trained with 6",
        ),
        (
            shoal.optim.lr.cosine(6), shoal.optim.lr.linear(6),
            "schedule = linear (total 6, warmup 0, floor 0.0) is used",
        ),
        (shoal.optim.lr.cosine(6), None, "schedule = none is used"),
        (None, shoal.optim.lr.constant(8), "schedule = constant (warmup 8) is used"),
        (partial(StepLR, step_size=2), partial(StepLR, step_size=1), "schedule: step_size = 1 is used"),
        (partial(StepLR, step_size=2), partial(ConstantLR, factor=0.5), "schedule = ConstantLR"),
        (
            partial(OneCycleLR, max_lr=0.1, total_steps=9), partial(OneCycleLR, max_lr=0.1, total_steps=20),
            "schedule: total_steps = 20",
        ),
        (partial(two_parts, end=1), partial(two_parts, end=2), "schedule = SequentialLR with other parts"),
        (
            partial(LambdaLR, lr_lambda=partial(steps_of, each=1)),
            partial(LambdaLR, lr_lambda=partial(steps_of, each=2)),
            "schedule: each = 2",
        ),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_another_schedule_is_used_from_the_first_step_on(tmp_path, then, now, line):
    expected = trained(make(schedule=now), BEFORE + AFTER)[BEFORE:]
    rates, said = resumed(tmp_path, make(schedule=then), make(schedule=now))
    assert rates == pytest.approx(expected, rel=1e-12)
    assert len(said) == 1 and said[0].startswith(line)


@pytest.mark.fast
@pytest.mark.parametrize("zero", [0, 2])
def test_another_learning_rate_is_used_and_what_is_alike_is_not_mentioned(tmp_path, zero):
    plan, cosine = Plan(zero=zero), shoal.optim.lr.cosine(6)
    options = {"schedule": cosine, "param_groups": decay_matrices_only(0.1), "plan": plan}
    expected = trained(make(partial(AdamW, lr=0.03), **options), BEFORE + AFTER)[BEFORE:]
    after = make(partial(AdamW, lr=0.03, betas=(0.8, 0.99)), **{**options, "param_groups": decay_matrices_only(0.2)})
    rates, said = resumed(tmp_path, make(**options), after)
    assert rates == pytest.approx(expected, rel=1e-12)
    assert [line.split(" is used")[0] for line in said] == ["weight_decay = 0.2", "lr = 0.03", "betas = [0.8, 0.99]"]
    groups = after.optimizer.torch.param_groups
    assert [(group["weight_decay"], tuple(group["betas"])) for group in groups] == [
        (0.2, (0.8, 0.99)),
        (0.0, (0.8, 0.99)),
    ]
    again = make(partial(AdamW, lr=0.03, betas=(0.8, 0.99)), **{**options, "param_groups": decay_matrices_only(0.2)})
    assert resumed(tmp_path / "again", after, again)[1] == []


class Counting(SGD):
    """Counts its updates in its groups, as optimizers without a schedule of their own do."""

    def __init__(self, params: Any, lr: float, updates: int = 0) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["updates"] = updates

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["updates"] += 1
        return super().step(closure)


@pytest.mark.fast
@pytest.mark.parametrize("schedule", [None, shoal.optim.lr.cosine(8, 2), partial(StepLR, step_size=2)])
def test_what_an_optimizer_counts_in_its_groups_and_other_options_go_on(tmp_path, schedule):
    """A schedule by a function of the step set all options to those of the beginning."""
    before, after = (make(partial(Counting, lr=1e-2), schedule=schedule) for _ in range(2))
    for group in before.optimizer.torch.param_groups:
        group["weight_decay"] = 0.25
    resumed(tmp_path, before, after)
    (group,) = after.optimizer.torch.param_groups
    assert (group["updates"], group["weight_decay"]) == (BEFORE + AFTER, 0.25)


@pytest.mark.fast
@pytest.mark.parametrize("schedule", [None, partial(StepLR, step_size=100)])
def test_what_the_loop_has_moved_goes_on_unless_it_is_given_anew(tmp_path, schedule):
    """A learning rate lowered by hand is the run's own; one that is given otherwise is its caller's."""
    before = make(schedule=schedule)
    for group in before.optimizer.torch.param_groups:
        group["lr"] = 1e-3
    assert resumed(tmp_path / "a", before, make(schedule=schedule)) == (pytest.approx([1e-3] * AFTER), [])
    rates, said = resumed(tmp_path / "b", make(schedule=schedule), make(partial(AdamW, lr=5e-3), schedule=schedule))
    assert rates == pytest.approx([5e-3] * AFTER) and said[0].startswith("lr = 0.005 is used")


@pytest.mark.fast
@pytest.mark.parametrize("schedule", [None, shoal.optim.lr.cosine(8, 2), partial(StepLR, step_size=2)])
def test_a_learning_rate_that_is_a_tensor_goes_on_as_one(tmp_path, schedule):
    """Checkpoints could not be written with one."""
    expected = trained(make(schedule=schedule), BEFORE + AFTER)[BEFORE:]
    tensor = partial(AdamW, lr=torch.tensor(1e-2))
    after = make(tensor, schedule=schedule)
    rates, said = resumed(tmp_path, make(tensor, schedule=schedule), after)
    assert rates == pytest.approx(expected) and said == []
    assert isinstance(after.optimizer.torch.param_groups[0]["lr"], torch.Tensor)


@pytest.mark.fast
def test_a_plain_function_of_the_step_is_asked_again(tmp_path):
    rates, _ = resumed(
        tmp_path,
        make(schedule=partial(LambdaLR, lr_lambda=lambda s: 1.0)),
        make(schedule=partial(LambdaLR, lr_lambda=lambda s: 1 / (s + 1))),
    )
    assert rates == pytest.approx([1e-2 / (step + 1) for step in range(BEFORE, BEFORE + AFTER)])


@pytest.mark.fast
@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize(
    ("then", "now", "lines", "keys"),
    [
        (Adam, AdamW, ["optimizer = AdamW", "weight_decay", "decoupled"], {"exp_avg", "exp_avg_sq", "step"}),
        (AdamW, partial(AdamW, amsgrad=True), ["amsgrad", "the state of the optimizer starts anew"], set()),
        (partial(AdamW, amsgrad=True), AdamW, ["amsgrad"], {"exp_avg", "exp_avg_sq", "step"}),
        (
            AdamW, partial(SGD, momentum=0.9),
            ["optimizer = SGD", "weight_decay", "the state of the optimizer starts anew"], set(),
        ),
        (
            partial(SGD, momentum=0.9), AdamW,
            ["optimizer = AdamW", "weight_decay", "the state of the optimizer starts anew"], set(),
        ),
        (SGD, AdamW, ["optimizer = AdamW", "weight_decay"], set()),
        (AdamW, SGD, ["optimizer = SGD", "weight_decay"], set()),
        (AdamW, torch.optim.NAdam, ["optimizer = NAdam", "weight_decay", "decoupled", "the state"], set()),
        (torch.optim.Adagrad, torch.optim.RMSprop, ["optimizer = RMSprop", "eps", "the state"], set()),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_another_optimizer_takes_over_the_state_that_it_knows(tmp_path, then, now, lines, keys, zero):
    before, after = (make(partial(each, lr=1e-2), plan=Plan(zero=zero), precision="bf16") for each in (then, now))
    trained(before, BEFORE)
    before.save(tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        after.load(tmp_path)
    starts = sorted(
        next((line for line in lines if str(each.message).startswith(line)), str(each.message)) for each in said
    )
    assert starts == sorted(lines)
    state = {key for values in after.optimizer.torch.state.values() for key in values}
    assert keys <= state and (keys or not state & {"exp_avg", "momentum_buffer"} or "anew" not in lines[-1])
    if "exp_avg" in keys:
        for (name, key), value in before.optimizer.state_tensors().items():
            if key in keys:
                torch.testing.assert_close(after.optimizer.state_tensors()[name, key], value, rtol=0, atol=0)
    for name, value in before.optimizer.parameters.items():
        assert torch.equal(after.optimizer.parameters[name], value), "the weights go on in any case"
    trained(after, AFTER)


@pytest.mark.fast
def test_what_else_is_given_otherwise_is_said(tmp_path):
    _, said = resumed(
        tmp_path, make(clip=1.0), make(clip=2.0, clip_value=0.5, precision="bf16", seed=3, global_batch=8)
    )
    assert [line.split(" is used")[0] for line in said] == [
        "global_batch = 8", "seed = 3", "precision = bf16", "clip = 2.0", "clip_value = 0.5",
    ]  # fmt: skip
    assert [("exactly once" in line) for line in said] == [True, True, False, False, False]


def on_a_rank(world, directory: str, plan: Plan) -> tuple[list[float], list[str], float]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = make(partial(AdamW, lr=0.03), plan=plan, world=world, microbatch=2, schedule=shoal.optim.lr.cosine(12))
        engine.load(directory)
    rates = trained(engine, AFTER)
    loss = engine.evaluate(vectors()).loss
    engine.close()
    return rates, [str(each.message) for each in said if "is used from here on" in str(each.message)], loss


def test_all_ranks_go_on_alike_and_one_of_them_says_so(tmp_path):
    before = make(schedule=shoal.optim.lr.cosine(6), microbatch=2)
    trained(before, BEFORE)
    before.save(tmp_path)
    alone = make(partial(AdamW, lr=0.03), schedule=shoal.optim.lr.cosine(12), microbatch=2)
    with pytest.warns(UserWarning, match="lr = 0.03"):
        alone.load(tmp_path)
    expected = trained(alone, AFTER), alone.evaluate(vectors()).loss
    for plan in (Plan(dp=2, zero=2), Plan(pp=2), Plan(dp=2, memory={"disk": str(tmp_path / "disk")})):
        first, second = run_ranks(on_a_rank, 2, str(tmp_path), plan)
        assert first[0] == second[0] == pytest.approx(expected[0], rel=1e-12)
        assert first[2] == pytest.approx(expected[1], rel=1e-6)
        assert (len(first[1]), len(second[1])) == (2, 0)


def _apart(world: World, directory: str) -> tuple[list[str], set[str]]:
    """Replicas that train apart when they are saved: what an optimizer of another kind says, and has afterwards."""
    options = {"plan": Plan(dp=2, exchange={"name": "local_sgd", "every": 4}), "world": world}
    before, after = make(AdamW, **options), make(partial(SGD, momentum=0.9), **options)
    trained(before, BEFORE)
    before.save(directory)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        after.load(directory)
    trained(after, AFTER)
    return [str(each.message) for each in said], {key for each in after.optimizer.torch.state.values() for key in each}


def test_replicas_apart_leave_the_state_that_another_optimizer_does_not_know(tmp_path):
    (said, keys), _ = run_ranks(_apart, 2, str(tmp_path))
    assert any("the state of the optimizer starts anew" in line for line in said)
    assert keys == {"momentum_buffer"}


@pytest.mark.parametrize("memory", [None, {}])
@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.ASGD, partial(SGD, momentum=0.9)])
def test_a_run_in_fp64_goes_on_with_the_bits_of_one_that_never_stopped(tmp_path, optimizer, memory):
    """torch gives the numbers that these keep in fp32 beside a parameter the parameter's dtype when they are loaded;
    the state of a parameter that is a number itself has that anyhow."""
    whole, before, after = (
        Engine(Scaled, regression, partial(optimizer, lr=1e-2), Plan(memory=memory), global_batch=4, precision="fp64")
        for _ in "abc"
    )
    trained(whole, BEFORE + AFTER)
    resumed(tmp_path, before, after)
    wanted, found = ({name: each.clone() for name, each in one.optimizer.parameters.items()} for one in (whole, after))
    assert all(torch.equal(found[name], each) for name, each in wanted.items())
