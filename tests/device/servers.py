"""Parameter servers and clients that have accelerators: programs for the simulated one."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from shoal.comm.nccl import Nccl
from shoal.device import CPU
from shoal.elastic.records import encode
from shoal.server import Async, Batch, Client, Options, ParameterServer, Share, Table, connect
from shoal.server.messages import WEIGHTS, Push
from tests.device.simulator.run import Rank
from tests.server.common import TOKEN

ADAM = partial(torch.optim.Adam, lr=0.1)
ROWS = 40
TABLES = {"near": Table(ROWS, 6), "far": Table(ROWS, 3, on_host=True)}
ON_CPU = {"near": Table(ROWS, 6), "far": Table(ROWS, 3)}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


@contextmanager
def serving(device: str | None, codec: str | None, directories: Sequence[Path | None], **more: Any) -> Iterator[Any]:
    """Yields servers that share all parameters, one for each of `directories`."""
    tables = TABLES if device else ON_CPU
    with ExitStack() as stack:
        servers = []
        for index, directory in enumerate(directories):
            share = Share(index, len(directories))
            options = Options(tables, share, device=device, **more)
            policy = Batch(k=2) if index == 0 and len(directories) > 1 else Async()
            made = ParameterServer(model(), ADAM, policy, codec, token=TOKEN, directory=directory, options=options)
            servers.append(stack.enter_context(made))
        yield servers


def trained(client: Client, device: str, steps: int, side: Any = None) -> list[Tensor]:
    """Weights, statistics and rows after some steps, whose gradients are computed on a stream of their own."""
    mine, found = model().to(device), []
    for step in range(steps):
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            version = client.pull(mine)
            x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step)).to(device)
            mine.zero_grad()
            (mine(x * 1.5).square().sum() * 0.1).backward()
            if step == 1:
                mine[3].bias.grad = None  # a backward that has not come there
            client.push(mine, version)
            rows = torch.randint(ROWS, (4, 5), generator=torch.Generator().manual_seed(step)).to(device)
            for name in TABLES:
                values, version = client.pull_rows(name, rows)
                found.append(values)
                client.push_rows(name, rows, values * 0.5 + 1.0, version)
        if side is not None:
            torch.cuda.current_stream(device).wait_stream(side)
    client.pull(mine)
    return [each.detach().cpu().clone() for each in (*found, *mine.parameters(), mine[1].running_mean)]


def close(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Kernels for a device and for the CPU round differently."""
    pairs = zip(ours, theirs, strict=True)
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in pairs)


def both_ends(rank: Rank, codec: str | None) -> Any:
    """Rank 0 serves from its device, rank 1 trains on its own: with one server, several, and one that is restarted from
    its journal. Returns what went how, and what came of it."""
    torch.cuda.set_device(rank.rank)
    device, folder = f"cuda:{rank.rank}", Path(rank.folder)
    if rank.rank == 0:
        with torch.cuda.stream(torch.cuda.Stream(device)), serving(device, codec, [folder / "one"]) as (one,):
            with serving(device, codec, [None, None]) as several, serving(None, codec, [None]) as (on_cpu,):
                tell(folder / "told", "\n".join(each.address for each in (one, *several, on_cpu)))
                until_there((folder / "done").exists)
            shutil.copytree(folder / "one", folder / "again")  # before it writes a last checkpoint
        with torch.cuda.stream(torch.cuda.Stream(device)), serving(device, codec, [folder / "again"]) as (again,):
            tell(folder / "restarted", again.address)
            until_there((folder / "ended").exists)
        return None
    until_there((folder / "told").exists)
    one, *several, on_cpu = (folder / "told").read_text().split("\n")
    answer: dict[str, bool] = {}
    with serving(None, codec, [None]) as (near,), joined(near.address) as client:
        wanted = trained(client, "cpu", 3)
    with serving(None, codec, [None, None]) as servers, joined([each.address for each in servers]) as client:
        wanted_of_several = trained(client, "cpu", 3)
    with joined(one, device=device) as client:
        answer["beside"] = list(map(str, client.devices)) == [device]
        found = trained(client, device, 3, torch.cuda.Stream(device))
        answer["numbers"] = close(found, wanted)
        last, last_rows = model().to(device), torch.arange(ROWS)
        client.pull(last)
        rows = {name: client.pull_rows(name, last_rows)[0] for name in TABLES}
        answer["rows on the device"] = all(str(each.device) == device for each in rows.values())
    with joined(several, device=device) as client:
        answer["several"] = close(trained(client, device, 3, torch.cuda.Stream(device)), wanted_of_several)
    with joined(on_cpu, device=device) as client:
        answer["by the host"] = client.devices == [CPU] and close(trained(client, device, 3), wanted)
    (folder / "done").touch()
    until_there((folder / "restarted").exists)
    with joined((folder / "restarted").read_text(), device=device) as client:
        again = model().to(device)
        client.pull(again)
        answer["same bits again"] = all(map(torch.equal, again.parameters(), last.parameters()))
        answer["same rows again"] = all(torch.equal(client.pull_rows(name, last_rows)[0], rows[name]) for name in rows)
        plain = joined((folder / "restarted").read_text())  # a client on the CPU beside it
        on_the_cpu = model()
        plain.pull(on_the_cpu)
        answer["client on the CPU"] = close([*on_the_cpu.parameters()], [each.cpu() for each in last.parameters()])
        plain.close()
        client.push({name: torch.ones_like(each) for name, each in again.named_parameters()}, 0)
    (folder / "ended").touch()
    return answer


