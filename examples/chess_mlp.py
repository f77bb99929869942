"""Trains the 773-515-515-1 network to tell who is ahead on a chess board.

The positions are made on the spot: kings and random pieces on random squares, scored by the balance of material. Run it
on one process, or on several without a change (`examples/chess.toml` is the same as a job file):

    python examples/chess_mlp.py
    shoal run examples/chess_mlp.py --nproc 2
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

import shoal
from shoal.jobs.generated import generated
from shoal.models import chess_evaluator
from shoal.models.losses import regression


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=16_384)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    engine = shoal.Engine(
        model=chess_evaluator,
        loss=regression,
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        global_batch=128,
        seed=0,
    )
    train, held_out = generated("positions", args.positions, seed=0), generated("positions", 1024, seed=1)
    before = engine.evaluate(held_out).loss
    for batch in engine.batches(train, epochs=args.epochs):
        out = engine.step(batch)
        if engine.world.rank == 0 and batch.step % 64 == 0:
            print(f"step {batch.step:5d}  squared error {out.loss:.4f}")
    after = engine.evaluate(held_out).loss
    if engine.world.rank == 0:
        print(f"on positions never seen: squared error {before:.4f} before, {after:.4f} after")
    engine.close()


if __name__ == "__main__":
    main()
