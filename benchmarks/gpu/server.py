"""Question: do tensors of a session go right from GPU to GPU, and how much faster than through the hosts' memory?

    python3 -m benchmarks.gpu.server [--device cuda] [--checks] [--mebibytes 256] [--rounds 5] [--rows 1000000]

A process of its own has a remote module, and parameter servers with weights and a table of rows, on the last GPU; this
process calls them from the first one. Checks: outputs and gradients are those of a local module, weights and rows those
of a local optimizer, by NCCL where there are two GPUs and through the host else; gradients also encoded on the device.
Then, both ways in turn: a forward and its backward of one large tensor, pull and push of weights, and of 65,536 rows.
Writes results/gpu_server.json. `--device cpu --mebibytes 1 --rows 70000` runs the same road without a GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.gpu.records import Record, check, hardware, options, run, synchronise
from shoal.comm.secret import new_secret
from shoal.server import Async, Client, Options, ParameterServer, Table, connect
from shoal.server.remote import Owner, OwnerOptions, RemoteModule, remote

WIDTH, ROW = 256, 64
LR = 0.1
AT_ONCE = 65_536
"""Rows that are pulled and pushed in one call."""
WIDEST = 12.0
"""The most that normal gradients of a row of a codec differ from each other."""


class Layer(nn.Module):
    """A layer, or only the way there and back."""

    def __init__(self, device: str, computes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH).to(device)
        self.computes = computes

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) if self.computes else x * 1.0


class Far(NamedTuple):
    """Addresses of an owner, and of parameter servers whose gradients come as they are, and encoded; their token."""

    owner: str
    plain: str
    coded: str
    token: str


def weights(mebibytes: float) -> dict[str, Tensor]:
    """Two parameters of so many MiB."""
    draw = torch.Generator().manual_seed(0)
    size = round(mebibytes * 2**18 / WIDTH / 2)
    return {name: torch.randn(size, WIDTH, generator=draw) for name in ("one", "other")}


def serve(pipe: Connection, token: str, device: str, mebibytes: float, rows: int) -> None:
    """The servers' process, until the other end of the pipe is closed."""
    given = Options({"rows": Table(rows, ROW)}, device=device)
    with ExitStack() as stack:
        owner = stack.enter_context(Owner([Layer], token=token, options=OwnerOptions(device=device)))
        sgd = partial(torch.optim.SGD, lr=LR)
        made = [ParameterServer(weights(mebibytes), sgd, Async(), codec, token=token, options=given)
                for codec in (None, "u8")]  # fmt: skip
        servers = [stack.enter_context(each) for each in made]
        pipe.send([owner.address, *(each.address for each in servers)])
        try:
            pipe.recv()
        except EOFError:
            return


@contextmanager
def serving(device: str, mebibytes: float, rows: int) -> Iterator[Far]:
    """Yields where servers are whose device this is."""
    spawn = multiprocessing.get_context("spawn")
    (here, there), token = spawn.Pipe(), new_secret()
    process = spawn.Process(target=serve, args=(there, token, device, mebibytes, rows), daemon=True)
    process.start()
    there.close()
    try:
        owner, plain, coded = here.recv()
        yield Far(owner, plain, coded, token)
    finally:
        here.close()
        process.join(20)
        if process.is_alive():
            process.kill()


def places(device: str) -> tuple[str, str]:
    """The client's device and the owner's: the first and the last one of their kind."""
    if not device.startswith("cuda"):
        return device, device
    return "cuda:0", f"cuda:{torch.cuda.device_count() - 1}"


def difference(far: RemoteModule, near: nn.Module, device: str, rows: int) -> float:
    """The largest difference of output and gradient of the input."""
    draw = torch.Generator().manual_seed(rows)
    found = []
    for module in (far, near):
        x = torch.randn(rows, WIDTH, generator=draw.manual_seed(rows)).to(device).requires_grad_()
        out = module(x * 2.0)
        out.square().sum().backward()
        assert x.grad is not None
        found.append((out.detach().cpu(), x.grad.cpu()))
    return max(float((one - other).abs().max()) for one, other in zip(*found, strict=True))


def updated(client: Client, device: str) -> float:
    """The largest difference of weights from those of a local optimizer, after three gradients."""
    mine = {name: each.to(device) for name, each in weights(1).items()}
    client.pull(mine)
    near = [nn.Parameter(each.clone()) for each in mine.values()]
    optimizer, draw = torch.optim.SGD(near, lr=LR), torch.Generator().manual_seed(1)
    for _ in range(3):
        version = client.pull(mine)
        gradients = {name: torch.randn(each.shape, generator=draw).to(device) for name, each in mine.items()}
        client.push(gradients, version)
        for parameter, gradient in zip(near, gradients.values(), strict=True):
            parameter.grad = gradient
        optimizer.step()
    client.pull(mine)
    pairs = zip(mine.values(), near, strict=True)
    return max(float((one - other.detach()).abs().max()) for one, other in pairs)


