"""DeepSpeed's schedules: rates of the first steps, read off DeepSpeed 0.19.8; and that a run takes them."""

from __future__ import annotations

import pytest
import torch

from shoal import UserError
from shoal.doors.schedules import SCHEDULES, schedule
from tests.doors.loops import assert_alike, by_torch, through_the_door
from tests.pool import run_ranks

TABLE = [
    ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 5},
     [0.01, 0.01, 0.048761, 0.071435, 0.087522, 0.1, 0.1]),
    ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}, [0, 0, 0.05, 0.1, 0.15, 0.2, 0.2]),
    ("WarmupLR", {"warmup_num_steps": 1}, [0, 0, 0.2, 0.2]),
    ("WarmupDecayLR", {"total_num_steps": 9, "warmup_max_lr": 0.1, "warmup_num_steps": 3},
     [0, 0, 0.063093, 0.1, 0.1, 0.083333, 0.066667, 0.05, 0.033333, 0.016667, 0, 0]),
    ("WarmupCosineLR",
     {"total_num_steps": 9, "warmup_num_steps": 3, "cos_min_ratio": 0.1, "warmup_min_ratio": 0.2,
      "warmup_type": "linear"},
     [0, 0.04, 0.093333, 0.146667, 0.187942, 0.155, 0.11, 0.065, 0.032058, 0.02, 0.02]),
    ("OneCycle",
     {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "cycle_second_step_size": 3,
      "decay_lr_rate": 0.5, "decay_step_size": 2, "decay_mom_rate": 0.1},
     [0.01, 0.0325, 0.055, 0.0775, 0.1, 0.07, 0.04, 0.01, 0.008, 0.006667, 0.005714]),
    ("OneCycle",
     {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "cycle_second_step_size": 6,
      "cycle_first_stair_count": 2},
     [0.01, 0.01, 0.055, 0.055, 0.1, 0.055, 0.055, 0.055, 0.01, 0.01]),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_staircase": True},
     [0.01, 0.01, 0.01, 0.02, 0.02, 0.02, 0.03]),
]  # fmt: skip


def adam() -> torch.optim.Adam:
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=0.2)


@pytest.mark.fast
@pytest.mark.parametrize(("name", "parameters", "rates"), TABLE)
def test_rates_are_deepspeeds(name, parameters, rates):
    optimizer = adam()
    running, seen = schedule(name, parameters)(optimizer), []
    for _ in rates:
        seen.append(optimizer.param_groups[0]["lr"])
        running.step()
    assert seen == pytest.approx(rates, abs=1e-6)
    assert {row[0] for row in TABLE} == set(SCHEDULES)


@pytest.mark.fast
def test_one_cycle_moves_adams_first_beta_the_other_way_and_a_state_dict_goes_on():
    (parameters,) = (row[1] for row in TABLE if "decay_mom_rate" in row[1])
    optimizer, betas = adam(), []
    running = schedule("OneCycle", parameters)(optimizer)
    for _ in range(10):
        betas.append(optimizer.param_groups[0]["betas"])
        running.step()
    assert [first for first, _ in betas] == pytest.approx(
        [0.8, 0.875, 0.85, 0.825, 0.8, 0.83333, 0.86667, 0.9, 0.945, 0.99], abs=1e-5
    )
    assert {second for _, second in betas} == {0.99}
    other = adam()
    schedule("OneCycle", parameters)(other).load_state_dict(running.state_dict())
    assert [other.param_groups[0][key] for key in ("lr", "betas")] == [
        optimizer.param_groups[0][key] for key in ("lr", "betas")
    ]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("WarmUpLR", {}, 'scheduler.type = "WarmUpLR" is not one of WarmupLR'),
        ("WarmupLR", {"warmup_steps": 3}, 'WarmupLR has no parameter "warmup_steps". Did you mean "warmup_num_steps"?'),
        ("WarmupDecayLR", {}, "scheduler.params: WarmupDecayLR needs total_num_steps"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps = 0: give a whole number"),
        ("WarmupLR", {"warmup_type": "cubic"}, 'warmup_type = "cubic": give "log" or "linear"'),
    ],
)
def test_wrong_schedules_are_refused_by_name(name, parameters, message):
    with pytest.raises(UserError) as error:
        schedule(name, parameters)
    assert message in str(error.value)


def test_a_run_takes_the_rates():
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.2}},
        "scheduler": {"type": "WarmupLR", "params": TABLE[0][1]},
    }
    rates = [0.01, 0.01, 0.01 + 0.09 * 0.430677, 0.071435, 0.087522, 0.1, 0.1]
    seen = run_ranks(through_the_door, 2, config, 7)[0]
    assert seen["lrs"] == pytest.approx(rates, abs=1e-6)
    assert_alike(seen, by_torch(seen["before"], lambda ps: torch.optim.SGD(ps, lr=0.2), 7, 2, lrs=seen["lrs"]))


def test_a_step_that_overflowed_does_not_move_the_schedule():
    config = {
        "train_batch_size": 8,
        "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 1}},
    }
    (seen,) = run_ranks(through_the_door, 1, config, 15)
    assert 0 < sum(seen["skipped"]) < 14
    updates = [sum(not skipped for skipped in seen["skipped"][:step]) for step in range(15)]
    assert seen["lrs"] == pytest.approx([0.01 * (1 + done) for done in updates])
