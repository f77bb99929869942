"""A node of a job: its supervisor as this process, with ranks on this host."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch.distributed as dist

from shoal.comm.secret import FILE_VARIABLE, VARIABLE, find_secret, new_secret
from shoal.comm.signed import derived
from shoal.elastic.crew import Crew
from shoal.elastic.election import Election
from shoal.elastic.etcd import SCHEMES, Etcd, parse
from shoal.elastic.etcd_election import EtcdElection
from shoal.elastic.events import Limits
from shoal.elastic.journal import Journal, written
from shoal.elastic.leadership import FIRST_PATIENCE, Leadership, Node
from shoal.elastic.messages import Admitted, Ask, Drain
from shoal.elastic.supervisor import Supervisor
from shoal.errors import UserError
from shoal.launch.scratch import scratch
from shoal.launch.store import serve_on

SECRET, MEMBERSHIP = "join.secret", "membership"
"""The file with the job's secret in its run directory, where the environment gives none; the folder there with the
journals of coordinators and the job's file as it was when the job began."""


@dataclass(frozen=True)
class Program:
    """What a job runs on its nodes.

    arguments: for `python`, the same on all nodes. file: a file among them that has to be the same everywhere.
    run_dir: its folder, which all nodes see.
    """

    arguments: list[str]
    file: Path
    run_dir: Path


Arrange = Callable[[list[str], int], tuple[list[str], str]]
"""Returns for a program and a number of ranks further arguments, and a sentence about them, or ""."""
Came = Callable[[tuple[str, int]], None]
"""Is told the address at which a node listens, once it is a member. Who asks to be told is the job's driver, whose
SIGINT is that the job is to end with a checkpoint."""


def found(
    program: Program,
    nodes: tuple[int, int],
    ranks: int,
    interface: str | None,
    arrange: Arrange,
    port: int = 0,
    came: Came | None = None,
) -> int:
    """Founds a job for that many nodes, the least and the largest number, and coordinates it; returns its exit code.

    ranks: how many this host starts. interface: where to listen, a name or an address; by default loopback.
    port: by default a free one. came: is told where this node listens, in place of the user.
    """
    secret, admitted = _secret(program.run_dir), _admitted(program, nodes)

    def begin(leadership: Leadership) -> None:
        leadership.lead(address_of(interface), admitted, Limits(*nodes), port)
        if came is not None:
            came(leadership.address)
            return
        given = VARIABLE in os.environ or FILE_VARIABLE in os.environ
        say(f"further nodes join by: {join_line(leadership.address, None if given else program.run_dir / SECRET)}")

    asks = Ask(signal.SIGINT if came is None else signal.SIGTERM)
    return asyncio.run(_supervise(secret, ranks, begin, arrange, asks, came=came))


def join_line(address: tuple[str, int], secret: Path | None) -> str:
    """The line for a shell by which another node joins at `address`. `secret`: the file with the job's secret; None
    where the environment of all nodes has it."""
    how = "" if secret is None else f"{FILE_VARIABLE}={shlex.quote(str(secret))} "
    return f"{how}shoal train --join {':'.join(map(str, address))}"


def found_or_join(
    program: Program, nodes: tuple[int, int], ranks: int, interface: str | None, arrange: Arrange, url: str
) -> int:
    """Founds a job that is coordinated through the etcd cluster at `url`, or joins it where another node has; returns
    its exit code. See `found`."""
    etcd, admitted = Etcd(parse(url)), _admitted(program, nodes)
    return _by_etcd(etcd, ranks, interface, arrange, admitted)


def join(
    address: str,
    ranks: int,
    interface: str | None,
    arrange: Arrange,
    patience: float = FIRST_PATIENCE,
    came: Came | None = None,
) -> int:
    """Joins a job; returns the exit code. See `found`.

    address: where one of its nodes listens, host:port, or several of these with commas between them, of which the first
        that answers is asked; or the URL of an etcd cluster in which the coordinator is named.
    patience: seconds for which it is looked for.
    """
    if address.partition("://")[0] in SCHEMES:
        return _by_etcd(Etcd(parse(address)), ranks, interface, arrange, None)
    places = [_place(each) for each in address.split(",")]
    secret = find_secret()

    def begin(leadership: Leadership) -> None:
        if interface is not None:
            leadership.listen(address_of(interface))
        leadership.follow(places)
        leadership.patience = patience

    asks = Drain(signal.SIGINT) if came is None else Ask(signal.SIGTERM)
    return asyncio.run(_supervise(secret, ranks, begin, arrange, asks, came=came))


