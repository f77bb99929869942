"""Trains a dense model with data parallelism, and a table of embeddings that is in one other process.

    python examples/remote_embedding.py              # one rank
    python examples/remote_embedding.py --nproc 2    # two ranks of the dense model share the table

The dense model is an engine's, whose ranks sum their gradients. The table has one row a word; a rank looks rows up in
the loss, its gradients are sparse, and each rank has the rows updated that it has used.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.comm import World
from shoal.launch import join
from shoal.server.remote import local_owners

ROWS, WIDTH, BAG, CLASSES, SAMPLES = 500, 16, 6, 5, 4096


def table() -> nn.Module:
    return nn.EmbeddingBag(ROWS, WIDTH, mode="mean", sparse=True)


FACTORIES = [table]


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))


class Bags:
    """A map-style dataset: sample `i` has BAG words of one class, whose words are those of that remainder."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        label = torch.randint(CLASSES, (), generator=draw)
        words = torch.randint(ROWS // CLASSES, (BAG,), generator=draw) * CLASSES + label
        return {"words": torch.where(torch.rand(BAG, generator=draw) < 0.2, words - label, words), "label": label}


def train(world: World, address: str, token: str, steps: int) -> list[float]:
    """Returns the loss of each step, the same on all ranks."""
    rows = shoal.remote(address, table, token=token, name="table", seed=0)
    updates = shoal.DistributedOptimizer("sgd", rows, lr=30.0)

    def loss(model: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, int]:
        logits = model(rows(mb["words"]))
        return F.cross_entropy(logits, mb["label"], reduction="sum"), len(logits)

    engine = shoal.Engine(
        dense, loss, partial(torch.optim.AdamW, lr=1e-2), global_batch=64, microbatch=32, seed=0, world=world
    )
    losses = []
    for batch in engine.batches(Bags(), steps=steps):
        losses.append(float(engine.step(batch).loss))
        updates.step()
        updates.zero_grad()
        world.everyone.barrier()  # the next step finds all rows updated
        if world.rank == 0 and batch.step % 10 == 0:
            print(f"step {batch.step}: loss {losses[-1]:.3f}", flush=True)
    engine.close()
    return losses


def rank(steps: int) -> None:
    world = join()
    losses = train(world, os.environ["TABLE"], os.environ["TABLE_TOKEN"], steps)
    if world.rank == 0:
        print(f"loss {losses[0]:.3f} before, {losses[-1]:.3f} after {len(losses)} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=1, help="ranks of the dense model")
    parser.add_argument("--steps", type=int, default=60)
    given: Any = parser.parse_args()
    torch.set_num_threads(1)
    if "TABLE" in os.environ:  # one of the ranks
        rank(given.steps)
        return
    with local_owners(FACTORIES, 1) as ((address,), token):
        os.environ |= {"TABLE": address, "TABLE_TOKEN": token}
        if given.nproc == 1:
            rank(given.steps)
            return
        ranks = ["run", __file__, "--nproc", str(given.nproc), "--", "--steps", str(given.steps)]
        sys.exit(subprocess.call([sys.executable, "-m", "shoal.cli", *ranks]))


if __name__ == "__main__":
    main()
