"""Compiles the simulator once for each version of its source, torch and the compiler, in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w")
JOBS = 2
_HERE = Path(__file__).parent
_FOLDER = Path(__file__).parents[3] / "build" / "simulator"


def compiler() -> str | None:
    """The C++ compiler; None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def torch_folder() -> Path:
    """Where torch is installed; it is not imported."""
    found = find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def library() -> Path:
    """Returns the compiled simulator, after compiling what has changed: all of it takes a minute on two cores.

    RuntimeError with the compiler's message where that fails.
    """
    command = compiler()
    if command is None:
        raise RuntimeError("the simulated accelerator needs a C++ compiler (g++)")
    torch = torch_folder()
    includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    flags = [*FLAGS, *(f"-I{folder}" for folder in includes)]
    named = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    shared = [named, version("torch"), *flags, *(file.read_text() for file in _HERE.glob("*.h"))]

    def compiled(source: Path) -> Path:
        made = _FOLDER / f"{source.stem}-{_digest([*shared, source.read_text()])}.o"
        if not made.exists():
            _run([command, *flags, "-c", str(source)], made)
        return made

    _FOLDER.mkdir(parents=True, exist_ok=True)
    with open(_FOLDER / "lock", "w") as lock, ThreadPoolExecutor(JOBS) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes begin together
        objects = list(pool.map(compiled, sorted(_HERE.glob("*.cpp"))))
        target = _FOLDER / f"simulator-{_digest([made.name for made in objects])}.so"
        if not target.exists():
            _run([command, "-shared", *map(str, objects), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"], target)
    return target


def _digest(parts: list[str]) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=10).hexdigest()


def _run(command: list[str], target: Path) -> None:
    fresh = target.with_suffix(".new")
    done = subprocess.run([*command, "-o", str(fresh)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    fresh.replace(target)
