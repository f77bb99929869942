"""The cache of compiled libraries: nothing is loaded that is cut short, damaged, or could be somebody else's."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import pytest

from shoal.native import cache, compiled

pytestmark = pytest.mark.fast


class Builder:
    """Builds a library whose `answer` is 7, and counts how often."""

    def __init__(self) -> None:
        self.builds = 0

    def __call__(self, target: Path) -> None:
        self.builds += 1
        source = target.with_suffix(".c")
        source.write_text("int answer(void) { return 7; }\n")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(target), str(source)], check=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """Where libraries are usually kept, in a cache of the test's own; so are those that are kept elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "cache" / "shoal" / "native"


def loaded(build: Builder) -> tuple[int, list[str]]:
    """The library's answer, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library: ctypes.CDLL = cache.load("kernels-test", build)
    return library.answer(), [str(warning.message) for warning in caught]


def keep(path: Path) -> None:
    """Leaves the file as it is."""


def empty(path: Path) -> None:
    put_in_its_place(path, b"")


def cut(path: Path) -> None:
    put_in_its_place(path, path.read_bytes()[:5000])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    put_in_its_place(path, bytes(data))


def put_in_its_place(path: Path, data: bytes) -> None:
    """As a new file: this process has the old one mapped."""
    path.unlink()
    path.write_bytes(data)
    path.chmod(0o700)


def lose_checksum(path: Path) -> None:
    path.with_name(path.name + ".sha256").unlink()


def open_to_others(path: Path) -> None:
    path.chmod(0o777)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "damage", [keep, empty, cut, flip, lose_checksum, open_to_others, link], ids=lambda fn: fn.__name__
)
def test_what_is_not_whole_is_built_anew(folder, damage):
    build = Builder()
    assert loaded(build) == (7, [])
    damage(folder / "kernels-test.so")
    assert loaded(build) == (7, [])
    assert build.builds == (1 if damage is keep else 2)
    assert loaded(build) == (7, []) and build.builds == (1 if damage is keep else 2)
    assert (folder / "kernels-test.so").stat().st_mode & 0o077 == 0 and not (folder / "kernels-test.so").is_symlink()


def test_a_library_cut_short_does_not_kill_the_process(tmp_path):
    """The real one, in a process of its own: touching the missing pages is a SIGBUS."""
    program = [sys.executable, "-c", "from shoal.native import library; print(library().shoal_shm_bytes(2))"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    first = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    (library,) = (tmp_path / "shoal" / "native").glob("*.so")
    os.truncate(library, library.stat().st_size // 2)
    second = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert (second.returncode, second.stdout) == (0, first.stdout), second.stderr


def open_folder(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def linked_folder(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to("elsewhere")


def file_in_its_place(folder: Path) -> None:
    folder.parent.parent.mkdir(parents=True)
    folder.parent.write_text("")


def another_user(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    folder.mkdir(parents=True, mode=0o755)
    os.chown(folder, 12345, 12345)


def another_users_parent(folder: Path) -> None:
    another_user(folder.parent)


@pytest.mark.parametrize(
    "spoil",
    [open_folder, linked_folder, file_in_its_place, another_user, another_users_parent],
    ids=lambda fn: fn.__name__,
)
def test_a_folder_that_cannot_be_trusted_is_replaced_by_a_private_one_and_that_is_said(folder, spoil):
    spoil(folder)
    build, private = Builder(), Path(tempfile.gettempdir()) / f"shoal-native-{os.geteuid()}"
    answer, (said,) = loaded(build)
    assert answer == 7 and said.startswith(f"Shoal's kernels are kept in {private}, since ") and "shoal" in said
    assert private.stat().st_mode & 0o777 == 0o700 and (private / "kernels-test.so").exists()
    assert not list(folder.glob("*.so"))
    assert loaded(build)[0] == 7 and build.builds == 1  # kept there too


def test_if_that_one_is_taken_too_it_is_a_fresh_one(folder):
    open_folder(folder)
    taken = Path(tempfile.gettempdir()) / f"shoal-native-{os.geteuid()}"
    open_folder(taken)
    answer, (said,) = loaded(Builder())
    assert answer == 7 and f"{folder} can be written by others (mode 777)" in said and not list(taken.iterdir())


def test_ranks_that_come_at_once_build_once(folder):
    build, answers = Builder(), []
    threads = [
        threading.Thread(target=lambda: answers.append(cache.load("kernels-test", build).answer())) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [7] * 6 and build.builds == 1
    assert sorted(path.name for path in folder.iterdir()) == ["kernels-test.so", "kernels-test.so.sha256"]


def fails(_: Path) -> None:
    raise RuntimeError("cc could not compile them")


def test_what_cannot_be_built_is_not_tried_elsewhere(folder):
    with pytest.raises(RuntimeError, match="could not compile"):
        cache.load("kernels-test", fails)
    assert list(folder.iterdir()) == [] and list(Path(tempfile.gettempdir()).iterdir()) == []


def test_a_compiler_that_writes_nothing_is_named(folder):
    with pytest.raises(
        RuntimeError, match=r"true could not compile the kernels: it ended with exit code 0 and said no"
    ):
        compiled("kernels", ["true"], [], [])
    assert list(folder.iterdir()) == []
