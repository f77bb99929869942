"""What is wrong with a checkpoint on disk is named, and the one before it is used."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from shoal.checkpoint import Want, Writer, listing, load, newest, read_manifest, tensor_names, verify
from shoal.checkpoint.extra import read_extra
from shoal.checkpoint.manifest import write_manifest
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


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.fast
def test_an_index_of_an_early_python_3_11_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a member of an enum is written as getattr(enum, name)."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    save_alone(tmp_path, 1, {"w": torch.ones(3)})
    assert b"getattr" in (tmp_path / "step-00000001/.metadata").read_bytes()
    assert list(tensor_names(tmp_path / "step-00000001")) == ["w"]


@pytest.mark.fast
def test_an_index_that_somebody_else_wrote_runs_nothing(two: Path, tmp_path: Path) -> None:
    path = two / "step-00000002"
    sound = pickle.loads((path / ".metadata").read_bytes())
    wants = [Want("w", (300,), Box.whole((300,)), torch.empty(300))]
    for inside in (Trap(tmp_path / "ran"), replace(sound, planner_data=Trap(tmp_path / "ran"))):
        (path / ".metadata").write_bytes(pickle.dumps(inside))
        for read in (lambda: load(path, wants), lambda: tensor_names(path)):
            with pytest.raises(
                CheckpointError,
                match=r"names posix.mkdir, which no index holds. Load only checkpoints of people you trust",
            ):
                read()
    assert not (tmp_path / "ran").exists()


@pytest.mark.fast
@pytest.mark.parametrize("name", ["../step-00000001/__0_0.distcp", "/etc/passwd", ".."])
def test_an_index_or_a_manifest_names_no_file_elsewhere(two: Path, name: str) -> None:
    path = two / "step-00000002"
    sound = pickle.loads((path / ".metadata").read_bytes())
    for info in sound.storage_data.values():
        info.relative_path = name
    (path / ".metadata").write_bytes(pickle.dumps(sound))
    with pytest.raises(CheckpointError, match="which is not one beside it"):
        load(path, [Want("w", (300,), Box.whole((300,)), torch.empty(300))])
    manifest = read_manifest(path)
    write_manifest(path, replace(manifest, files={name: next(iter(manifest.files.values()))}))
    with pytest.raises(CheckpointError, match="which is not one beside it"):
        read_manifest(path)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("key", "value"),
    [("step", -1), ("seed", "x"), ("groups", [{"members": 3}]), ("optim", []), ("user", None), ("scheduler", 3)],
)
def test_a_state_that_no_engine_says_is_an_error(tmp_path: Path, key: str, value: object) -> None:
    said = {
        "step": 3,
        "seed": 0,
        "global_batch": 2,
        "per_sample": 1.0,
        "scheduler": None,
        "source": {},
        "groups": [],
        "optim": {},
        "user": {},
    }
    save_alone(tmp_path, 3, {"w": torch.ones(2)}, extra=said)
    path = tmp_path / "step-00000003"
    assert read_extra(path) == said
    changed = {**said, key: value} if value is not None else {each: what for each, what in said.items() if each != key}
    write_manifest(path, replace(read_manifest(path), extra=changed))
    with pytest.raises(CheckpointError, match=rf"the engine's {key} is .*no engine has saved this checkpoint"):
        read_extra(path)
