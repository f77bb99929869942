"""The one C file: compiled on first use into a cache keyed by source, flags and CPU, loaded by ctypes.

`library()` is None where there is no C compiler or SHOAL_NATIVE=0; callers then take their torch fallback.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-std=gnu11")


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None (said once, as a warning, when compilation fails)."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if os.environ.get("SHOAL_NATIVE") == "0" or compiler is None:
        return None
    try:
        return _load(compiler)
    except OSError as error:  # no place for the cache, or one from which nothing may be executed
        warnings.warn(f"Shoal's kernels cannot be had, torch is used instead: {error}", stacklevel=2)
        return None


def _load(compiler: str) -> ctypes.CDLL:
    """Compiles the kernels if they are not in the cache, and loads them. Raises OSError."""
    source = Path(__file__).with_name("kernels.c")
    target = _cache_directory() / f"kernels-{_fingerprint(source.read_bytes(), compiler)}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            fresh = Path(scratch) / "kernels.so"
            done = subprocess.run([compiler, *_FLAGS, "-o", str(fresh), str(source)], capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"{compiler} could not compile them: {done.stderr.strip()[:500]}")
            fresh.replace(target)  # atomic: ranks that compile at once end with one whole file
    kernels = ctypes.CDLL(str(target))
    kernels.shoal_keep.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32]
    kernels.shoal_keep.restype = None
    kernels.shoal_post.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    kernels.shoal_post.restype = None
    kernels.shoal_wait.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4]
    kernels.shoal_wait.restype = ctypes.c_int64
    return kernels


def _cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "shoal" / "native"


def _fingerprint(source: bytes, compiler: str) -> str:
    parts = [source, compiler.encode(), " ".join(_FLAGS).encode(), platform.machine().encode(), _cpu_features()]
    return hashlib.blake2b(b"\0".join(parts), digest_size=10).hexdigest()


def _cpu_features() -> bytes:
    """What -march=native depends on: the cache may lie on a file system that several kinds of host share."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    return "".join(line for line in lines if line.startswith(("flags", "Features", "model name")))[:8192].encode()
