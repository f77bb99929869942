"""Parameter servers on the simulated accelerator."""

from __future__ import annotations

import pytest

from tests.device import servers
from tests.device.simulator import simulate, simulate_ranks, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.mark.parametrize("codec", [None, "u8"])
@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.matrix)])
def test_weights_and_rows_go_from_accelerator_to_accelerator_and_are_those_of_the_cpu(mode, codec):
    runs = simulate_ranks(servers.both_ends, 2, codec, mode=mode)
    assert all(runs[1].result.values()), runs[1].result
    assert [run.trace.defects for run in runs] == [[], []]


def test_a_client_that_dies_in_the_middle_ends_its_session_alone():
    runs = simulate_ranks(servers.dies_in_the_middle, 2)
    assert all(runs[0].result.values()) and all(runs[1].result.values()), [run.result for run in runs]
    assert [run.trace.defects for run in runs] == [[], []]


def test_ends_that_share_an_accelerator_go_through_the_host():
    run = simulate(servers.one_device)
    assert all(run.result.values()), run.result
    assert run.trace.defects == []
