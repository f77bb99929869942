"""What a record names of the software that made it."""

from __future__ import annotations

import platform

import torch

import shoal


def versions() -> dict[str, str]:
    """Returns the versions of Shoal, torch and Python, by name."""
    return {"shoal": shoal.__version__, "torch": torch.__version__, "python": platform.python_version()}
