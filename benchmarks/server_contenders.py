"""The contenders of `server`: two processes, rank 0 the server and rank 1 its client. Each step of the client is one
round trip, or one push and pull: `step(numel)`, of so many fp32 numbers. Then what `server` runs in processes that hold
a parameter server and its workers.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from benchmarks.processes import ProcessGroup, Step
from shoal.elastic.records import kinds
from shoal.errors import LaunchError
from shoal.server import Async, Batch, BoundedStaleness, Options, ParameterServer, Sync, Table, connect
from shoal.server.policies import Policy
from shoal.server.sessions import Address, Listener, Session, SessionLost, call, key_of_token

SMALL = 16
"""fp32 numbers of a small message."""

PAUSE = 0.01
"""Seconds that a worker sleeps in each step in place of a device's computing, so that more workers than this machine
has cores can be told apart."""

STRAGGLER = 5
_WARM_SECONDS, _PATIENCE = 0.3, 0.5

POLICIES: dict[str, Callable[[int], Policy]] = {
    "Sync": Sync,
    "Batch": lambda workers: Batch(k=workers),
    "BoundedStaleness": lambda workers: BoundedStaleness(s=2),
    "Async": lambda workers: Async(),
}


@dataclass(frozen=True)
class Call:
    """Asks for as many numbers as it brings (`echo`), or pushes, or pulls `numel`."""

    what: str
    numel: int


@dataclass(frozen=True)
class Reply:
    """An answer, with numbers where there are some to bring."""


class Pair:
    """A `ProcessGroup` of a server and a client, as a contender: the client's times are timed."""

    def __init__(self, group: ProcessGroup, numel: int) -> None:
        self._group, self._numel = group, numel

    def turn(self, steps: int) -> list[float]:
        return self._group.turns([0, steps], self._numel)[1]

    def cpu_seconds(self) -> float:
        return self._group.cpu_seconds()


def session(shared: bool) -> Step:
    """A session of Shoal's, through shared memory or TCP on loopback."""
    store, reads = _store(), kinds((Call, Reply))
    if _is_server():
        token = secrets.token_hex(16)
        listener = Listener(Address("127.0.0.1", 0), key_of_token(token), reads, _answer)
        store.set("where", f"{listener.address} {token}")
        return _nothing
    address, token = store.get("where").decode().split()
    ours = call(Address.read(address), key_of_token(token), reads, 60.0, shared)
    assert (ours.carrier == "shared memory") == shared, f"the session goes through {ours.carrier}"

    def step(numel: int = SMALL) -> None:
        mine = _numbers(numel)
        if numel == SMALL:
            ours.send(Call("echo", numel), mine)
        else:
            ours.send(Call("push", numel), mine)
            ours.receive()
            ours.send(Call("pull", numel))
        ours.receive()
        ours.fill(mine)

    return step


def rpc(sockets: bool) -> Step:
    """torch.distributed.rpc on TensorPipe, as it comes (on one host it takes shared memory), or held to sockets."""
    import torch.distributed.rpc as torch_rpc

    held: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]} if sockets else {}
    options = torch_rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        rpc_timeout=60.0,
        **held,
    )
    torch_rpc.init_rpc(
        "server" if _is_server() else "client", rank=int(os.environ["RANK"]), world_size=2, rpc_backend_options=options
    )
    if _is_server():
        return _nothing

    def step(numel: int = SMALL) -> None:
        mine = _numbers(numel)
        if numel == SMALL:
            torch_rpc.rpc_sync("server", _echo, args=(mine,))
        else:
            torch_rpc.rpc_sync("server", _push, args=(mine,))
            mine.copy_(torch_rpc.rpc_sync("server", _pull, args=(numel,)))

    return step


def idle() -> Step:
    """A process that waits for calls."""
    return _nothing