def _place(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(f"--join {text}: give host:port as the first node has printed it")
    return host, int(port)


def _by_etcd(etcd: Etcd, ranks: int, interface: str | None, arrange: Arrange, job: Admitted | None) -> int:
    """Joins a job, or founds `job`; all of its nodes have the same secret, from which the job's own is derived."""
    secret = derived(find_secret(), "job", etcd.address.prefix)

    def begin(leadership: Leadership) -> None:
        leadership.listen(etcd.own_host() if interface is None else address_of(interface))
        leadership.stand(job)
        say(f"this node is {':'.join(map(str, leadership.address))} of the job at {etcd.address}")

    election = EtcdElection(etcd, derived(secret, "etcd"), job.run_dir if job is not None else "")
    return asyncio.run(_supervise(secret, ranks, begin, arrange, Drain(signal.SIGINT), election))


def _admitted(program: Program, nodes: tuple[int, int]) -> Admitted:
    """Returns what members are told of the job. Its processes read a copy of its file, which may change while they
    come and go."""
    file, text = str(program.file), program.file.read_bytes()
    told = hashlib.sha256(text).hexdigest()
    copy = program.run_dir / MEMBERSHIP / f"{program.file.stem}-{told[:8]}{program.file.suffix}"
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        fresh = copy.with_name(f"{copy.name}.{os.getpid()}")
        fresh.write_bytes(text)
        os.replace(fresh, copy)
    except OSError as error:
        raise _unwritable(program.run_dir, error) from error
    arguments = [str(copy) if each == file else each for each in program.arguments]
    return Admitted("", 0, arguments, os.getcwd(), str(program.run_dir), str(copy), told, *nodes)


async def _supervise(
    secret: bytes,
    ranks: int,
    begin: Callable[[Leadership], None],
    arrange: Arrange,
    on_interrupt: Ask | Drain,
    election: Election | None = None,
    came: Came | None = None,
) -> int:
    """Runs a supervisor. SIGTERM drains it, SIGINT tells `on_interrupt`; a second signal ends it at once."""
    stores: list[dist.TCPStore] = []

    def open_store(host: str) -> int:
        stores[:] = [serve_on(host)]  # the one before has no ranks any more
        return int(stores[0].port)

    def arranged(program: list[str], size: int) -> list[str]:
        args, said = arrange(program, size)
        if said:
            say(said)
        return args

    def check(job: Admitted) -> None:
        _check(job)
        if came is not None:
            came(leadership.address)

    name = re.sub(r"[^\w.-]", "-", socket.gethostname(), flags=re.ASCII).strip("-._")[:48] or "node"
    key = derived(secret, "coordinator")
    node = Node(name, secrets.token_hex(8), key, open_store, arranged, _journal, _written, check, say)
    received: list[int] = []
    with scratch("run") as folder:
        leadership = Leadership(node, election)
        supervisor = Supervisor(node, leadership, Crew(ranks, secret, folder, say))
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def receive(number: int) -> None:
            if number == signal.SIGTERM and number in received:
                return  # Slurm sends two in a row when it preempts a job
            received.append(number)
            if len(received) > 1:
                task.cancel()
            else:
                supervisor.wish(Drain() if number == signal.SIGTERM else on_interrupt)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, receive, number)
        begin(leadership)
        try:
            code = await supervisor.run()
        except asyncio.CancelledError:
            return 128 + received[-1]
    return 128 + received[0] if received and code >= 128 else code


def address_of(interface: str | None) -> str:
    """Returns the address of a network interface: its first one of IPv4, else of IPv6; an address stands for itself.
    Raises UserError for an unknown one."""
    known = psutil.net_if_addrs()
    if interface is None:
        return "127.0.0.1"
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in known.get(interface, []):
            if address.family == family:
                return address.address.partition("%")[0]
    if interface in {address.address for addresses in known.values() for address in addresses}:
        return interface
    raise UserError(f"--host {interface}: this host has no such interface or address; it has {', '.join(known)}")


def digest(file: Path) -> str:
    """Returns the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def say(text: str) -> None:
    """Writes a line to stderr at once."""
    print(f"shoal: {text}", file=sys.stderr, flush=True)


def _secret(run_dir: Path) -> bytes:
    """Returns the secret of the environment, or a new one that it writes to the run directory for this user alone."""
    if VARIABLE in os.environ or FILE_VARIABLE in os.environ:
        return find_secret()
    secret = new_secret()
    path = run_dir / SECRET
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(secret)
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    return secret.encode()


def _unwritable(run_dir: Path, error: OSError) -> UserError:
    return UserError(f"the run directory {run_dir} cannot be written: {error}. Choose another run.dir")


def _journal(job: Admitted, lines: list[str]) -> Journal:
    """Makes the journal of a coordinator on this host."""
    return Journal(_membership(job) / f"{socket.gethostname()}-{os.getpid()}.journal", lines)


def _written(job: Admitted) -> list[list[str]]:
    """Returns the journals of the coordinators of the run directory, and of those of its earlier jobs."""
    return written(_membership(job))


def _membership(job: Admitted) -> Path:
    return Path(job.run_dir) / MEMBERSHIP


def _check(job: Admitted) -> None:
    """Goes to the job's folder. Raises UserError where the job cannot run here."""
    try:
        os.chdir(job.cwd)
        same = digest(Path(job.file)) == job.digest
    except OSError as error:
        raise UserError(
            f"the job cannot run here: {error}. All nodes need to see its folder, its job file and its run.dir under "
            "the same paths, e.g. on a network file system"
        ) from error
    if not same:
        raise UserError(f"{job.file} is another file here than on the first node: all nodes need the same one")
