"""A file is replaced at once, or stays as it was."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from shoal.errors import UserError
from shoal.replace import place_of, replace_text


def test_on_a_full_disk_the_old_file_stays_and_no_half_of_the_new_one(tmp_path: Path) -> None:
    file, limits = tmp_path / "plan.html", resource.getrlimit(resource.RLIMIT_FSIZE)
    replace_text(file, "old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            replace_text(file, "new" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("plan.html", "old")]


def test_a_link_stays_and_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "plan.html")
    assert place_of(tmp_path / "link.html", "--html", "plan.html", lambda _: True) == tmp_path / "plan.html"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "out").symlink_to(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe", tmp_path / "out", tmp_path / "none" / "plan.html"):
        with pytest.raises(UserError, match=r"--html .*: give a file in a directory that there is, such as plan.html"):
            place_of(place, "--html", "plan.html", lambda _: True)
