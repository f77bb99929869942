"""A rank that fails on the way to another plan ends the run on all ranks; what one refuses, all refuse."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

import shoal.engine
from shoal import Plan
from shoal.assembly import replan
from shoal.assembly.replan import everywhere_or_nowhere
from shoal.checkpoint.handover import Handover
from shoal.errors import LaunchError, UserError
from tests.assembly.test_replan import _steps
from tests.parity.cases import CASES, engine
from tests.pool import RankError, disposable_ranks, run_ranks

SOON = 20.0  # seconds in which a failed rank is noticed, with much to spare on busy cores


def _out_of_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("no memory is left")


WHERE = {
    "its groups": (shoal.engine, "ranks_of"),  # the others wait in the store to make them
    "the model": (shoal.engine, "build_alike"),
    "its storage": (shoal.engine, "lay_out"),
    "the new session": (replan, "session"),
    "what to ask for": (Handover, "_requests"),
    "a parcel": (Handover, "_values"),
}


def _fails(world, where: str) -> list[str]:
    data = CASES["gpt"].data()
    running = engine("gpt", "fp32", 1, world=world, plan=Plan(dp=2, zero=3))
    batches = running.batches(data)
    running.step(next(batches))
    said = []
    with patch.object(*WHERE[where], _out_of_memory) if world.rank == 1 else nullcontext():
        for go_on in (partial(running.replan, Plan(tp=2)), lambda: running.step(next(batches))):
            try:
                go_on()
                said.append("")
            except (MemoryError, LaunchError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("where", WHERE)
def test_a_rank_that_fails_on_the_way_ends_the_run_on_all(where):
    (told, after), (raised, then) = run_ranks(_fails, 2, where)
    assert raised == "MemoryError: no memory is left"
    assert told.startswith("LaunchError: rank 0:") and "rank 1 has closed" in told
    assert after.startswith("LaunchError") and then.startswith("LaunchError"), "nobody trains on"


def _dies(world) -> str:
    """Rank 1 is killed on the way, where rank 0 waits to make a new group with it."""
    running = engine("gpt", "fp32", 1, world=world, plan=Plan(dp=2, zero=3))
    _steps(running, CASES["gpt"].data(), 1)
    dies = patch.object(shoal.engine, "ranks_of", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with dies if world.rank == 1 else nullcontext(), pytest.raises(LaunchError) as error:
        running.replan(Plan(tp=2))
    return str(error.value)


def test_a_rank_that_dies_on_the_way_is_named():
    with disposable_ranks(_dies, 2) as (first, second):
        with pytest.raises(RankError, match="killed by SIGKILL"):
            second.result()
        said = first.result(timeout=SOON)
    assert "rank 0:" in said and "cannot be made with rank 1: its process has ended" in said


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, LaunchError])
def test_who_fails_closes_all_groups(error):
    worlds = run_ranks(_closing, 2, error)
    assert worlds[0] == worlds[1] == [True, True]


def _closing(world, error: type[BaseException]) -> list[bool]:
    """Whether groups work after a refusal, and whether the new and the old one of both ranks fail after an error."""
    fewer = world.among([1, 0])
    groups = [each.everyone for each in (world, fewer)]
    with pytest.raises(UserError), everywhere_or_nowhere(world, fewer):
        raise UserError("refused")
    for group in groups:
        group.barrier()
    if world.rank == 1:
        with pytest.raises(error), everywhere_or_nowhere(world, fewer):
            raise error
    failed = []
    for group in groups:
        try:
            group.barrier()
            failed.append(False)
        except LaunchError:
            failed.append(True)
    return failed


def _one_refuses(world) -> list[Any]:
    """A refusal of one rank alone, where the others are on their way already: all of them stay with the old plan."""
    running = engine("gpt", "fp32", 1, world=world, plan=Plan(dp=2, zero=3))
    losses = _steps(running, CASES["gpt"].data(), 1)
    refuse = patch.object(replan, "session", side_effect=UserError("not here"))
    with refuse if world.rank == 1 else nullcontext(), pytest.raises(Exception, match="not here"):
        running.replan(Plan(tp=2))
    losses += _steps(running, CASES["gpt"].data(), 2)
    running.close()
    return losses


def test_a_refusal_of_one_rank_is_everybodys():
    one, other = run_ranks(_one_refuses, 2)
    assert one == other and len(one) == 3
