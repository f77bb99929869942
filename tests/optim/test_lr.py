"""Learning rates by hand: warm-up, slope, floor, and what comes after the last step."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import UserError
from shoal.optim.lr import Course, Schedule, by_name, constant, cosine, linear

pytestmark = pytest.mark.fast
HALF = 0.5**0.5  # cosine of an eighth of a turn


def rates(schedule: Schedule, steps: int) -> list[float]:
    """Shares of the optimizer's learning rate at which the steps run."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler, found = schedule(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"] / 2.0)
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (constant(), [1, 1]),
        (constant(3), [1 / 4, 2 / 4, 3 / 4, 1, 1]),
        (linear(2), [1, 0.5, 0, 0]),
        (linear(6, 2, 0.2), [1 / 3, 2 / 3, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (linear(2, 2, 0.2), [1 / 3, 2 / 3, 1, 0.2]),
        (cosine(2), [1, 0.55, 0.1, 0.1]),
        (cosine(6, 2, 0.2), [1 / 3, 2 / 3, 1, 0.6 + 0.4 * HALF, 0.6, 0.6 - 0.4 * HALF, 0.2, 0.2]),
        (cosine(2, 2, 0.2), [1 / 3, 2 / 3, 1, 0.2]),
    ],
)
def test_rates_are_those_by_hand(schedule, expected):
    assert rates(schedule, len(expected)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "same"), [("constant", constant(2)), ("linear", linear(6, 2, 0.2)), ("cosine", cosine(6, 2, 0.2))]
)
def test_a_job_file_names_them(name, same):
    assert rates(by_name(name, 6, 2, 0.2), 8) == rates(same, 8)


def test_another_name_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r'train.schedule = "cosin" is not one of constant, linear, cosine.*cosine'):
        by_name("cosin", 6, 2, 0.2)


@pytest.mark.parametrize(
    "schedule", [linear(6, 2, 0.2), lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]
)
@pytest.mark.parametrize("step", [0, 1, 5])
def test_a_course_begins_in_the_middle_with_the_rates_of_the_whole(schedule, step):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler, found = schedule(optimizer), []
    Course(scheduler, [{"lr": 2.0}]).begin_at(step)
    for _ in range(3):
        found.append(optimizer.param_groups[0]["lr"] / 2.0)
        optimizer.step()
        scheduler.step()
    assert found == pytest.approx(rates(schedule, step + 3)[step:])


def test_what_is_no_part_of_a_schedule_stays():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0, momentum=0.5)
    given = [{**optimizer.defaults, "count": 0}]
    optimizer.param_groups[0]["count"] = 0
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3.0, total_steps=8, base_momentum=0.6)
    course = Course(scheduler, given)
    optimizer.param_groups[0] |= {"count": 7, "weight_decay": 0.1, "momentum": 0.1, "lr": 9.0, "nesterov": True}
    course.begin_at(4)
    group, whole = optimizer.param_groups[0], torch.optim.SGD([torch.zeros(1, requires_grad=True)], momentum=0.5)
    reference = torch.optim.lr_scheduler.OneCycleLR(whole, max_lr=3.0, total_steps=8, base_momentum=0.6)
    for _ in range(4):
        whole.step()
        reference.step()
    assert (group["count"], group["weight_decay"], group["nesterov"]) == (7, 0.1, True)
    assert all(group[key] == whole.param_groups[0][key] for key in ("lr", "momentum"))
