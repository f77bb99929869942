"""Caches of a test's own, for processes that it starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from shoal.native import library


def cache_in(folder: Path) -> str:
    """Makes a cache in `folder` that has the compiled kernels, which would take 1.5 CPU seconds; returns its path."""
    cache, kernels = folder / "cache", library()
    if kernels is not None and not cache.exists():
        compiled = Path(kernels._name)
        native = cache / "shoal/native"
        native.mkdir(parents=True)
        native.chmod(0o700)
        for file in (compiled, compiled.with_name(f"{compiled.name}.sha256")):
            shutil.copy(file, native)
    return str(cache)
