"""Trains several models on top of one, which is at a server that runs the requests of all trainers as one batch.

    python examples/remote_batched.py

The server waits until each trainer has asked, runs one forward, and hands each its rows; so it does with the backward,
after which it updates what they share. Each trainer has a head of its own. Here trainers are threads; on other hosts
they are processes that call the same function.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.server.remote import local_owners

FEATURES, WIDTH, BATCH, TRAINERS, SECONDS = 8, 64, 32, 3, 60.0


class Batched(nn.Module):
    """A trunk that runs `size` requests at a time, forward and backward, and is updated after each backward."""

    def __init__(self, size: int, lr: float) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.asked = nn.Parameter(torch.zeros(0))  # every forward needs it, so every backward comes here
        self.optimizer = torch.optim.SGD(self.trunk.parameters(), lr=lr)
        self.batches = 0
        self._size, self._guard = size, threading.Lock()
        self._round: Round | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Returns the trunk's output for `x` [rows, FEATURES], once all have asked."""
        with self._guard:
            if self._round is None or len(self._round.inputs) == self._size:
                self._round = Round(self, self._size)
            joined = self._round
            joined.inputs.append(x.detach())
            place = len(joined.inputs) - 1
        found: Tensor = Rows.apply(joined, place, x, self.asked)
        return found


class Round:
    """A batch of one request of each trainer. The last of them to come does the work of all."""

    def __init__(self, of: Batched, size: int) -> None:
        self._of = of
        self.inputs: list[Tensor] = []
        self._gradients: list[Tensor] = [torch.empty(0)] * size
        self._all_asked = threading.Barrier(size, self._forward, SECONDS)
        self._all_back = threading.Barrier(size, self._backward, SECONDS)

    def forward(self, place: int) -> Tensor:
        self._all_asked.wait()
        return self._out.detach().split([len(x) for x in self.inputs])[place]

    def backward(self, place: int, gradient: Tensor) -> Tensor | None:
        self._gradients[place] = gradient
        self._all_back.wait()
        assert self._joined.grad is not None
        return self._joined.grad.split([len(x) for x in self.inputs])[place]

    @torch.enable_grad()
    def _forward(self) -> None:
        self._joined = torch.cat(self.inputs).requires_grad_()
        self._out = self._of.trunk(self._joined)
        self._of.batches += 1

    def _backward(self) -> None:
        self._out.backward(torch.cat(self._gradients))
        self._of.optimizer.step()
        self._of.optimizer.zero_grad()


class Rows(torch.autograd.Function):
    """The rows of one trainer."""

    @staticmethod
    def forward(ctx: Any, joined: Round, place: int, x: Tensor, asked: Tensor) -> Tensor:
        ctx.joined, ctx.place = joined, place
        return joined.forward(place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.joined.backward(ctx.place, gradients[0]), None


FACTORIES = [Batched]


def trainer(address: str, token: str, steps: int, number: int) -> list[float]:
    """Trains a head of one's own: on the sine of a direction. Returns the loss of each step."""
    trunk = shoal.remote(address, Batched, TRAINERS, 0.05, token=token, name="trunk", seed=0)
    draw = torch.Generator().manual_seed(number)
    direction = torch.randn(FEATURES, generator=draw)
    head = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x = torch.randn(BATCH, FEATURES, generator=draw)
        loss = (head(trunk(x))[:, 0] - torch.sin(x @ direction)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 0:
            print(f"trainer {number}, step {step}: loss {losses[-1]:.3f}", flush=True)
    return losses


def train(addresses: Sequence[str], token: str, steps: int) -> list[float]:
    """Returns the mean loss of the trainers at each step."""
    torch.manual_seed(0)
    with ThreadPoolExecutor(TRAINERS) as threads:
        each = threads.map(partial(trainer, addresses[0], token, steps), range(TRAINERS))
        return [sum(losses) / TRAINERS for losses in zip(*each, strict=True)]


def main() -> None:
    torch.set_num_threads(1)
    with local_owners(FACTORIES, 1) as (addresses, token):
        losses = train(addresses, token, 150)
    print(f"loss {losses[0]:.3f} before, {losses[-1]:.3f} after {len(losses)} steps")


if __name__ == "__main__":
    main()
