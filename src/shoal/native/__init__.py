"""Native kernels: the C files of this folder, compiled on first use into one library in a cache (`cache`).

A library is keyed by source, flags and CPU. Kernels need no torch headers: plain pointers go through ctypes.
`library()` is None where there is no C compiler or SHOAL_NATIVE=0; callers then use their torch fallback.
`tensors.cpp`, which torch itself is to use, needs its headers, and is a library of its own (see `heap`).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache as once
from pathlib import Path
from typing import Any

from shoal.native import cache

log = logging.getLogger(__name__)

_FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-std=gnu11",
)
_POINTER, _INT, _UINT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "shoal_keep": (None, _POINTER, _INT, _INT, _POINTER, _UINT32, _INT),
    "shoal_round_stochastically": (None, _POINTER, _POINTER, _INT, _INT, _INT),
    "shoal_adam": (None, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER),
    "shoal_u8_encode": (None, _POINTER, _INT, _INT, _POINTER),
    "shoal_u8_decode": (None, _POINTER, _INT, _INT, _POINTER, ctypes.c_float, _INT),
    "shoal_u4_encode": (None, _POINTER, _INT, _INT, _POINTER),
    "shoal_u4_decode": (None, _POINTER, _INT, _INT, _POINTER, ctypes.c_float, _INT),
    "shoal_sign_encode": (None, _POINTER, _INT, _INT, _POINTER),
    "shoal_sign_decode": (None, _POINTER, _INT, _INT, _POINTER, ctypes.c_float, _INT),
    "shoal_at_least": (_INT, _POINTER, _INT, _UINT32, _INT, _POINTER),
    "shoal_shm_bytes": (_INT, _INT),
    "shoal_shm_view_bytes": (_INT,),
    "shoal_shm_open": (None, _POINTER, _POINTER, _INT, _INT, _POINTER),
    "shoal_shm_stop": (None, _POINTER, _INT),
    "shoal_shm_barrier": (_INT, _POINTER),
    "shoal_shm_all_reduce": (_INT, _POINTER, _POINTER, _INT, _INT, _INT, _POINTER, _INT),
    "shoal_shm_reduce_scatter": (_INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _POINTER, _INT),
    "shoal_shm_all_gather": (_INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER, _INT, _INT),
    "shoal_shm_number_of": (_INT, _POINTER, _INT),
    "shoal_shm_broadcast": (_INT, _POINTER, _POINTER, _INT, _INT),
    "shoal_shm_mail": (_INT, _POINTER, _POINTER, _INT),
    "shoal_shm_has_come": (_INT, _POINTER, _INT, _INT, _POINTER),
    "shoal_pipe_bytes": (_INT,),
    "shoal_pipe_open": (None, _POINTER, _POINTER, _INT, _POINTER),
    "shoal_pipe_send": (_INT, _POINTER, ctypes.c_char_p, _INT, _POINTER, _INT),
    "shoal_pipe_take": (_INT, _POINTER, _POINTER, _INT),
    "shoal_pipe_fill": (_INT, _POINTER, _POINTER, _INT),
    "shoal_pipe_end": (None, _POINTER),
    "shoal_tcp_swap": (_INT, _POINTER, _INT, _INT),
}
"""The result and the arguments of each function of the C files."""


class _Nothing:
    """Kernels that do nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


_pretending: ContextVar[bool] = ContextVar("pretending", default=False)


@contextmanager
def pretending() -> Iterator[None]:
    """Inside, on this thread, kernels do nothing: a rehearsal has tensors without memory."""
    token = _pretending.set(True)
    try:
        yield
    finally:
        _pretending.reset(token)


def pretends() -> bool:
    """Returns whether kernels do nothing now."""
    return _pretending.get()


def library() -> Any:
    """Returns the compiled kernels, or None (with one warning when compilation fails)."""
    return _Nothing() if pretends() else _library()


def compiler() -> str | None:
    """Returns the path of the C compiler: of CC, or where that is no program of another one; None where there is
    none."""
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")


@once
def _library() -> ctypes.CDLL | None:
    program = compiler()
    if os.environ.get("SHOAL_NATIVE") == "0" or program is None:
        return None
    try:
        return _load(program)
    except (OSError, RuntimeError) as error:  # no usable folder for the cache, or an error of the compiler
        warnings.warn(f"Shoal's kernels cannot be had, torch is used instead: {error}", stacklevel=2)
        return None


def _load(program: str) -> ctypes.CDLL:
    """Compiles the kernels if they are not in the cache, and loads them. Raises OSError or RuntimeError."""
    files = sorted(Path(__file__).parent.glob("*.[ch]"))
    kernels = compiled("kernels", [program, *_FLAGS], [file for file in files if file.suffix == ".c"], files)
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(kernels, name)
        function.restype, function.argtypes = result, arguments
    return kernels


def compiled(name: str, command: list[str], sources: list[Path], files: list[Path], *versions: str) -> ctypes.CDLL:
    """Loads the library of `sources`, which `command` compiles, with what follows -o, unless it is in the cache, where
    its key is the command, all of its `files`, and the `versions` of what it is compiled against. Raises OSError or
    RuntimeError."""

    def build(target: Path) -> None:
        log.info("compiling the %s, once on this machine", name)
        done = subprocess.run([*command, "-o", str(target), *map(str, sources)], capture_output=True, text=True)
        if done.returncode or not target.exists():
            said = done.stderr.strip()[:500] or f"it ended with exit code {done.returncode} and said nothing"
            raise RuntimeError(f"{command[0]} could not compile the {name}: {said}")

    key = [*(file.read_bytes() for file in files), *(each.encode() for each in (*command, *versions))]
    return cache.load(f"{name}-{_fingerprint(key)}", build)


def _fingerprint(parts: list[bytes]) -> str:
    machine = platform.machine().encode(), _cpu_features()
    return hashlib.blake2b(b"\0".join([*parts, *machine]), digest_size=10).hexdigest()


def _cpu_features() -> bytes:
    """Returns what -march=native depends on: hosts of several kinds may share the file system of the cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    return "".join(line for line in lines if line.startswith(("flags", "Features", "model name")))[:8192].encode()
