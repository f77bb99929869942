"""Generated samples for examples and first trials. Sample `i` is a function of (seed, i), so any process can make it.

spirals      points on the plane, of three arms of a spiral: classes
shapes       images [3, 16, 16] of a disc, a square or a cross in noise: classes
positions    chess boards of random pieces, by how far White is ahead in material: targets in (-1, 1)
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.models import encode_fen

CLASSES = 3
SIDE = 16
WORTH = {"P": 1, "N": 3, "B": 3, "R": 5, "Q": 9, "K": 0}


@dataclass(frozen=True)
class Generated:
    """A map-style dataset of `count` samples of one kind."""

    make: Callable[[random.Random, torch.Generator], dict[str, Tensor]]
    count: int
    seed: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = random.Random(f"{self.seed}/{index}")
        return self.make(rng, torch.Generator().manual_seed(rng.getrandbits(63)))


def _spiral(rng: random.Random, noise: torch.Generator) -> dict[str, Tensor]:
    label, along = rng.randrange(CLASSES), rng.random()
    angle = 2 * math.pi * (label / CLASSES + along)
    point = torch.tensor([math.cos(angle), math.sin(angle)]) * (0.1 + along)
    return {"inputs": point + 0.03 * torch.randn(2, generator=noise), "labels": torch.tensor(label)}


def _shape(rng: random.Random, noise: torch.Generator) -> dict[str, Tensor]:
    label, radius = rng.randrange(CLASSES), rng.randint(3, 5)
    rows, columns = (torch.arange(SIDE) - rng.randint(6, 9) for _ in range(2))
    near, far = torch.minimum(rows.abs()[:, None], columns.abs()), torch.maximum(rows.abs()[:, None], columns.abs())
    inside = [rows.square()[:, None] + columns.square() <= radius**2, far <= radius, (near <= 1) & (far <= radius)][
        label
    ]
    colour = 0.5 + 0.5 * torch.rand(3, 1, 1, generator=noise)
    return {
        "inputs": inside * colour + 0.2 * torch.randn(3, SIDE, SIDE, generator=noise),
        "labels": torch.tensor(label),
    }


def _position(rng: random.Random, noise: torch.Generator) -> dict[str, Tensor]:
    fen = random_fen(rng)
    return {"inputs": encode_fen(fen), "targets": torch.tensor(math.tanh(material(fen) / 10))}


GENERATED: dict[str, tuple[Callable[[random.Random, torch.Generator], dict[str, Tensor]], int, int | None]] = {
    "spirals": (_spiral, 4096, CLASSES),
    "shapes": (_shape, 4096, CLASSES),
    "positions": (_position, 16384, None),
}
"""By the name of data.source: the function that makes a sample, the number of samples, and the number of classes."""


def generated(name: str, count: int | None = None, seed: int = 0) -> Generated:
    """Returns the set `name` with `count` samples (default: the number in `GENERATED`)."""
    make, usual, _ = GENERATED[name]
    return Generated(make, count or usual, seed)


def random_fen(rng: random.Random) -> str:
    """Draws a board with both kings and up to 22 other pieces; pawns stay off the first and last rank."""
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
