"""This machine as a cluster: what its device reaches, measured in about a second and kept with its age, and its links.

What was measured is kept for a month in `machine.json` beside the compiled kernels' folder (`~/.cache/shoal`, or below
XDG_CACHE_HOME), by device, format, threads and version of torch.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from shoal.comm import Link as Measured
from shoal.device import CPU, free_memory, hardware_name, is_accelerator, measure_peak_flops, synchronize
from shoal.planner.cluster import FORMATS, Cluster, Device, Host, Link

REACHES = 0.85
"""Of the best product's rate, what products of a model reach here."""
STALE = 30 * 86400.0
"""Seconds after which a measurement is made again."""
COPIED, TINY = 64 * 2**20, 200
USUAL = Link(1.5e-4, 2e9)
"""Between ranks of a host over memory that they share, where nobody has measured it."""


@dataclass(frozen=True)
class Rates:
    """What a device reaches: operations a second of products, bytes a second of other operations, seconds of the
    shortest operation with its part of autograd; and when that was measured, in Unix time."""

    flops: float
    bandwidth: float
    launch: float
    at: float

    @property
    def age(self) -> float:
        """Seconds since."""
        return max(0.0, time.time() - self.at)


def rates(device: torch.device, dtype: torch.dtype, fresh: bool = False) -> Rates:
    """Returns what `device` reaches with the current number of threads, as measured before, or now."""
    key = f"{hardware_name(device) or os.uname().nodename} {dtype} {torch.get_num_threads()} {torch.__version__}"
    known = _read()
    if not fresh and key in known:
        with suppress(TypeError):
            found = Rates(**known[key])
            if found.age < STALE:
                return found
    found = Rates(measure_peak_flops(device, dtype), _bandwidth(device), _launch(device), time.time())
    _write({**known, key: asdict(found)})
    return found


@dataclass(frozen=True)
class Learned:
    """What a run said of this machine: its computing took `slower` times what was predicted of the measured rates; the
    run's folder and when that was compared, in Unix time."""

    slower: float
    run: str
    at: float

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d", time.localtime(self.at))
        return f"computing takes {self.slower:.3g} times what was measured, learned from {self.run} on {when}"


def learned(device: torch.device, dtype: torch.dtype, on_host: int) -> Learned | None:
    """What was last learned for this device, format and number of ranks of a host."""
    with suppress(KeyError, TypeError):
        return Learned(**_read()[_learned_key(device, dtype, on_host)])
    return None


def learn(device: torch.device, dtype: torch.dtype, on_host: int, found: Learned) -> None:
    """Keeps `found` for the next prediction, in place of what was learned before."""
    _write({**_read(), _learned_key(device, dtype, on_host): asdict(found)})


def _learned_key(device: torch.device, dtype: torch.dtype, on_host: int) -> str:
    threads = torch.get_num_threads() if is_accelerator(device) else threads_of(on_host)
    return f"learned {hardware_name(device) or os.uname().nodename} {dtype} {threads} {on_host} {torch.__version__}"


def threads_of(on_host: int) -> int:
    """Threads of each of so many ranks of this host, at most as many as this process has."""
    return min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // on_host))


def _bandwidth(device: torch.device) -> float:
    source = torch.ones(COPIED // 4, device=device)
    into, best = torch.empty_like(source), float("inf")
    for _ in range(4):
        synchronize(device)
        began = time.perf_counter()
        torch.add(source, 1.0, out=into)
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * COPIED / best


def _launch(device: torch.device) -> float:
    small = torch.ones(16, device=device, requires_grad=True)
    best = float("inf")
    for _ in range(3):
        synchronize(device)
        began = time.perf_counter()
        value = small
        for _ in range(TINY):
            value = value + 1.0
        value.sum().backward()
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best / (3 * TINY)  # forward counts once, backward twice


def here(
    ranks: int, on_host: int, dtype: torch.dtype, device: torch.device = CPU, link: Measured | None = None,
    fresh: bool = False,
) -> Cluster:  # fmt: skip
    """This machine as a cluster of `ranks` ranks, `on_host` of them on each host. `link`: of all ranks, where it was
    measured."""
    own, before = is_accelerator(device), torch.get_num_threads()
    torch.set_num_threads(before if own else threads_of(min(on_host, ranks)))
    try:
        found = rates(device, dtype, fresh)
    finally:
        torch.set_num_threads(before)
    memory = int(psutil.virtual_memory().available)
    known = learned(device, dtype, min(on_host, ranks))
    slower = 1.0 if known is None else known.slower
    peak = {FORMATS.get(dtype, str(dtype).removeprefix("torch.")): found.flops / slower}
    what = Device(
        hardware_name(device) or "this host's cores",
        peak,
        free_memory(device) or memory,
        found.bandwidth / slower,
        REACHES,
        1.0,
        found.launch * slower,
        "measured",
        not own,
    )
    between = USUAL if link is None or link.ranks < 2 else ring_of(link)
    host = Host(what, min(on_host, ranks), between, memory, found.bandwidth / 2, update=found.bandwidth * on_host)
    overlap = 0.8 if own else 0.3
    hosts = (host,) * max(1, ranks // host.count)
    return Cluster(
        "here",
        hosts,
        between,
        overlap,
        said=(f"measured {found.age:.0f} s ago", *([] if known is None else [str(known)])),
    )


def ring_of(link: Measured) -> Link:
    """The link whose ring would take what was measured of all-reduces."""
    rounds, share = 2 * (link.ranks - 1), 2 * (link.ranks - 1) / link.ranks
    return Link(link.latency / rounds, share * link.bandwidth)


def _file() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "shoal" / "machine.json"


def _read() -> dict[str, Any]:
    with suppress(OSError, ValueError, RuntimeError):
        content = json.loads(_file().read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def _write(content: dict[str, Any]) -> None:
    """Keeps what was measured; where no file can be written it is measured again next time."""
    with suppress(OSError, RuntimeError):
        path = _file()
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.write_text(json.dumps(content, indent=1), encoding="utf-8")
        fresh.replace(path)
