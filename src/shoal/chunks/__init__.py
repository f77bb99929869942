"""Flat storage that parameters are permanent views of: the unit of memory, of communication and of movement."""

from shoal.chunks.adopt import adopt, move, views_beside
from shoal.chunks.assign import ChunkKey, assign
from shoal.chunks.buffer import Buffer, norms, sum_of_squares
from shoal.chunks.chunk import Chunk
from shoal.chunks.exact import value_of
from shoal.chunks.executor import Executor
from shoal.chunks.gather import Gather
from shoal.chunks.gradient_pool import GradientPool
from shoal.chunks.make import ChunkMaker
from shoal.chunks.search import search
from shoal.chunks.spec import ChunkSpec, Slot, flat_views
from shoal.chunks.tier import Budget, Tier, budget
from shoal.chunks.weakly import weakly

__all__ = [
    "Budget",
    "Buffer",
    "Chunk",
    "ChunkKey",
    "ChunkMaker",
    "ChunkSpec",
    "Executor",
    "Gather",
    "GradientPool",
    "Slot",
    "Tier",
    "adopt",
    "assign",
    "budget",
    "flat_views",
    "move",
    "norms",
    "search",
    "sum_of_squares",
    "value_of",
    "views_beside",
    "weakly",
]
