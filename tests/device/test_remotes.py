"""Remote modules on the simulated accelerator."""

from __future__ import annotations

import pytest

from tests.device.simulator import simulate, why_not
from tests.device import remotes

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def test_draws_on_an_accelerator_depend_on_the_seed_alone():
    run = simulate(remotes.seeded)
    assert all(run.result.values()), run.result
    assert run.trace.defects == []
