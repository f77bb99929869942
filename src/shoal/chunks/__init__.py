"""Flat storage that parameters are permanent views of: the unit of memory, of communication and of movement."""

from shoal.chunks.adopt import adopt, make_chunks
from shoal.chunks.assign import ChunkKey, assign
from shoal.chunks.chunk import Chunk, Slot

__all__ = ["Chunk", "ChunkKey", "Slot", "adopt", "assign", "make_chunks"]
