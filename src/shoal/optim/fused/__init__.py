"""A torch optimizer over flat storage: it updates few long pieces of chunks, and looks like one over many parameters.

    chunk   | weight ................................... |pad| bias .. |pad| weight ........ |
    pieces  |<---- BLOCK ---->|<---- BLOCK ---->|<---- BLOCK ---->|<---- BLOCK ---->|<------>|

Where an update is elementwise it does not matter where a tensor starts and ends, so the result is bitwise that of the
optimizer over the parameters. On CUDA a piece is a whole chunk, for fewer kernels; on the CPU it is what a core's cache
holds, so that later operations of an update find their operands there. Forerunners are Bagua's `fuse_optimizer` and
Apex's flat optimizers.
"""

from shoal.optim.fused.chunkwise import ChunkwiseOptimizer
from shoal.optim.fused.fuse import fuse
from shoal.optim.fused.optimizer import BLOCK, FlatOptimizer
from shoal.optim.fused.storage import flatten
from shoal.optim.fused.trial import coupled, refusal

__all__ = ["BLOCK", "ChunkwiseOptimizer", "FlatOptimizer", "coupled", "flatten", "fuse", "refusal"]
