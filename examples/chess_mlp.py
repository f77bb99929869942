"""Trains the 773-515-515-1 network to tell who is ahead on a chess board.

The positions are made here: kings and random pieces on random squares, scored by the balance of material. Run it on one process,
or on several without a change:

    python examples/chess_mlp.py
    shoal run examples/chess_mlp.py --nproc 2
"""

from __future__ import annotations

import argparse
import math
import random
from functools import partial

import torch

import shoal
from shoal.models import chess_evaluator, encode_fen
from shoal.models.losses import regression

WORTH = {"P": 1, "N": 3, "B": 3, "R": 5, "Q": 9, "K": 0}


def random_fen(rng: random.Random) -> str:
    """Returns a board with both kings and up to 22 other pieces; pawns stay off the first and last rank."""
    board = [""] * 64
    squares = rng.sample(range(64), 2 + rng.randint(0, 22))
    board[squares[0]], board[squares[1]] = "K", "k"
    for square in squares[2:]:
        kinds = "NBRQ" if square < 8 or square >= 56 else "PPPPNBRQ"
        piece = rng.choice(kinds)
        board[square] = piece if rng.random() < 0.5 else piece.lower()
    ranks = ["".join(piece or "." for piece in board[first : first + 8]) for first in range(56, -8, -8)]
    text = "/".join(ranks)
    for run in range(8, 0, -1):
        text = text.replace("." * run, str(run))
    return f"{text} {rng.choice('wb')} - - 0 1"


def material(fen: str) -> int:
    """Returns White's material minus Black's, in pawns."""
    board = fen.split()[0]
    return sum(worth * (board.count(piece) - board.count(piece.lower())) for piece, worth in WORTH.items())


class Positions:
    """A map-style dataset: position `i` is a function of (seed, i), so any process can make any of them."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        fen = random_fen(random.Random(f"{self.seed}/{index}"))
        return {"inputs": encode_fen(fen), "targets": torch.tensor(math.tanh(material(fen) / 10))}


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
    train, held_out = Positions(args.positions, seed=0), Positions(1024, seed=1)
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
