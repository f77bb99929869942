"""What a record names of the software that made it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

NOT_INSTALLED = "source tree"
"""In place of a version where Shoal runs from its sources and is not installed."""


def own_version() -> str:
    try:
        return version("shoal")
    except PackageNotFoundError:
        return NOT_INSTALLED


def versions() -> dict[str, str]:
    """Of Shoal, torch and Python, by name."""
    return {"shoal": own_version(), "torch": torch.__version__, "python": platform.python_version()}
