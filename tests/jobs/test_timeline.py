"""A timeline whose attempt was cut short is written by the next one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.comm import World
from shoal.jobs.timeline import Recording
from shoal.report.jsonl import read_lines
from shoal.report.timeline import read_timeline

pytestmark = pytest.mark.fast


def engine(world: World, step: int) -> Any:
    return SimpleNamespace(world=world, ledger=world.ledger, device=world.device, step_index=step)


def record(world: World, *steps: int) -> None:
    """One span in each of the steps, which count from 0."""
    world.ledger.recording = True
    for step in steps:
        world.ledger.step = step
        with world.ledger.span("compute", f"work {step}"):
            pass
    world.ledger.recording = False


@pytest.mark.parametrize("begins, written", [(3, [1, 2, 3, 5]), (2, [1, 2, 5])])
def test_what_was_recorded_before_a_failure_is_written_once(begins: int, written: list[int], tmp_path: Path):
    world = World.single()
    first = Recording(engine(world, 3), tmp_path, 0, 100)
    record(world, 0, 1, 2, 3)  # step 3 was under way
    first.cut_short()
    second = Recording(engine(world, begins), tmp_path, begins, 100)  # from memory, or from a checkpoint
    second.take_over(first.kept)
    record(world, 4)
    second.close(SimpleNamespace(warning=pytest.fail))
    second.close(SimpleNamespace(warning=pytest.fail))
    lines, _ = read_lines(tmp_path / "timeline.jsonl")
    assert sorted(line["step"] for line in lines) == written


def test_an_attempt_says_after_which_step_it_goes_on_beside_what_others_have_written(tmp_path: Path):
    world = World.single()
    for begins, steps in ((0, (2, 3, 4)), (3, (4, 5))):
        recording = Recording(engine(world, 9), tmp_path, begins, 100)
        record(world, *steps)
        recording.close(SimpleNamespace(warning=pytest.fail))
    spans = read_timeline(tmp_path / "timeline.jsonl")
    assert [each.step for each in spans] == [3, 5, 6]


def test_a_timeline_that_cannot_be_opened_is_a_warning(tmp_path: Path):
    """As on a disk that has become read-only: the error of the last checkpoint is the one to end with."""
    world, said = World.single(), list[str]()
    recording = Recording(engine(world, 3), tmp_path, 0, 100)
    record(world, 0, 1)
    (tmp_path / "timeline.jsonl").mkdir()
    recording.close(SimpleNamespace(warning=said.append))
    assert len(said) == 1 and "the timeline cannot be written" in said[0]
