"""Saves in the background: snapshots, one in flight, retention, what a rank's failure does."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from shoal.checkpoint import Want, Writer, dcp, load, meeting, newest
from shoal.checkpoint.meeting import Meeting
from shoal.errors import CheckpointError, LaunchError
from shoal.parallel import Box
from tests.checkpoint.fake_ranks import FakeWorld, on_ranks, pieces_of, save_alone

State = dict[str, torch.Tensor]


def steps(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def value(path: Path) -> float:
    into = torch.empty(3)
    load(path, [Want("w", (3,), Box((0,), (3,)), into)])
    return float(into[0])


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes to disk wait for this event."""
    event = threading.Event()
    write = dcp.write_pieces

    def write_later(*args: object) -> dcp.Written:
        assert event.wait(30)
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(dcp, "write_pieces", write_later)
    return event


@pytest.mark.fast
def test_later_changes_are_not_saved(tmp_path: Path, held: threading.Event) -> None:
    tensor, extra = torch.full((3,), 1.0), {"lr": [0.1]}
    writer = Writer(tmp_path, FakeWorld())
    writer.save(1, pieces_of({"w": tensor}), extra, wait=False)  # returns while the disk is held
    tensor.fill_(2.0)
    extra["lr"][0] = 0.2
    assert steps(tmp_path) in (["step-00000001.tmp"], []) and writer.under_way
    held.set()
    writer.save(2, pieces_of({"w": tensor}), extra, wait=False)  # waits for the first, whose buffers it takes over
    writer.close()
    assert [value(tmp_path / f"step-0000000{step}") for step in (1, 2)] == [1.0, 2.0]
    assert load(tmp_path / "step-00000001", []) == {"lr": [0.1]} and not writer.under_way


def test_only_one_save_is_in_flight(tmp_path: Path, held: threading.Event) -> None:
    writer = Writer(tmp_path, FakeWorld())
    writer.save(1, pieces_of({"w": torch.zeros(3)}), {}, wait=False)
    second = threading.Thread(target=writer.save, args=(2, pieces_of({"w": torch.ones(3)}), {}, True))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    held.set()
    second.join(30)
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_alone(tmp_path, step, {"w": torch.full((3,), float(step))}, keep=2)
    assert steps(tmp_path) == ["step-00000003", "step-00000004"]


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_alone(tmp_path, step, {"w": torch.zeros(3)})
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    save_alone(tmp_path, 4, {"w": torch.zeros(3)}, keep=2)
    assert steps(tmp_path) == ["step-00000002", "step-00000004"]


def test_going_back_keeps_the_save_and_the_later_ones(tmp_path: Path) -> None:
    for step in (7, 8, 9, 5):
        save_alone(tmp_path, step, {"w": torch.zeros(3)}, keep=1 if step == 5 else 3)
    assert steps(tmp_path) == [f"step-0000000{step}" for step in (5, 7, 8, 9)]


def test_a_step_saved_again_replaces_it(tmp_path: Path) -> None:
    save_alone(tmp_path, 1, {"w": torch.full((3,), 1.0)})
    save_alone(tmp_path, 1, {"w": torch.full((3,), 2.0)})
    assert steps(tmp_path) == ["step-00000001"]
    assert value(tmp_path / "step-00000001") == 2.0


def test_a_crash_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    save_alone(tmp_path, 1, {"w": torch.full((3,), 1.0)})
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000001.old")
    assert newest(tmp_path, lambda *_: None) == tmp_path / "step-00000001.old"
    Writer(tmp_path, FakeWorld())
    assert newest(tmp_path, lambda *_: None) == tmp_path / "step-00000001"


