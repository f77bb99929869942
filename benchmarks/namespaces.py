"""Network namespaces joined by a switch, each behind a link of a given bandwidth: a small cluster on one machine.

    rank 0: lo, eth0 10.77.0.1 --- tbf --- port0 \\
                                                  bridge 10.77.0.254 (namespace of the switch)
    rank 1: lo, eth0 10.77.0.2 --- tbf --- port1 /

A token bucket at the outlet of each rank's eth0 holds its sends to the rate; what a rank receives, the others' buckets
hold. Everything, the switch too, lives in namespaces of its own: the machine's network is not touched, and to delete
them removes all. Needs Linux, root and iproute2. The kernel must have veth, bridge and the qdisc tbf.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from benchmarks.processes import Site

NETWORK = "10.77.0"
INTERFACE = "eth0"
PREFIX = "shoal-links-"
_CLONE_NEWNET = 0x40000000

Command = list[str]


@dataclass(frozen=True)
class Cluster:
    """`ranks` namespaces and their switch; `owner` is the process id of the benchmark that made them and is part of
    their names."""

    owner: int
    ranks: int

    @property
    def switch(self) -> str:
        return f"{PREFIX}{self.owner}-switch"

    def namespace(self, rank: int) -> str:
        return f"{PREFIX}{self.owner}-rank{rank}"

    @property
    def namespaces(self) -> list[str]:
        return [self.switch, *(self.namespace(rank) for rank in range(self.ranks))]


def address(host: int) -> str:
    """The switch is host 254, rank r is host r + 1."""
    return f"{NETWORK}.{host}"


def set_up(cluster: Cluster, rate: str) -> list[Command]:
    """The commands that make the cluster, its links of `rate` (as tc writes it: "100mbit")."""
    switch = cluster.switch
    commands = [
        f"ip netns add {switch}",
        f"ip -n {switch} link set lo up",
        f"ip -n {switch} link add bridge type bridge",
        f"ip -n {switch} addr add {address(254)}/24 dev bridge",
        f"ip -n {switch} link set bridge up",
    ]
    for rank in range(cluster.ranks):
        name = cluster.namespace(rank)
        commands += [
            f"ip netns add {name}",
            f"ip -n {name} link set lo up",
            f"ip -n {name} link add {INTERFACE} type veth peer name port{rank} netns {switch}",
            f"ip -n {switch} link set port{rank} master bridge up",
            f"ip -n {name} addr add {address(rank + 1)}/24 dev {INTERFACE}",
            f"ip -n {name} link set {INTERFACE} up",
            # A queue of 20 ms: with 200 ms, two ranks that send to each other came to 57% of line rate.
            f"tc -n {name} qdisc add dev {INTERFACE} root tbf rate {rate} burst 128kb latency 20ms",
        ]
    return [command.split() for command in commands]


def tear_down(namespaces: Sequence[str]) -> list[Command]:
    """The commands that remove namespaces with all that is in them."""
    return [["ip", "netns", "del", name] for name in namespaces]


def leftovers(listing: str, alive: set[int]) -> list[str]:
    """Of what `ip netns list` printed, the namespaces of benchmarks that are not among the processes `alive`: they were
    killed."""
    names = [line.split()[0] for line in listing.splitlines() if line.startswith(PREFIX)]
    return [name for name in names if int(name.removeprefix(PREFIX).split("-")[0]) not in alive]


def obstacle() -> str:
    """Why there can be no namespaces here, and the remedy; empty if there can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's; this is {sys.platform}"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 not found: install it (apt-get install iproute2)"
    if os.geteuid() != 0:
        return f"user id {os.geteuid()} may not make network namespaces: run as root"
    return ""


@contextmanager
def cluster(ranks: int, rate: str) -> Iterator[Site]:
    """A cluster with this process (its main thread, and threads that it makes from now on) in the switch's namespace;
    inside, the Site of its ranks. The namespaces go at the end, however it comes: by an exception, Ctrl-C or SIGTERM.
    What was left by killed runs goes first.

    Raises RuntimeError with the command and what it printed if one fails.
    """
    made = Cluster(os.getpid(), ranks)
    alive = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
    _run_all(tear_down(leftovers(_run(["ip", "netns", "list"]), alive)))
    terminate = signal.signal(signal.SIGTERM, _raise_exit)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _run_all(set_up(made, rate))
        enter(made.switch)
        yield Site(address(254), INTERFACE, partial(enter_rank, made))
    finally:
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave half of them
        _set_namespace(home)
        os.close(home)
        for command in tear_down(made.namespaces):
            with suppress(RuntimeError):  # not made yet when the set-up failed
                _run(command)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)


def enter_rank(made: Cluster, rank: int) -> None:
    """Moves this process, which has one thread yet, into its rank's namespace and onto a core of its own."""
    enter(made.namespace(rank))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def enter(namespace: str) -> None:
    """Moves the calling thread, and threads that it makes from now on, into a named namespace."""
    file = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        _set_namespace(file)
    finally:
        os.close(file)


def _set_namespace(file: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    if libc.setns(file, _CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, f"setns: {os.strerror(error)}")


def _run_all(commands: Sequence[Command]) -> None:
    for command in commands:
        _run(command)


def _run(command: Command) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def _raise_exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
