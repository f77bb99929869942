"""Remote modules whose owner, or caller, has an accelerator: programs for the simulated one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import RemoteError, UserError
from shoal.server.remote import Owner, OwnerOptions, remote
from tests.device.simulator.run import Rank
from tests.server.common import TOKEN


class Drawing(nn.Module):
    """Draws as dropout and by torch.rand, on the accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.weight, 0.5) + torch.rand(40, device="cuda")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, 2, dropout=0.5, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def seeded() -> dict[str, bool]:
    """Whether what modules draw depends on their seed alone."""
    x = torch.ones(3, 40)
    with Owner([Drawing, Recurrent], token=TOKEN) as owner:
        before = torch.cuda.default_generators[0].get_state()
        one, same, other = (remote(owner.address, Drawing, token=TOKEN, seed=seed) for seed in (3, 3, 4))
        found = [[module(x) for _ in range(2)] for module in (one, same, other)]
        kept = torch.equal(before, torch.cuda.default_generators[0].get_state())
        unseeded = remote(owner.address, Drawing, token=TOKEN)
        try:
            remote(owner.address, Recurrent, token=TOKEN, seed=1)(torch.ones(2, 1, 4))
        except (UserError, RemoteError) as error:
            told = "draws in a kernel that takes no seed" in str(error)
        return {
            "same seed": all(map(torch.equal, found[0], found[1])),
            "another seed": not torch.equal(found[0][0], found[2][0]),
            "next forward": not torch.equal(found[0][0], found[0][1]),
            "half is dropped": 0.2 < float((found[0][0] < 1.0).float().mean()) < 0.95,
            "generator left": kept,
            "no seed": not torch.equal(unseeded(x), unseeded(x)),
            "recurrent dropout refused": told,
            "gradients": one(x).sum().backward() is None,
        }


class Mixed(nn.Module):
    """Takes and returns tensors with and without gradients, on the accelerator and on the host."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 6).to(device))

    def forward(self, x: Tensor, places: Tensor, scale: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(x @ self.weight) * scale.to(x.device)
        return h[places.to(x.device)] + y, h.argmax(-1), (h * 2).sum()


def step(module: nn.Module, device: torch.device, number: int) -> list[Any]:
    """The loss and gradients of inputs, one of which is on the host; every second forward has a stream of its own."""
    draw = torch.Generator().manual_seed(number)
    x, y = (torch.randn(50, 6, generator=draw).to(device).requires_grad_() for _ in range(2))
    scale = torch.tensor(1.5, requires_grad=True)
    main = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device) if number % 2 else main
    side.wait_stream(main)
    with torch.cuda.stream(side):
        out, best, total = module(x * 2.0, torch.randperm(50, generator=draw), scale, y)
        loss = (out * out).mean() + total * 0.1 + best.float().sum() * 0.0
    main.wait_stream(side)
    loss.backward(retain_graph=True)
    loss.backward()
    found = [loss, x.grad, y.grad, scale.grad]
    del out, best, total, loss
    return [each.detach().cpu() for each in found]


def both_ends(rank: Rank) -> Any:
    """Rank 0 owns modules on its device, rank 1 calls them from its own; returns what went how, and what came of it."""
    torch.cuda.set_device(rank.rank)
    device, told = torch.device("cuda", rank.rank), Path(rank.folder) / "told"
    if rank.rank == 0:
        with Owner([Mixed], token=TOKEN, options=OwnerOptions(device=device)) as owner:
            told.with_suffix(".new").write_text(owner.address)
            told.with_suffix(".new").rename(told)
            _until((Path(rank.folder) / "done").exists)
        return None
    _until(told.exists)
    address = told.read_text()
    far, near = remote(address, Mixed, token=TOKEN, device=device), Mixed(str(device))
    crossed = []
    for number in range(3):
        ours, theirs = step(far, device, number), step(near, device, number)
        crossed.append(all(map(torch.equal, ours, theirs)))
        with torch.no_grad():
            x = torch.ones(4, 6, device=device)
            crossed.append(
                torch.equal(
                    far(x, torch.arange(4), torch.tensor(2.0), x)[0], near(x, torch.arange(4), torch.tensor(2.0), x)[0]
                )
            )
    beside = far.link.device == device
    plain = remote(address, Mixed, token=TOKEN)
    crossed.append(all(map(torch.equal, step(plain, device, 7), step(near, device, 7))))
    (Path(rank.folder) / "done").touch()
    return {"beside": beside, "host": plain.link.device is None, "equal": all(crossed)}


def one_device() -> dict[str, bool]:
    """An owner and its client that share a device, over which NCCL has no group."""
    with Owner([Mixed], token=TOKEN, options=OwnerOptions(device="cuda:0")) as owner:
        far = remote(owner.address, Mixed, token=TOKEN, device="cuda")
        ours, theirs = (step(module, torch.device("cuda:0"), 1) for module in (far, Mixed()))
        return {"host": far.link.device is None, "equal": all(map(torch.equal, ours, theirs))}


def _until(there: Any) -> None:
    until = time.monotonic() + 40.0
    while not there():
        assert time.monotonic() < until
        time.sleep(0.01)