def test_a_step_saved_again_in_vain_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rename that would give the second save its name fails: the first one is still there, and gets its name
    back."""
    save_alone(tmp_path, 1, {"w": torch.full((3,), 1.0)})
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == "step-00000001.tmp":
            raise OSError(5, os.strerror(5))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save_alone(tmp_path, 1, {"w": torch.full((3,), 2.0)})
    monkeypatch.undo()
    Writer(tmp_path, FakeWorld())
    assert value(tmp_path / "step-00000001") == 1.0


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_every_rank_learns_of_a_failure_and_can_go_on(
    tmp_path: Path, state: State, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    write, broken = dcp.write_pieces, {2}

    def write_or_fail(path: Path, rank: int, pieces: list) -> dcp.Written:
        if rank == failing and int(path.name[5:13]) in broken:
            raise PermissionError(13, "no longer allowed")
        return write(path, rank, pieces)

    monkeypatch.setattr(dcp, "write_pieces", write_or_fail)

    def body(world: FakeWorld) -> str:
        writer = Writer(tmp_path, world)
        pieces = pieces_of(state, world.rank, 3)
        writer.save(1, pieces, {}, wait=True)
        writer.save(2, pieces, {}, wait=False)
        with pytest.raises(CheckpointError) as caught:
            writer.save(3, pieces, {}, wait=True)
        writer.save(4, pieces, {}, wait=True)
        writer.close()
        return str(caught.value)

    messages = on_ranks(3, body)
    assert len(set(messages)) == 1
    assert f"step 2 in {tmp_path} failed: rank {failing} on " in messages[0]
    assert "no longer allowed" in messages[0]
    assert steps(tmp_path) == ["step-00000001", "step-00000004"]


def test_a_silent_rank_is_named(tmp_path: Path) -> None:
    def body(world: FakeWorld) -> str:
        if world.rank == 1:
            return ""
        writer = Writer(tmp_path, world, timeout=0.2)
        with pytest.raises(CheckpointError) as caught:
            writer.save(1, pieces_of({"w": torch.zeros(3)}), {}, wait=True)
        return str(caught.value)

    assert "rank 1 is silent" in on_ranks(2, body)[0]
    assert steps(tmp_path) == []


def test_last_error_shows_without_raising(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path, FakeWorld())

    def fail(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(dcp, "write_index", fail)
    writer.save(1, pieces_of({"w": torch.zeros(3)}), {}, wait=False)
    assert writer._thread is not None
    writer._thread.join()
    assert "No space left" in str(writer.last_error)
    with pytest.raises(CheckpointError, match="free space"):
        writer.close()
    assert writer.last_error is None


@pytest.mark.parametrize("keep, remedy", [(1, "free space there"), (2, "free space there, or keep fewer checkpoints")])
def test_a_full_disk_is_told_with_what_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep, remedy
) -> None:
    """The newest checkpoint is kept until the next one is whole."""
    save_alone(tmp_path, 1, {"w": torch.zeros(3)}, keep=keep)

    def fail(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(dcp, "write_pieces", fail)
    with pytest.raises(CheckpointError, match=f"No space left on device; {remedy}$"):
        save_alone(tmp_path, 2, {"w": torch.zeros(3)}, keep=keep)
    assert steps(tmp_path) == ["step-00000001"]


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        Writer(tmp_path / "file" / "checkpoints", FakeWorld())


@pytest.mark.fast
def test_a_save_that_is_given_up_keeps_nobody_waiting_nor_does_the_next(tmp_path: Path) -> None:
    writer = Writer(tmp_path, FakeWorld(0, 2, HashStore()))  # the other rank never comes
    writer.save(1, pieces_of({"w": torch.zeros(3)}, 0, 2), {}, wait=False)
    waits = threading.Timer(0.1, writer.give_up)
    waits.start()
    with pytest.raises(LaunchError, match="given up: a rank is gone"):
        writer.save(2, pieces_of({"w": torch.zeros(3)}, 0, 2), {}, wait=False)
    with pytest.raises(LaunchError, match="given up"):
        writer.save(2, pieces_of({"w": torch.zeros(3)}, 0, 2), {}, wait=True)
    assert all(each.endswith(".tmp") for each in steps(tmp_path))


@pytest.mark.fast
@pytest.mark.parametrize("dead", [0, 1])
def test_a_save_does_not_wait_for_a_rank_that_is_gone(tmp_path: Path, dead: int) -> None:
    world = FakeWorld(1 - dead, 2, HashStore(), gone=f"the process of rank {dead} has ended")
    writer = Writer(tmp_path, world)
    with pytest.raises(LaunchError, match=f"a save cannot be completed: the process of rank {dead} has ended"):
        writer.save(1, pieces_of({"w": torch.zeros(3)}, 0, 2), {}, wait=True)
    assert not [each for each in steps(tmp_path) if not each.endswith(".tmp")]


@pytest.mark.fast
def test_a_save_that_the_others_have_completed_is_complete_though_they_are_gone(monkeypatch) -> None:
    store = HashStore()
    monkeypatch.setattr(meeting, "LOOK_SECONDS", 0.0)

    def lost() -> str:  # the value comes just before its rank ends
        Meeting(store, "save", 0, 2, str).put("done", None)
        return "the process of rank 0 has ended"

    assert Meeting(store, "save", 1, 2, lost).get("done", 10.0) is None
