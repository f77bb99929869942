"""Loss scaling: DeepSpeed's rule step by step, skipped steps, overflow that does not end."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal import Engine, TrainingError, UserError
from shoal.models import regression
from shoal.precision import LossScale, Scaling, precision
from tests.exchange import teacher

CPU = torch.device("cpu")


def by_deepspeed(overflows: list[bool], scaling: Scaling) -> list[float]:
    """The scale after each step, as DynamicLossScaler.update_scale has it (consecutive_hysteresis = False)."""
    scale, last, credit, scales = 2.0**scaling.initial_scale_power, -1, scaling.hysteresis, []
    for step, overflow in enumerate(overflows):
        if overflow:
            if scaling.hysteresis == 1 or credit == 1:
                scale = max(scale / 2, scaling.min_loss_scale)
            else:
                credit -= 1
            last = step
        elif (step - last) % scaling.loss_scale_window == 0:
            credit = scaling.hysteresis
            scale *= 2
        scales.append(scale)
    return scales


@given(
    st.lists(st.booleans(), max_size=60),
    st.builds(
        Scaling, initial_scale_power=st.integers(0, 8), loss_scale_window=st.integers(1, 6),
        hysteresis=st.integers(1, 4), min_loss_scale=st.sampled_from([0.5, 1, 4]),
    ),
)  # fmt: skip
def test_the_scale_moves_as_deepspeeds_does(overflows: list[bool], scaling: Scaling):
    scale = LossScale(scaling, CPU)
    seen = []
    for overflow in overflows:
        scale.update(torch.tensor(overflow))
        seen.append(float(scale.scale))
    assert seen == by_deepspeed(overflows, scaling)
    assert float(scale.skipped) == sum(overflows)
    again = LossScale(scaling, CPU)
    again.load(scale.state())
    assert again.state() == scale.state()


class Steep(nn.Module):
    """A weight whose gradient is about `steepness` times the loss scale."""

    def __init__(self, steepness: float) -> None:
        super().__init__()
        self.steepness = steepness
        self.body = nn.Linear(teacher.INPUTS, teacher.OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x * self.steepness) / self.steepness


def engine(steepness: float, schedule: Any = None, **scaling: Any) -> Engine:
    return Engine(
        lambda: Steep(steepness),
        regression,
        teacher.ADAMW,
        global_batch=16,
        microbatch=8,
        precision={"name": "fp16", **scaling},
        schedule=schedule,
    )


def test_a_step_that_overflows_is_skipped_and_the_scale_gets_smaller(tmp_path):
    running = engine(1.0, initial_scale_power=24, hysteresis=1)
    before = running.parameters["body.weight"].clone()
    results = [running.step(batch) for batch in running.batches(teacher.data(), steps=20)]
    skipped = [result.skipped for result in results]
    assert skipped[0] and not skipped[-1] and skipped == sorted(skipped, reverse=True)
    assert [result.loss_scale for result in results] == [2.0 ** (24 - min(step, sum(skipped))) for step in range(20)]
    assert float(running.loss_scale.skipped) == sum(skipped)
    assert results[sum(skipped)].loss == pytest.approx(results[0].loss, rel=0.5) and results[-1].loss < results[0].loss
    assert not torch.equal(running.parameters["body.weight"], before)
    running.save(tmp_path)
    other = engine(1.0, initial_scale_power=3)
    other.load(tmp_path)
    assert other.loss_scale.state() == running.loss_scale.state()


@pytest.mark.fast
def test_a_scale_that_is_given_now_wins_over_a_saved_one(tmp_path):
    running, other = engine(0.01), engine(0.01, loss_scale=128.0, hysteresis=1)
    running.step(next(running.batches(teacher.data())))
    running.save(tmp_path)
    with pytest.warns(UserWarning) as said:
        other.load(tmp_path)
    assert [str(each.message).split(";")[0] for each in said] == [
        "precision.loss_scale = 128.0 is used from here on", "precision.hysteresis = 1 is used from here on"
    ]  # fmt: skip
    results = [other.step(batch) for batch in other.batches(teacher.data(), steps=2)]
    assert [(each.loss_scale, each.skipped) for each in results] == [(128.0, False)] * 2
    assert other.loss_scale.state()[:3] == [128.0, 0.0, 1.0]


@pytest.mark.parametrize("milestones", [False, True], ids=["lambda", "milestones"])
def test_a_first_step_that_is_skipped_counts_for_the_schedule_and_no_warning_comes(milestones):
    """torch's warning of a schedule's step before the optimizer's first is for other loops."""

    def schedule(optimizer):
        if milestones:
            return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [1.0, 0.5, 0.5, 0.25][min(step, 3)])

    with warnings.catch_warnings(action="error", category=UserWarning):
        running = engine(1.0, schedule, initial_scale_power=24, hysteresis=1)
        results = [running.step(batch) for batch in running.batches(teacher.data(), steps=4)]
    assert results[0].skipped
    first = results[0].lr[0]
    assert [result.lr[0] / first for result in results] == pytest.approx([1, 0.5, 0.5, 0.25])


@pytest.mark.parametrize(
    "scaling", [{"initial_scale_power": 2, "hysteresis": 1}, {"loss_scale": 128.0}], ids=["dynamic", "static"]
)
def test_overflow_that_does_not_end_stops_with_the_parameters_name(scaling):
    running = engine(1.0, **scaling)
    running.module.body.register_full_backward_hook(lambda *_: None)
    running.module.body.weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(
        TrainingError,
        match=r"first parameter with a gradient that is not finite: body.weight .* every loss scale down to",
    ):
        for batch in running.batches(teacher.data(), steps=40):
            running.step(batch)


def test_small_gradients_survive():
    """Without the scale all of them would be below what fp16 can hold."""
    losses = {}
    for name, option in (
        ("fp32", "fp32"),
        ("scaled", {"name": "fp16", "initial_scale_power": 12}),
        ("plain", {"name": "fp16", "loss_scale": 1}),
    ):
        running = Engine(
            teacher.student,
            lambda model, mb: tuple(part * 1e-6 for part in regression(model, mb)[:1]) + regression(model, mb)[1:],
            teacher.ADAMW, global_batch=16, microbatch=8, precision=option,
        )  # fmt: skip
        losses[name] = [running.step(batch).loss for batch in running.batches(teacher.data(), steps=12)][-1]
    assert abs(losses["scaled"] - losses["fp32"]) < 0.2 * abs(losses["plain"] - losses["fp32"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("fp17", 'precision = "fp17" is not one of'),
        ({}, "precision = {} has no name: give it one of fp32, "),
        ({"hysteresis": 2}, "precision = {'hysteresis': 2} has no name"),
        ({"name": 5}, 'precision = "5" is not one of'),
        (
            {"name": "fp16", "hystresis": 2},
            'precision = "fp16" has no parameter "hystresis". Did you mean "hysteresis"?',
        ),
        ({"name": "fp16", "hysteresis": 0}, "hysteresis = 0: give at least 1"),
        ({"name": "fp32", "loss_scale": 1}, 'precision = "fp32" has no parameter "loss_scale". It has: none'),
        ({"name": "bf16", "master": "halved"}, "master = 'halved' is not one of whole, split, kahan, stochastic"),
    ],
)
def test_wrong_precisions_are_refused_by_name(option, message):
    with pytest.raises(UserError) as error:
        precision(option)
    assert message in str(error.value)
