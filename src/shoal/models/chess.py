"""A network that scores chess positions, and how it sees one: 773 numbers, 773-515-515-1 with tanh.

12 piece planes x 64 squares + side to move + 4 castling rights = 773, the bitboard input of DeepChess (David et al.
2016, https://arxiv.org/abs/1711.09667).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.models.mlp import MLP

PIECES = "PNBRQKpnbrqk"
CASTLING = "KQkq"
INPUTS = 12 * 64 + 1 + 4


def chess_evaluator() -> nn.Module:
    """Returns the network: positions [B, 773] to scores [B, 1] in (-1, 1), 1 a win for White, -1 for Black."""
    return nn.Sequential(MLP([INPUTS, 515, 515, 1], "tanh"), nn.Tanh())


def encode_fen(fen: str) -> Tensor:
    """Returns the position of `fen` as float [773], all 0 or 1.

    Element 64 p + s: piece p of "PNBRQKpnbrqk" stands on square s, with a1 = 0, b1 = 1, ..., h8 = 63. Element 768:
    White is to move. Elements 769 to 772: castling rights K, Q, k, q. The rest of the FEN (en passant, counters) is not
    seen. Raises `UserError` for a text that is not a FEN.
    """
    fields = fen.split()
    if len(fields) < 3 or fields[1] not in ("w", "b"):
        raise _not_a_fen(fen, "it needs at least the board, the side to move (w or b) and the castling rights")
    board, side, castling = fields[:3]
    ranks = board.split("/")
    if len(ranks) != 8:
        raise _not_a_fen(fen, f"the board has {len(ranks)} ranks, not 8")
    position = torch.zeros(INPUTS)
    for rank, row in zip(range(7, -1, -1), ranks, strict=True):
        for square in _occupied(fen, row):
            position[64 * PIECES.index(square[1]) + 8 * rank + square[0]] = 1.0
    position[768] = side == "w"
    for index, right in enumerate(CASTLING):
        position[769 + index] = right in castling
    return position


def _occupied(fen: str, row: str) -> list[tuple[int, str]]:
    """The pieces of one rank as (file, piece): "2K5" -> [(2, "K")]."""
    file, found = 0, []
    for letter in row:
        if letter in PIECES:
            found.append((file, letter))
            file += 1
        elif letter in "12345678":
            file += int(letter)
        else:
            raise _not_a_fen(fen, f"{letter!r} is no piece")
    if file != 8:
        raise _not_a_fen(fen, f"the rank {row!r} has {file} squares, not 8")
    return found


def _not_a_fen(fen: str, reason: str) -> UserError:
    return UserError(f"{fen!r} is not a chess position in FEN: {reason}.")
