"""Remote modules on the simulated accelerator."""

from __future__ import annotations

import pytest

from tests.device import remotes
from tests.device.simulator import simulate, simulate_ranks, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def test_draws_on_an_accelerator_depend_on_the_seed_alone():
    run = simulate(remotes.seeded)
    assert all(run.result.values()), run.result
    assert run.trace.defects == []


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.matrix)])
def test_tensors_go_from_accelerator_to_accelerator_and_gradients_are_those_of_a_local_module(mode):
    runs = simulate_ranks(remotes.both_ends, 2, mode=mode)
    assert all(runs[1].result.values()), runs[1].result
    assert [run.trace.defects for run in runs] == [[], []]


def test_ends_that_share_an_accelerator_go_through_the_host():
    run = simulate(remotes.one_device)
    assert all(run.result.values()), run.result
    assert run.trace.defects == []
