"""Who trains in a round: drop-outs, deadlines, speeds, buffers. Nothing is computed."""

import json

import numpy as np
import pytest

from shoal.errors import UserError
from shoal.federated.schedule import Buffered, Rounds, crowd_of, in_groups, schedule_of
from shoal.federated.settings import Federated

pytestmark = pytest.mark.fast


def schedule(samples=80, **settings):
    given = Federated(**{"clients": 20, "local_epochs": 1.0, **settings})
    return schedule_of(given, crowd_of(given, np.full(given.clients, samples), 8, seed=3))


def test_a_round_asks_a_share_of_the_clients_each_time_others():
    rounds = schedule(fraction=0.25)
    asked = [sorted(task.client for task in rounds.draw(number).tasks) for number in range(1, 60)]
    assert all(len(each) == len(set(each)) == 5 for each in asked)
    assert set().union(*asked) == set(range(20)) and len({tuple(each) for each in asked}) > 40
    assert rounds.draw(7) == rounds.draw(7)


def test_work_is_whole_batches_of_the_clients_own_samples():
    given = Federated(clients=3, local_epochs=1.5)
    assert crowd_of(given, np.array([1, 8, 33]), 8, 0).steps.tolist() == [1, 2, 7]
    assert crowd_of(Federated(clients=3, local_steps=4), np.array([1, 8, 33]), 8, 0).steps.tolist() == [4, 4, 4]


def test_drop_outs_do_not_count():
    drawn = [schedule(dropout=0.3).draw(number) for number in range(1, 200)]
    assert all(len(each.tasks) + each.dropped == each.asked == 20 for each in drawn)
    assert np.mean([each.dropped for each in drawn]) == pytest.approx(6, abs=0.5)


def test_a_deadline_drops_who_is_late_or_takes_what_there_is():
    dropped, partial = (schedule(speeds=0.7, deadline=12.0, late=late).draw(1) for late in ("drop", "partial"))
    speeds = schedule(speeds=0.7, deadline=12.0).crowd.speeds
    slow = {client for client in range(20) if 10 / speeds[client] > 12}
    assert 0 < len(slow) < 20
    assert {task.client for task in dropped.tasks} == set(range(20)) - slow and dropped.late == len(slow)
    assert len(partial.tasks) == 20 and partial.partial == len(slow) and partial.late == 0
    assert {task.client: task.steps for task in partial.tasks} == {
        client: min(10, int(12 * speeds[client])) for client in range(20)
    }
    assert dropped.seconds == partial.seconds == 12


def test_clients_that_are_faster_than_can_be_counted_are_in_time():
    rounds = schedule(speeds=100.0, deadline=12.0)
    fast = {client for client in range(20) if 10 / rounds.crowd.speeds[client] <= 12}
    assert max(rounds.crowd.speeds) > 2**64 and {task.client for task in rounds.draw(1).tasks} == fast


def test_without_a_deadline_a_round_lasts_as_long_as_its_slowest():
    rounds = schedule(speeds=0.7)
    assert rounds.draw(1).seconds == pytest.approx(10 / rounds.crowd.speeds.min())


def test_a_buffer_waits_for_nobody_and_tells_how_stale_results_are():
    slow, buffered = schedule(speeds=1.0), schedule(speeds=1.0, fraction=0.5, buffer=5)
    drawn = [buffered.draw(number) for number in range(1, 101)]
    assert all(len(each.tasks) == 5 for each in drawn)
    assert sum(each.seconds for each in drawn) < sum(slow.draw(number).seconds for number in range(1, 101)) / 4
    stale = [age for each in drawn for age in each.stale]
    assert min(stale) == 0 and max(stale) > 3
    for number, each in enumerate(drawn, start=1):
        for task, age in zip(each.tasks, each.stale, strict=True):
            assert task.base == number - 1 - age and task.factor == pytest.approx((1 + age) ** -0.5)


def test_results_that_are_too_stale_are_dropped():
    drawn = schedule(speeds=1.0, fraction=0.5, buffer=2, most_stale=2)
    rounds = [drawn.draw(number) for number in range(1, 101)]
    assert max(age for each in rounds for age in each.stale) <= 2 and sum(each.late for each in rounds) > 0
    assert drawn.needed(100) <= set(range(98, 101))


def test_a_buffer_goes_on_from_its_state():
    one, other = (schedule(speeds=1.0, fraction=0.3, buffer=3, dropout=0.2) for _ in range(2))
    for number in range(1, 21):
        one.draw(number)
    other.load(json.loads(json.dumps(one.state())))
    assert [one.draw(number) for number in range(21, 40)] == [other.draw(number) for number in range(21, 40)]


def test_kinds_and_groups():
    assert isinstance(schedule(), Rounds) and isinstance(schedule(buffer=4), Buffered)
    groups = in_groups(schedule(speeds=0.7, deadline=12.0, late="partial").draw(1).tasks, 8)
    steps = [task.steps for group in groups for task in group]
    assert [len(group) for group in groups] == [8, 8, 4] and steps == sorted(steps, reverse=True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"fraction": 0.0}, "fraction = 0.0"),
        ({"fraction": 1.5}, "at most 1"),
        ({"dropout": 1.2}, "at most 1"),
        ({"local_steps": 2, "local_epochs": 1.0}, "give one"),
        ({"least": 11}, "at most that"),
        ({"buffer": 11}, "smaller buffer"),
        ({"buffer": 3, "deadline": 2.0}, "remove one"),
        ({"dropout": 1.0}, "Give less"),
        ({"most_stale": 3}, "federated.buffer too"),
        ({"late": "dropped"}, 'Did you mean "drop"'),
    ],
)
def test_settings_that_do_not_fit_are_refused(given, says):
    with pytest.raises(UserError, match=says):
        Federated(**given)