def dies_in_the_middle(rank: Rank) -> Any:
    """Clients of a server on rank 0 that stop, or hang up, in the middle of a push, before and after their accelerators
    have met; another one goes on meanwhile. Returns what the server has seen."""
    torch.cuda.set_device(rank.rank)
    device, folder, said = f"cuda:{rank.rank}", Path(rank.folder), []
    blocked = threading.Event()

    def slow(self: Nccl, flat: Tensor, source: int, before: Any = Nccl.recv) -> None:
        """NCCL waits on the host, where it makes connections, for a client of which nothing comes."""
        if (folder / "stranger").exists() and not blocked.is_set():
            blocked.set()
            until_there((folder / "done").exists)
        before(self, flat, source)

    if rank.rank == 0:
        with patch.object(Nccl, "recv", slow), serving(device, None, [None], seconds=3.0, say=said.append) as (server,):
            tell(folder / "told", server.address)
            until_there((folder / "done").exists)
            until_there(lambda: not any(thread.name.startswith("shoal-beside") for thread in threading.enumerate()))
            (folder / "over").touch()
            return {
                "none is left": server.clients() == [],
                "waited on the host": blocked.is_set(),
                "pushes": server.statistics().pushes == 3 + 3,
                "stops": sum("has been silent for too long" in line for line in said) == 1,
                "hangs up": sum("hung up" in line for line in said) == 2,
            }
    until_there((folder / "told").exists)
    address, answer = (folder / "told").read_text(), {}
    with joined(address, device=device) as stops, joined(address, device=device) as hangs, joined(address) as stays:
        mine = model()
        for worker in (stops, hangs, stays):
            worker.push({name: torch.ones_like(each) for name, each in mine.named_parameters()}, worker.pull(mine))
        for worker in (stops, hangs):
            _half_a_push(worker)
        for number in range(3):
            stays.push({name: torch.ones_like(each) for name, each in mine.named_parameters()}, stays.pull(mine))
            if number == 0:
                hangs._links[0]._drop()
        answer["others are not held up"] = not _lost(stops)
        until_there(lambda: _lost(stops))
    stranger = joined(address, device=device)
    (folder / "stranger").touch()
    _half_a_push(stranger)
    time.sleep(0.3)
    stranger._links[0]._drop()
    with joined(address) as after:
        answer["server goes on"] = after.pull(mine) == 6
    time.sleep(1.0)  # for the server to notice that the stranger has gone
    (folder / "done").touch()
    until_there((folder / "over").exists)
    return answer


def one_device() -> dict[str, bool]:
    """A server and its client that share a device, over which NCCL has no group."""
    with serving(None, None, [None]) as (near,), joined(near.address) as other:
        wanted = trained(other, "cpu", 2)
    with serving("cuda:0", None, [None]) as (server,), joined(server.address, device="cuda") as client:
        found = trained(client, "cuda:0", 2)
        return {"host": client.devices == [CPU], "numbers": close(found, wanted)}


def joined(address: str | Sequence[str], device: str | None = None) -> Client:
    return connect(address, TOKEN, timeout=20.0, device=device)


def _half_a_push(client: Client) -> None:
    """Tells the server of tensors that do not come."""
    link = client._links[0]
    assert link._session is not None
    told = ",".join(f'["float32",{each.numel},true]' for each in link._carried.layout.trained)
    statistics = link.statistics
    push = Push(WEIGHTS, 0, 2, [], 1.0, -1, {})
    body = encode(push) + f'\n[{told},["float64",{statistics.numel()}]]'.encode()
    link._session._carrier.send(body, [torch.zeros_like(statistics)])


def _lost(client: Client) -> bool:
    return bool(client._links[0]._session._carrier.gone())


def tell(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def until_there(there: Any) -> None:
    until = time.monotonic() + 40.0
    while not there():
        assert time.monotonic() < until
        time.sleep(0.01)
