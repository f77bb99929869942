"""Question: do tensors of a session go right from GPU to GPU, and how much faster than through the hosts' memory?

    python3 -m benchmarks.gpu.server [--device cuda] [--checks] [--mebibytes 256] [--rounds 5]

An owner in a process of its own has a module on the last GPU, this process calls it from the first one. Checks: outputs
and gradients are those of a local module, by NCCL where there are two GPUs and through the host else. Then a forward
and its backward of one large tensor, both ways in turn. Writes results/gpu_server.json. `--device cpu --mebibytes 1`
runs the same road without a GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.records import Record, check, hardware, options, run, synchronise
from shoal.comm.secret import new_secret
from shoal.server.remote import Owner, OwnerOptions, RemoteModule, remote

WIDTH = 256


class Layer(nn.Module):
    """A layer, or only the way there and back."""

    def __init__(self, device: str, computes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH).to(device)
        self.computes = computes

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) if self.computes else x * 1.0


def own(pipe: Connection, token: str, device: str) -> None:
    """The owner's process, until the other end of the pipe is closed."""
    with Owner([Layer], token=token, options=OwnerOptions(device=device)) as owner:
        pipe.send(owner.address)
        try:
            pipe.recv()
        except EOFError:
            return


@contextmanager
def owning(device: str) -> Iterator[tuple[str, str]]:
    """Yields the address and the token of an owner whose device this is."""
    spawn = multiprocessing.get_context("spawn")
    (here, there), token = spawn.Pipe(), new_secret()
    process = spawn.Process(target=own, args=(there, token, device), daemon=True)
    process.start()
    there.close()
    try:
        yield str(here.recv()), token
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


def checks(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    mine, its = places(arguments.device)
    near = Layer(mine, True)
    with owning(its) as (address, token):
        for beside in (True, False):
            far = remote(address, "Layer", its, True, token=token, device=mine if beside else None)
            name = "from device to device" if far.link.device is not None else "through the host"
            for rows in (1, 1000):
                yield check(f"{rows} rows {name}: difference from a local module", difference(far, near, mine, rows), 0)
            direct = beside and mine != its
            wrong = (far.link.device is not None) != direct
            yield check(f"went {name}, where {'another' if direct else 'no other'} device was there", wrong, 0)
            far.close()


def timed(far: RemoteModule, x: Tensor, device: str) -> float:
    """Seconds of a forward and its backward."""
    synchronise(device)
    began = time.perf_counter()
    far(x * 1.0).backward(torch.ones_like(x))
    synchronise(device)
    return time.perf_counter() - began


def times(arguments: argparse.Namespace, record: Record) -> None:
    mine, its = places(arguments.device)
    x = torch.ones(arguments.mebibytes * 2**18 // WIDTH, WIDTH, device=mine, requires_grad=True)
    seconds: dict[str, list[float]] = {"device": [], "host": []}
    with owning(its) as (address, token):
        ways = {
            way: remote(address, "Layer", its, False, token=token, device=mine if way == "device" else None)
            for way in seconds
        }
        for number in range(arguments.rounds + 1):
            for way, far in ways.items():
                took = timed(far, x, mine)
                if number:
                    seconds[way].append(took)
        if ways["device"].link.device is None:
            print("one device only: both ways go through the host", flush=True)
    moved = 4 * x.nbytes  # there and back, forward and backward
    rates = {way: moved / statistics.median(each) / 1e9 for way, each in seconds.items()}
    print(f"\n{hardware(arguments.device)}, {arguments.mebibytes} MiB there and back, twice, GB/s: ", end="")
    print(", ".join(f"{way} {rate:.2f}" for way, rate in rates.items()))
    record.keep(table={"from": mine, "to": its, "seconds": seconds, "gigabytes_a_second": rates})


def main() -> None:
    parser = options("server")
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    run("gpu_server", parser.parse_args(), checks, times)


if __name__ == "__main__":
    main()
