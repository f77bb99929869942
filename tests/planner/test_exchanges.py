"""The collectives that the search counts are those of the engine's chunks."""

from __future__ import annotations

import pytest
import torch

from shoal.chunks.assign import ChunkKey, assign
from shoal.exchange.tuning import SMALLEST, USUAL_CHUNK, best_size
from shoal.models import build
from shoal.planner.cluster import Link
from shoal.planner.exchanges import MOST_CHUNKS, chunks

pytestmark = pytest.mark.fast

FAST, SLOW = Link(1e-4, 4e10), Link(1e-4, 3e9)


def cut(table: dict, link: Link, ranks: int) -> tuple[int, int]:
    """Bytes of gradients, and the chunks that the engine cuts: matrices, and what has no weight decay."""
    with torch.device("meta"):
        module = build({"name": "gpt", **table}).factory()
    named = list(module.named_parameters())
    gradients = 4 * sum(each.numel() for _, each in named)
    shortest, long = (link.seconds("all_reduce", nbytes, ranks) for nbytes in (0, 2**26))
    size = best_size(shortest, 2**26 / (long - shortest), gradients) if gradients > SMALLEST else USUAL_CHUNK
    keys = (ChunkKey(each.dtype, "", int(each.dim() >= 2), True) for _, each in named)
    described = [(name, each.shape, key) for (name, each), key in zip(named, keys, strict=True)]
    return gradients, len(assign(reversed(described), size, 4))


@pytest.mark.parametrize("link", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_chunks_of_small_models_are_counted(link, ranks):
    for table in (
        {"layers": 1, "d_model": 16, "heads": 2, "vocab_size": 257, "sequence": 16},
        {"preset": "1m", "vocab_size": 4096, "sequence": 256},
    ):
        gradients, number = cut(table, link, ranks)
        assert chunks(gradients, link, ranks) == pytest.approx(number, abs=number // 3)


def test_what_is_not_there_is_not_sent():
    assert chunks(0.0, FAST, 8) == chunks(1e6, FAST, 1) == 0 and chunks(1e12, FAST, 8) == MOST_CHUNKS
