"""The order without an end, against the schedules of as many microbatches that are written down as a whole."""

from __future__ import annotations

import pytest

from shoal.pipeline import Endless, make_schedule


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_pipedream_goes_on_in_the_order_of_its_schedule(ranks):
    steps = 4 * ranks
    for rank, order in enumerate(make_schedule("pipedream", ranks, steps).orders):
        endless = Endless(rank, ranks - 1 - rank, ranks - 1 - rank)
        found = [action for _ in range(steps) for action in (*endless.step(1), *endless.due())] + [*endless.flush()]
        assert [action for action in found if action.kind != "R"] == list(order)


@pytest.mark.parametrize(("ranks", "each"), [(2, 1), (2, 3), (4, 2), (4, 8)])
def test_2bw_computes_in_that_order_and_updates_a_step_later(ranks, each):
    steps = 6
    for rank, order in enumerate(make_schedule("2bw", ranks, steps * each, every=each).orders):
        endless = Endless(rank, ranks - 1 - rank, 1)
        by_step = [[*endless.step(each), *endless.due()] for _ in range(steps)] + [[*endless.flush()]]
        found = [action for actions in by_step for action in actions]
        for kinds in (("F",), ("B",), ("U",)):
            wanted = [action for action in order if action.kind in kinds]
            assert [action for action in found if action.kind in kinds] == wanted
        ends = [step * each - 1 for step in range(1, steps + 1)]
        assert [[a.microbatch for a in actions if a.kind == "U"] for actions in by_step[1:]] == [[end] for end in ends]
        for end in ends:  # gradients go out between a step's last backward and its update
            places = [found.index(next(a for a in found if (a.kind, a.microbatch) == (kind, end))) for kind in "BRU"]
            assert places == sorted(places)


def test_a_flush_may_come_at_any_time():
    endless = Endless(0, 2, 1)
    kinds = ["".join(a.kind for a in (*endless.step(2), *endless.due(), *endless.flush())) for _ in range(2)]
    assert kinds == ["FFBBRU", "FFBBRU"]
