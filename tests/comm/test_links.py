"""What is measured of a group: the same on every rank, and no longer than it needs."""

from __future__ import annotations

import time

import pytest
import torch

from shoal.comm import Group, Link
from shoal.comm.emulate import Throttled, simulate
from shoal.comm.links import SIZES, link_of, measure
from tests.pool import run_ranks

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")


@pytest.mark.fast
def test_a_line_through_the_first_and_the_last_row():
    link = Link("dp", 2, "sockets", ((1000, 1e-3), (5000, 2e-3), (101_000, 11e-3)))
    assert link.latency == 1e-3
    assert link.bandwidth == pytest.approx(101_000 / 10e-3)
    assert link.seconds(202_000) == pytest.approx(21e-3)


@pytest.mark.fast
def test_a_slow_link_is_measured_with_few_bytes_and_found_slow():
    """15 Mbit/s each way: the 256 KiB that an all-reduce of two ranks sends take 0.14 s, and no larger tensor is tried;
    32 KiB take 0.018 s."""

    def one(group):
        return measure(Group.of(Throttled(group.transports["cpu"], 15e6, 1e-3)), CPU)

    started = time.monotonic()
    first, second = simulate(2, one)
    assert first == second and [nbytes for nbytes, _ in first.rows] == [2**10, 2**15, 2**18]
    assert first.latency >= 1e-3 and 0.4e6 < first.bandwidth < 1.95e6
    assert time.monotonic() - started < 10


def measured(world) -> tuple[Link, bool, int]:
    group = world.everyone
    link = link_of(group, CPU)
    return link, link_of(group, CPU) is link, group.ledger.total(purpose="measure").calls


def test_real_ranks_agree_and_measure_once():
    first, second, third = run_ranks(measured, 3)
    assert first == second == third
    link, once, calls = first
    assert once and calls > len(SIZES) and link.ranks == 3 and link.carrier == "shared memory"
    assert all(seconds > 0 for _, seconds in link.rows)


@pytest.mark.fast
def test_a_rank_alone_needs_no_time():
    [link] = simulate(1, lambda group: measure(group, CPU))
    assert link.latency == 0.0 and link.seconds(2**10) < 1e-6
