"""Trains a recurrent language model whose embedding and decoder are in two other processes: the LSTM is here.

    python examples/remote_split.py

The forward goes through all three, the backward back, and each process steps its own part.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.server.remote import local_owners

WORDS, WIDTH, LENGTH, BATCH = 256, 64, 32, 16
FACTORIES = [nn.Embedding, nn.Linear]


class Split(nn.Module):
    """An LSTM between an embedding and a decoder at their owners."""

    def __init__(self, addresses: Sequence[str], token: str) -> None:
        super().__init__()
        first, last = addresses[0], addresses[-1]
        self.embedding = shoal.remote(first, nn.Embedding, WORDS, WIDTH, token=token, seed=0)
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.decoder = shoal.remote(last, nn.Linear, WIDTH, WORDS, token=token, seed=1)

    def forward(self, words: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns logits [length, batch, words], and the state after the last word."""
        found, state = self.lstm(self.embedding(words), state)
        return self.decoder(found), state


def text() -> Tensor:
    """The bytes of a module of Python's, in BATCH columns."""
    raw = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    return raw[: len(raw) // BATCH * BATCH].view(BATCH, -1).t()


def train(addresses: Sequence[str], token: str, steps: int) -> list[float]:
    """Returns the loss of each step."""
    torch.manual_seed(0)
    model, words = Split(addresses, token), text()
    optimizer = shoal.DistributedOptimizer("adamw", model, lr=5e-3, clip=1.0)
    state: tuple[Tensor, Tensor] | None = None
    losses = []
    for step in range(steps):
        start = step * LENGTH % (len(words) - LENGTH - 1)
        given, wanted = words[start : start + LENGTH], words[start + 1 : start + LENGTH + 1]
        with shoal.context() as context:
            logits, state = model(given, state)
            loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            loss.backward()
            norm = optimizer.step(context)
            optimizer.zero_grad(context)
        state = state[0].detach(), state[1].detach()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}, gradient {norm:.3f}", flush=True)
    return losses


def main() -> None:
    torch.set_num_threads(1)
    with local_owners(FACTORIES, 2) as (addresses, token):
        losses = train(addresses, token, 120)
    print(f"loss {losses[0]:.3f} before, {losses[-1]:.3f} after {len(losses)} steps")


if __name__ == "__main__":
    main()