def throughput(trial: int, name: str, workers: int, straggler: bool, seconds: float) -> float:
    """Gradients that the server has taken a second, in rank 0; what other ranks return means nothing. The small model
    goes through shared memory."""
    store, rank = _store(), int(os.environ["RANK"])
    if rank > workers:
        return 0.0
    if rank:
        _work(store, trial, rank, PAUSE * (STRAGGLER if straggler and rank == workers else 1))
        return 0.0
    with ParameterServer(_model(), partial(torch.optim.SGD, lr=1e-3), POLICIES[name](workers)) as server:
        store.set(f"where {trial}", f"{server.address} {server.token}")
        store.wait([f"ready {trial} {number}" for number in range(1, workers + 1)])
        time.sleep(_WARM_SECONDS)
        before, began = server.statistics(), time.perf_counter()
        time.sleep(seconds)
        after, took = server.statistics(), time.perf_counter() - began
        store.set(f"over {trial}", "1")
    return ((after.pushes - after.dropped) - (before.pushes - before.dropped)) / took


def rows(count: int, width: int, at_once: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Rows a second that one client pulls and pushes, in each round, by carrier, in rank 1. The carriers take turns at
    one table of `count` rows, all written: its memory is given by the system as it is touched, to whoever comes first.
    Their numbers are drawn evenly, `at_once` a call; what a turn of one carrier asks for the next asks for again."""
    store = _store()
    if _is_server():
        table = Table(count, width, lambda chosen: torch.ones(len(chosen), width))
        options = Options(tables={"table": table})
        with ParameterServer({}, partial(torch.optim.SGD, lr=1e-3), Async(), options=options) as server:
            store.set("rows", f"{server.address} {server.token}")
            store.wait(["rows done"])
        return {}
    address, token = store.get("rows").decode().split()
    found: dict[str, dict[str, list[float]]] = {}
    draw = torch.Generator().manual_seed(0)
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(connect(address, token, shared=shared))
            for name, shared in (("shared memory", True), ("sockets", False))
        }
        gradients = torch.ones(at_once, width)
        for number in range(rounds + 1):
            ids = torch.randint(count, (at_once,), generator=draw)
            for name in sorted(clients, reverse=bool(number % 2)):
                began = time.perf_counter()
                _, version = clients[name].pull_rows("table", ids)
                pulled = time.perf_counter()
                clients[name].push_rows("table", ids, gradients, version)
                pushed = time.perf_counter()
                if number:
                    both = found.setdefault(name, {"pulled": [], "pushed": []})
                    both["pulled"].append(at_once / (pulled - began))
                    both["pushed"].append(at_once / (pushed - pulled))
    store.set("rows done", "1")
    return found


def _work(store: TCPStore, trial: int, rank: int, pause: float) -> None:
    """A worker's steps, until the server is closed."""
    address, token = store.get(f"where {trial}").decode().split()
    model, batch = _model(), torch.randn(8, 64)
    client = connect(address, token, rank=rank, timeout=_PATIENCE)
    store.set(f"ready {trial} {rank}", "1")
    try:
        while True:
            version = client.pull(model)
            model(batch).square().mean().backward()
            time.sleep(pause)
            client.push(model, version)
            model.zero_grad()
    except LaunchError:
        if not store.check([f"over {trial}"]):
            raise
    finally:
        client.close()


def _answer(session: Session) -> None:
    """The server's end of a session."""
    while True:
        try:
            asked = session.receive()
        except SessionLost:
            return
        held = _numbers(asked.numel)
        if asked.what != "pull":
            session.fill(held)
        session.send(Reply(), *([] if asked.what == "push" else [held]))


@lru_cache
def _numbers(numel: int) -> Tensor:
    """A process's own numbers, made once."""
    return torch.ones(numel)


def _echo(tensor: Tensor) -> Tensor:
    return tensor


def _push(tensor: Tensor) -> None:
    _numbers(tensor.numel()).copy_(tensor)


def _pull(numel: int) -> Tensor:
    return _numbers(numel)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))


def _nothing(*_: int) -> None:
    """The step of a rank that serves in threads."""


def _is_server() -> bool:
    return os.environ["RANK"] == "0"


@lru_cache
def _store() -> TCPStore:
    return TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(minutes=2)
    )
