"""What is wrong with a checkpoint on disk is named, and the one before it is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.checkpoint import Want, Writer, listing, load, newest, verify
from shoal.errors import CheckpointError
from shoal.parallel import Box
from tests.checkpoint.fake_ranks import FakeWorld, save_alone


@pytest.fixture
def two(tmp_path: Path) -> Path:
    for step in (1, 2):
        save_alone(tmp_path, step, {"w": torch.full((300,), float(step))}, extra={"step": step})
    return tmp_path


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def flip_the_state(path: Path) -> None:
    """One digit of the state, in a manifest that is still JSON."""
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 2\n', '"step": 3\n'))


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    # name: (what happens to the newest, what is said, state in the listing, which looks at sizes alone)
    "flipped byte": (lambda p: flip(p / "__0_0.distcp", 700), "__0_0.distcp: contents changed", "ok"),
    "flipped index": (lambda p: flip(p / ".metadata", 100), ".metadata: contents changed", "ok"),
    "truncated": (lambda p: os.truncate(p / "__0_0.distcp", 1000), "1000 bytes, ", "damaged"),
    "file gone": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp: No such file", "damaged"),
    "manifest gone": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing", "damaged"),
    "manifest cut": (lambda p: os.truncate(p / "manifest.json", 40), "manifest.json cannot be read", "damaged"),
    "manifest empty": (lambda p: os.truncate(p / "manifest.json", 0), "manifest.json cannot be read", "damaged"),
    "manifest changed": (flip_the_state, "manifest.json is damaged", "damaged"),
    "half written": (lambda p: p.rename(p.with_name(p.name + ".tmp")), "the save did not finish", "partial"),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_the_one_before_is_used(two: Path, name: str) -> None:
    damage, reason, state = DAMAGE[name]
    damage(two / "step-00000002")
    said: list[tuple[Path, str]] = []
    assert newest(two, lambda path, why: said.append((path, why))) == two / "step-00000001"
    ((path, why),) = said
    assert path.name.startswith("step-00000002")
    assert reason in why
    assert load(two / "step-00000001", []) == {"step": 1}
    assert [(row.step, row.state) for row in listing(two)] == [(2, state), (1, "ok")]
    if name != "half written":
        assert reason in verify(two / "step-00000002")[0]


@pytest.mark.fast
def test_sound_ones_are_listed_newest_first(two: Path) -> None:
    rows = listing(two)
    assert [(row.step, row.state, row.world_size, row.detail) for row in rows] == [(2, "ok", 1, ""), (1, "ok", 1, "")]
    files = [file for file in rows[0].path.iterdir() if file.name != "manifest.json"]
    assert rows[0].bytes == sum(file.stat().st_size for file in files)
    assert abs(rows[0].when.timestamp() - rows[0].path.stat().st_mtime) < 60
    assert verify(rows[0].path) == []


def test_a_directory_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "step-00000009").write_text("a file, not a checkpoint")
    (tmp_path / "notes").mkdir()
    for directory in (tmp_path, tmp_path / "missing"):
        assert newest(directory, lambda *_: pytest.fail("nothing to name")) is None
        assert listing(directory) == []


def test_leftovers_go_at_the_next_start(two: Path) -> None:
    (two / "step-00000003.tmp").mkdir()
    (two / "step-00000003.tmp" / "__0_0.distcp").write_bytes(b"half")
    Writer(two, FakeWorld())
    assert sorted(path.name for path in two.iterdir()) == ["step-00000001", "step-00000002"]


def test_loading_a_damaged_one_says_so(two: Path) -> None:
    os.truncate(two / "step-00000002" / "__0_0.distcp", 1000)
    with pytest.raises(CheckpointError, match=r"cannot be read.*ckpt verify"):
        load(two / "step-00000002", [Want("w", (300,), Box((0,), (300,)), torch.empty(300))])
    os.truncate(two / "step-00000002" / ".metadata", 10)
    with pytest.raises(CheckpointError, match=r"index \.metadata cannot be read"):
        load(two / "step-00000002", [])
