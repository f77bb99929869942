"""`shoal doctor`: checks of this machine, each OK, WARN or FAIL with a remedy."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import shoal
from shoal import native, units
from shoal.cli.format_table import format_table, measure_formats
from shoal.cli.link_table import link_table
from shoal.comm import Link
from shoal.device import WITHOUT_ACCELERATORS, accelerators, any_device, hardware_name, total_memory, why_no_accelerator
from shoal.errors import ShoalError
from shoal.launch import launch
from shoal.launch.process import usable_cores
from shoal.launch.scratch import scratch

GIB = 2**30
OLDEST_TORCH = (2, 11)
OPTIONAL = {"transformers": "hf", "datasets": "hf", "pyarrow": "hf"}
State = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True)
class Check:
    """The result of one check: what was found, and the remedy where `state` is not OK."""

    name: str
    state: State
    found: str
    fix: str = ""


def examine() -> tuple[list[Check], list[Link], dict[str, float]]:
    """Returns all checks in the order in which a run would need them, the measured links between two ranks, and the
    FLOP/s of matrix products by format. Takes about ten seconds."""
    looks: list[Callable[[], list[Check]]] = [
        _versions, _devices, _cores, _memory, _shared_memory, _disk, _temporary, _loopback, _compiler,
    ]  # fmt: skip
    checks = [check for look in looks for check in look()]
    peak, peaks = _peaks()
    check, links = _two_ranks()
    return [*checks, peak, check], links, peaks


def show(checks: list[Check], links: list[Link], peaks: dict[str, float], as_json: bool) -> None:
    """Prints the checks, the links and the formats as tables, or as one JSON object."""
    if as_json:
        parts = {
            "checks": [asdict(check) for check in checks],
            "links": [asdict(link) for link in links],
            "matmul_flops": peaks,
        }
        print(json.dumps(parts, indent=1))
        return
    colours = {"OK": "green", "WARN": "yellow", "FAIL": "red"}
    table = Table(show_header=False, box=None, pad_edge=False)
    for check in checks:
        found = check.found + (f"\n-> {check.fix}" if check.fix else "")
        table.add_row(Text(check.state, colours[check.state]), check.name, Text(found))
    console = Console(highlight=False)
    console.print(table)
    if links:
        console.print("", link_table(links), sep="\n")
    console.print("", format_table(peaks, any_device()), sep="\n")


def _versions() -> list[Check]:
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    old = found < OLDEST_TORCH
    checks = [
        Check("shoal", "OK", f"{shoal.__version__} on Python {sys.version.split()[0]}"),
        Check("torch", "FAIL" if old else "OK", torch.__version__, "install torch 2.11 or newer" if old else ""),
    ]
    missing = [name for name in OPTIONAL if _missing(name)]
    extras = ", ".join(sorted({OPTIONAL[name] for name in missing}))
    fix = f"for models of transformers and .parquet: pip install 'shoal[{extras}]'" if missing else ""
    found_packages = f"missing: {', '.join(missing)}" if missing else "all there"
    return [*checks, Check("optional packages", "WARN" if missing else "OK", found_packages, fix)]


def _missing(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return True
    return False


def _devices() -> list[Check]:
    if not (found := accelerators()):
        return [Check("devices", "OK", f"CPU only ({why_no_accelerator()})")]
    names = (f"{hardware_name(each)} {units.size(total_memory(each) or 0)}" for each in found)
    return [Check("devices", "OK", ", ".join(names))]


def _cores() -> list[Check]:
    cores, busy = usable_cores(), os.getloadavg()[0]
    fix = "end other programs for a steady speed" if busy > cores else ""
    return [Check("cores", "WARN" if fix else "OK", f"{cores} for this process, load {busy:.1f}", fix)]


def _memory() -> list[Check]:
    memory = psutil.virtual_memory()
    low = memory.available < 2 * GIB
    fix = "a rank takes about 0.3 GiB and four times the weights: train fewer ranks or a smaller model" if low else ""
    found = f"{units.size(memory.available)} free of {units.size(memory.total)}"
    return [Check("memory", "WARN" if low else "OK", found, fix)]


def _shared_memory() -> list[Check]:
    if not Path("/dev/shm").is_dir():
        return [Check("shared memory", "WARN", "there is no /dev/shm", "in a container: mount a tmpfs there")]
    free = shutil.disk_usage("/dev/shm").free
    low = free < GIB
    fix = "in a container: start it with --shm-size=2g or --ipc=host" if low else ""
    return [Check("shared memory", "WARN" if low else "OK", f"{units.size(free)} free in /dev/shm", fix)]


def _disk() -> list[Check]:
    usage = shutil.disk_usage(".")
    low = usage.free < 5 * GIB
    fix = "checkpoints are three times the fp32 weights each: free space, or set run.dir elsewhere" if low else ""
    return [Check("disk", "WARN" if low else "OK", f"{units.size(usage.free)} free here", fix)]


def _temporary() -> list[Check]:
    given = os.environ.get("TMPDIR")
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        fix = "free space there, or set TMPDIR to a folder that can be written"
        return [Check("temporary files", "FAIL", str(error), fix)]
    if given and os.path.abspath(given) != folder:
        fix = "make that folder, free space there, or set TMPDIR to another one"
        return [Check("temporary files", "WARN", f"TMPDIR = {given} cannot be written, {folder} is used", fix)]
    return [Check("temporary files", "OK", f"in {folder}")]


def _loopback() -> list[Check]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError as error:
        fix = "bring the interface lo up: ip link set lo up"
        return [Check("loopback", "FAIL", f"127.0.0.1 cannot be reached: {error}", fix)]
    return [Check("loopback", "OK", f"connected on port {port}")]


def _compiler() -> list[Check]:
    compiler, given = native.compiler(), os.environ.get("CC")
    if compiler is None:
        fix = "install gcc or clang, or set CC"
        return [Check("C compiler", "WARN", "none: torch's slower operations are used", fix)]
    if native.library() is None:
        fix = "see the warning; is SHOAL_NATIVE=0 set?"
        return [Check("C compiler", "WARN", f"{compiler} does not compile the kernels, torch is used", fix)]
    if given and shutil.which(given) is None:
        fix = "set CC to the path of a compiler, or leave it out"
        return [Check("C compiler", "WARN", f"CC = {given} is no program, {compiler} is used", fix)]
    return [Check("C compiler", "OK", f"{compiler}; native kernels are ready")]


def _two_ranks() -> tuple[Check, list[Link]]:
    """Launches two ranks that sum a tensor and measure their links; on CPU where there are fewer than two GPUs."""
    env = {} if len(accelerators()) >= 2 else WITHOUT_ACCELERATORS
    began = time.perf_counter()
    try:
        with scratch("doctor") as folder:
            result = folder / "result.json"
            code = launch(["-m", "shoal.cli.two_ranks", str(result)], 2, env=env, run_dir=folder)
            rows = json.loads(result.read_text()) if not code and result.exists() else None
    except (ShoalError, OSError) as error:
        return Check("two ranks", "FAIL", str(error), "see the message"), []
    if rows is None:
        found = f"ended with exit code {code}, see above"
        return Check("two ranks", "FAIL", found, "see the first error above"), []
    seconds = time.perf_counter() - began
    links = [Link(**{**row, "rows": tuple(map(tuple, row["rows"]))}) for row in rows]
    found = "; ".join(str(link) for link in links)
    return Check("two ranks", "OK", f"started, met and measured in {units.duration(seconds)}; {found}"), links


def _peaks() -> tuple[Check, dict[str, float]]:
    device = any_device()
    peaks = measure_formats(device)
    found = ", ".join(f"{name} {units.flops_rate(peak)}" for name, peak in peaks.items())
    slow = peaks["bf16"] < peaks["fp32"]
    fix = 'precision = "fp32" is the faster one here' if slow else ""
    return Check("matmul peak", "WARN" if slow else "OK", found, fix), peaks
