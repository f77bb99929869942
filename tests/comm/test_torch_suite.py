"""What passes on gloo of the collective tests in torch's wheel passes on "shm" too, but for a table of differences."""

from __future__ import annotations

import os

import pytest

from tests.comm.torch_suite import merged, names, outcomes
from tests.pool import RankError, run_ranks

SIZE = 4
_MONITORED = "torch itself refuses monitored_barrier for every backend but gloo"
DIFFERENCES = {
    "test_monitored_barrier_failure_order": _MONITORED,
    "test_monitored_barrier_gloo": _MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": _MONITORED,
    "test_monitored_barrier_gloo_subgroup": _MONITORED,
    "test_monitored_barrier_wait_all_ranks": _MONITORED,
    "test_Backend_enum_class": "asks for the name of a backend that torch brings along",
}
"""What may pass on gloo alone, and why."""

QUICK = [
    "test_sparse_all_reduce_sum",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_barrier_timeout_full_group",
    "test_all_reduce_coalesced_group_sum",
    "test_all_to_all_single_unequal_split_full_group",
    "test_gather_object_subgroup",
]
COLLECTIVES = (
    *("all_", "barrier", "batch", "broadcast", "coalescing", "gather", "get_", "irecv"),
    *("isend", "monitored", "new_", "reduce", "scatter", "send", "sparse"),
)
"""How the tests that are about collectives begin, after "test_"; the others are about DDP."""


def worse(wanted: list[str]) -> dict[str, str]:
    """What passes on gloo and not on shm, with what is said there."""
    gloo, shm = (_outcomes(wanted, backend) for backend in ("gloo", "shm"))
    return {
        name: shm[name]
        for name in wanted
        if gloo[name] == "passed" and shm[name] != "passed" and name not in DIFFERENCES
    }


def _outcomes(wanted: list[str], backend: str) -> dict[str, str]:
    """A call of the ranks for each, so that what one leaves behind does not fail the next."""
    results = {}
    for name in wanted:
        try:
            results |= merged(run_ranks(outcomes, SIZE, [name], backend, timeout=60.0))
        except RankError as error:
            results[name] = str(error)
    return results


@pytest.fixture(autouse=True)
def variables():
    """The variables that torch's module wants to see at its import do not stay behind."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_what_differed_once_passes_as_on_gloo():
    known = [name for name in QUICK if name in names()]
    assert len(known) > 5 and worse(known) == {}


@pytest.mark.matrix
@pytest.mark.parametrize("letters", COLLECTIVES)
def test_every_collective_test_that_passes_on_gloo_passes(letters):
    wanted = [name for name in names() if name.startswith(f"test_{letters}")]
    assert wanted and worse(wanted) == {}


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(4))
def test_every_ddp_test_that_passes_on_gloo_passes(part):
    others = [name for name in names() if not name.removeprefix("test_").startswith(COLLECTIVES)]
    assert worse(others[part::4]) == {}