def updated_rows(client: Client, device: str, count: int) -> float:
    """The largest difference of rows from those of a local optimizer, some of which come several times."""
    rows = torch.randint(count, (1000, 3), generator=torch.Generator().manual_seed(2)).to(device)
    before, version = client.pull_rows("rows", rows)
    gradients = torch.randn(1000, 3, ROW, generator=torch.Generator().manual_seed(3)).to(device)
    client.push_rows("rows", rows, gradients, version)
    after, _ = client.pull_rows("rows", rows)
    total = torch.zeros(count, ROW, dtype=torch.float64)
    total.index_add_(0, rows.cpu().view(-1), gradients.cpu().double().view(-1, ROW))
    wanted = before.cpu() - LR * total[rows.cpu()]
    return float((after.cpu() - wanted).abs().max())


def checks(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    mine, its = places(arguments.device)
    near, count = Layer(mine, True), 5000
    with serving(its, 1, count) as far:
        for beside in (True, False):
            device, direct = mine if beside else None, beside and mine != its
            module = remote(far.owner, "Layer", its, True, token=far.token, device=device)
            plain, coded = (connect(address, far.token, device=device) for address in (far.plain, far.coded))
            name = "from device to device" if direct else "through the host"
            for rows in (1, 1000):
                yield check(
                    f"{rows} rows {name}: difference from a local module", difference(module, near, mine, rows), 0
                )
            yield check(f"weights {name}: difference from a local optimizer", updated(plain, mine), 1e-5)
            yield check(f"weights by u8 {name}: the same", updated(coded, mine), LR * WIDEST / 510)
            yield check(f"rows of a table {name}: the same", updated_rows(plain, mine, count), 1e-5)
            went = [module.link.device is not None, *(is_beside(client) for client in (plain, coded))]
            what = f"went {name}, where {'another' if direct else 'no other'} device was there"
            yield check(what, went != [direct] * 3, 0)
            for each in (module, plain, coded):
                each.close()


def is_beside(client: Client) -> bool:
    """Whether tensors of a client's sessions go from device to device."""
    return all(device.type != "cpu" for device in client.devices)


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds that it takes."""
    synchronise(device)
    began = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - began


class Ways:
    """What is timed over one way, on `device`; `direct`: from device to device, where the servers have another one."""

    def __init__(self, far: Far, device: str, its: str, direct: bool, arguments: argparse.Namespace) -> None:
        asked = device if direct else None
        self.module: RemoteModule = remote(far.owner, "Layer", its, False, token=far.token, device=asked)
        self.client = connect(far.plain, far.token, device=asked)
        self.x = torch.ones(arguments.mebibytes * 2**18 // WIDTH, WIDTH, device=device, requires_grad=True)
        self.weights = {name: each.to(device) for name, each in weights(arguments.mebibytes).items()}
        self.gradients = {name: torch.ones_like(each) for name, each in self.weights.items()}
        draw = torch.Generator().manual_seed(0)
        self.rows = torch.randint(arguments.rows, (AT_ONCE,), generator=draw).to(device)

    def pass_through(self) -> None:
        self.module(self.x * 1.0).backward(torch.ones_like(self.x))

    def pull_and_push(self) -> None:
        self.client.push(self.gradients, self.client.pull(self.weights))

    def pull_and_push_rows(self) -> None:
        values, version = self.client.pull_rows("rows", self.rows)
        self.client.push_rows("rows", self.rows, values, version)

    def close(self) -> None:
        self.module.close()
        self.client.close()


WORK = ("pass_through", "pull_and_push", "pull_and_push_rows")


def times(arguments: argparse.Namespace, record: Record) -> None:
    mine, its = places(arguments.device)
    seconds: dict[str, dict[str, list[float]]] = {work: {"device": [], "host": []} for work in WORK}
    with serving(its, arguments.mebibytes, arguments.rows) as far:
        ways = {way: Ways(far, mine, its, way == "device", arguments) for way in ("device", "host")}
        for number in range(arguments.rounds + 1):
            for work in WORK:
                for way, over in ways.items():
                    took = timed(getattr(over, work), mine)
                    if number:
                        seconds[work][way].append(took)
        if not is_beside(ways["device"].client):
            print("one device only: both ways go through the host", flush=True)
        nbytes = {"pass_through": 4 * ways["host"].x.nbytes}  # there and back, forward and backward
        nbytes["pull_and_push"] = 2 * sum(each.nbytes for each in ways["host"].weights.values())
        nbytes["pull_and_push_rows"] = 2 * 4 * ROW * len(ways["host"].rows.unique())
        for over in ways.values():
            over.close()
    print(f"\n{hardware(arguments.device)}, {arguments.mebibytes} MiB, and {AT_ONCE:,} rows of {ROW}: GB/s")
    rates: dict[str, dict[str, float]] = {}
    for work, both in seconds.items():
        rates[work] = {way: nbytes[work] / statistics.median(each) / 1e9 for way, each in both.items()}
        print(f"{work:20} " + ", ".join(f"{way} {rate:.2f}" for way, rate in rates[work].items()))
    record.keep(table={"from": mine, "to": its, "seconds": seconds, "gigabytes_a_second": rates})


def main() -> None:
    parser = options("server")
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    run("gpu_server", parser.parse_args(), checks, times)


if __name__ == "__main__":
    main()
