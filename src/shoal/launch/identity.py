"""The rank of a process among the ranks, and how it is read from variables. Nothing here knows a launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.errors import UserError

DEFAULT_PORT = 29500  # torch's default; only for ranks that are all on one host, or have hosts of their own
MOST_PORT = 65535


@dataclass(frozen=True)
class Identity:
    """The rank of this process among the ranks.

    local_rank, local_size: None where only the host names of the other ranks can tell.
    store_url: tcp://host:port, file:///path, or empty for a single process.
    generation: number of restarts so far; part of the keys in the store.
    source: where this was read, for messages.
    rank0_serves: rank 0 opens the TCP store, because no launcher did.
    evaluates: this process is none of the ranks: it evaluates what they train.
    servers: addresses of the cluster's parameter servers.
    serves: this process is none of the ranks, but the parameter server of that number.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    store_url: str
    generation: int
    source: str
    rank0_serves: bool = False
    evaluates: bool = False
    servers: tuple[str, ...] = ()
    serves: int | None = None

    @property
    def trains(self) -> bool:
        """Whether this process is one of the ranks."""
        return not self.evaluates and self.serves is None


@dataclass(frozen=True)
class Names:
    """The names of the variables in which one launcher gives a process its rank."""

    source: str
    rank: str
    size: str
    local_rank: str
    local_size: str


PLAIN = Names("the environment", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SINGLE = Identity(0, 1, 0, 1, "", 0, "single process")


def meeting(found: Identity, store_url: str, rank0_serves: bool) -> Identity:
    """Returns `found` with the store where its ranks meet."""
    if found.size == 1 and rank0_serves:
        store_url = ""  # a store for rank 0 alone would only occupy a port
    return replace(found, store_url=store_url, rank0_serves=rank0_serves and bool(store_url))


def store_at(environ: Mapping[str, str], host: str, port: int) -> str:
    """Returns the URL of a store at MASTER_ADDR and MASTER_PORT, or else at `host` and `port`."""
    return f"tcp://{environ.get('MASTER_ADDR') or host}:{port_in(environ, 'MASTER_PORT') or port}"


def numbers(names: Names, environ: Mapping[str, str]) -> Identity:
    """Returns an Identity without a store, from the four variables of `names`; the local two may be absent."""
    rank, size = number(environ, names.rank), number(environ, names.size)
    if rank is None or size is None:
        have, miss = (names.size, names.rank) if rank is None else (names.rank, names.size)
        although = f" although {have}={environ[have]}" if have in environ else ""
        raise UserError(f"{names.source}: {miss} is missing{although}. Give both.")
    local_rank, local_size = number(environ, names.local_rank), number(environ, names.local_size)
    if size == 1:
        local_rank, local_size = local_rank or 0, 1
    for low, low_name, high, high_name in (
        (rank, names.rank, size, names.size),
        (local_rank, names.local_rank, local_size, names.local_size),
        (None if local_size is None else local_size - 1, names.local_size, size, names.size),
    ):
        if low is not None and high is not None and low >= high:
            bound = "at most" if low_name == names.local_size else "below"
            raise UserError(
                f"{names.source}: {low_name}={environ.get(low_name, low)} must be {bound} "
                f"{high_name}={environ.get(high_name, high)}."
            )
    return Identity(rank, size, local_rank, local_size, "", 0, names.source)


def port_in(environ: Mapping[str, str], name: str) -> int | None:
    """Returns the port that a variable names; None where it is not set. Raises UserError for what is none."""
    found = number(environ, name)
    if found is not None and found > MOST_PORT:
        raise UserError(f"{name}={found} is no port: they go to {MOST_PORT}.")
    return found


def number(environ: Mapping[str, str], name: str) -> int | None:
    """Returns the value of a variable; None where it is not set. Raises UserError for a value below 0 or no number."""
    value = environ.get(name)
    if value is None:
        return None
    if not value.isdecimal():
        raise UserError(f"{name}={value!r} is not a whole number from 0 up.")
    return int(value)
