"""Compiles the simulator once for each version of its source, torch and the compiler, in build/."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w", "-DAT_PER_OPERATOR_HEADERS")
"""The last one lets the sources include the operators that they call, and not all of them, which takes five seconds."""
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
    """Returns the compiled simulator, after compiling what has changed: fifteen seconds.

    RuntimeError with the compiler's message where that fails.
    """
    found = compiler()
    if found is None:
        raise RuntimeError("the simulated accelerator needs a C++ compiler (g++)")
    torch = torch_folder()
    includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    command = [found, *FLAGS, *(f"-I{folder}" for folder in (*includes, _HERE))]
    sources = sorted(_HERE.glob("*.cpp"))
    named = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    shared = [named, version("torch"), *command, *(file.read_text() for file in (*sources, *_HERE.glob("*.h")))]
    target = _FOLDER / f"simulator-{_digest(shared)}.so"
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with open(_FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes begin together
        if not target.exists():
            link = ["-shared", "-x", "c++", "-", f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
            # one unit: torch's headers take longer than all that is here
            _run([*command, *link], target, "".join(f'#include "{file.name}"\n' for file in sources))
    return target


def _digest(parts: list[str]) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=10).hexdigest()


def _run(command: list[str], target: Path, source: str) -> None:
    fresh = target.with_suffix(".new")
    done = subprocess.run([*command, "-o", str(fresh)], input=source, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    fresh.replace(target)
