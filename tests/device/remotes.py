"""Remote modules whose owner, or caller, has an accelerator: programs for the simulated one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.errors import RemoteError, UserError
from shoal.server.remote import Owner, remote
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
