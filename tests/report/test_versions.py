"""Shoal says its version, and that it runs from its sources where it is not installed."""

from __future__ import annotations

from importlib import metadata
from importlib.metadata import PackageNotFoundError, version

import pytest

import shoal
from shoal.report import versions

pytestmark = pytest.mark.fast


def test_the_version_is_that_of_the_package():
    assert shoal.__version__ == versions.versions()["shoal"] == version("shoal")


def test_a_source_tree_that_is_not_installed_has_none(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert shoal.__version__ == versions.versions()["shoal"] == "source tree"
