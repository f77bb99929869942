"""Caches of a test's own, for processes that it starts."""

from __future__ import annotations

import os
import shutil
from functools import cache as once
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from shoal.device import CPU
from shoal.native import library
from shoal.planner import kept, measure


def cache_in(folder: Path) -> str:
    """Makes a cache in `folder` that has the compiled kernels and what the cores of this machine reach, which would
    take 2 CPU seconds; returns its path."""
    cache, kernels = folder / "cache", library()
    if cache.exists():
        return str(cache)
    (cache / "shoal").mkdir(parents=True)
    (cache / "shoal/machine.json").write_text(_machine())
    if kernels is not None:
        compiled = Path(kernels._name)
        native = cache / "shoal/native"
        native.mkdir()
        native.chmod(0o700)
        for file in (compiled, compiled.with_name(f"{compiled.name}.sha256")):
            shutil.copy(file, native)
    return str(cache)


@once
def _machine() -> str:
    """What Shoal keeps of this machine once it has measured what a thread reaches."""
    with TemporaryDirectory() as folder, patch.dict(os.environ, XDG_CACHE_HOME=folder):
        measure.rates(CPU, torch.float32)
        return (kept.folder() / "machine.json").read_text()
