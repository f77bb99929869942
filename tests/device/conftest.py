"""Ends the processes of the simulated accelerator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device.simulator.run import end_nurseries


@pytest.fixture(scope="session", autouse=True)
def no_nurseries_left() -> Iterator[None]:
    yield
    end_nurseries()
