"""A cache of the test's own for what is measured of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.caches import cache_in


@pytest.fixture
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache_in(tmp_path))
