"""The server of a job whose clients are real: `shoal fed server`."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.comm import World
from shoal.errors import UserError
from shoal.jobs.config import Job, Origins
from shoal.jobs.federated.holdings import Dealt, deal
from shoal.jobs.federated.rounds import all_rounds, recipe_of
from shoal.jobs.lock import locked
from shoal.jobs.outcome import Outcome
from shoal.jobs.stop import Stop
from shoal.launch.identity import MOST_PORT
from shoal.plan import Plan

if TYPE_CHECKING:
    from shoal.federated.flower.served import Served

PORT = 9443


@dataclass(frozen=True)
class Serving:
    """How a server is reached, and how long it waits.

    address: "host:port" of an interface of this machine; port 0 is any. certificates: see flower/keys; None: no TLS
    and no keys, on loopback alone. deadline: seconds of a round; None: none. at_first: clients that are there before
    the first round; None: as many as a round asks. patience: seconds without a sign of life after which a client is
    gone.
    """

    address: str = f"127.0.0.1:{PORT}"
    certificates: Path | None = None
    deadline: float | None = None
    at_first: int | None = None
    patience: float = 10.0


def serve(job: Job, origins: Origins, serving: Serving) -> Outcome:
    """Trains the rounds of a job with the clients that sign in; writes the run directory as `simulate` does.

    SIGINT and SIGTERM end the run at once; the round in progress is given up. Raises UserError, LaunchError where the
    address cannot be had, TrainingError where training fails.
    """
    host, port = parse(serving.address)
    if serving.certificates is None and not is_loopback(host):
        raise UserError(f"--insecure at {host}: without certificates a server listens on loopback alone (127.0.0.1)")
    _check(job, serving)
    from shoal.federated.flower import private  # raises UserError where Flower is missing
    from shoal.federated.flower.keys import server_files
    from shoal.federated.flower.private.superlink import SuperLink

    private.quieten(private.CRITICAL)
    tls, keys = None, None
    if serving.certificates is not None:
        certificate, key, keys = server_files(serving.certificates)
        tls = certificate, key
        if serving.at_first is not None and serving.at_first > len(keys):
            raise UserError(
                f"--begin-with {serving.at_first}: {serving.certificates} lets {len(keys)} clients in. Ask for fewer, "
                "or have `shoal fed keys` make more"
            )
    dealt = deal(_without_plan(job), origins)
    world = World.single()
    try:
        with locked(Path(job.run.dir), world.everyone, replans=False):
            link = SuperLink(host, port, keys, tls, serving.patience)
            try:
                link.begin()
                return _rounds(dealt, world, serving, link)
            finally:
                link.end()
    finally:
        world.close()


def _rounds(dealt: Dealt, world: World, serving: Serving, link: Any) -> Outcome:
    from shoal.federated.flower.served import Served

    settings = dealt.federated
    made: list[Served] = []

    def make(limit: Stop) -> Served:
        at_first = settings.asked if serving.at_first is None else serving.at_first
        made.append(Served(recipe_of(dealt), settings, link, serving.deadline, at_first, lambda: limit.is_due))
        return made[0]

    def tell(served: Served, say: Callable[[str], None]) -> str:
        served.say = say
        how = "whoever comes is let in, without TLS" if serving.certificates is None else "clients sign in by key"
        return f"listens at {link.host}:{link.port}; {how}"

    outcome = all_rounds(dealt, world, {"shoal fed": "server"}, make, tell)
    if outcome.signal is None:
        made[0].dismiss()
    return outcome


def _check(job: Job, serving: Serving) -> None:
    if job.run.resume not in ("auto", "never"):
        raise UserError(
            f'run.resume = {job.run.resume!r}: a server goes on from the state in its own run.dir: give "auto" or '
            '"never"'
        )
    if job.federated is not None and job.federated.deadline is not None and serving.deadline is None:
        raise UserError(
            f"federated.deadline = {job.federated.deadline} is of simulated time: give --deadline with the seconds of "
            "a round, or remove it"
        )
    if serving.at_first is not None and serving.at_first < 1:
        raise UserError(f"--begin-with {serving.at_first}: give the number of clients to wait for, at least 1")
    for name in ("deadline", "patience"):
        value = getattr(serving, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name} {value}: give a number of seconds above 0")


def _without_plan(job: Job) -> Job:
    """Returns the job without what is of its clients alone."""
    return replace(job, plan=Plan(), run=replace(job.run, nproc=None))


def parse(address: str) -> tuple[str, int]:
    """Returns host and port of "host:port", "[::1]:port". Raises UserError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or int(port) > MOST_PORT:
        raise UserError(f"{address!r:.100} is no address: give host:port, such as 127.0.0.1:{PORT}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Returns whether a name or an address stays on this machine."""
    try:
        found = {each[4][0] for each in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in found)
