"""Who a rank is for a checkpoint."""

from __future__ import annotations

from shoal.assembly.model import Local
from shoal.checkpoint.role import WriterRole


def role(local: Local) -> WriterRole:
    """Who this rank is for a checkpoint."""
    mine, parts = local.ranks.replicas, {"experts": local.parallelized.beside, "tied": local.ranks.parts}
    apart = {
        kind: WriterRole(local.layouts, group.rank, group.size, parts[kind].rank, parts[kind].size)
        for kind, group in local.apart.items()
    }
    silent = frozenset(f"buffer.{name}" for axis in local.axes for name in axis.silent_buffers)
    model = local.ranks.parts
    return WriterRole(local.layouts, mine.rank, mine.size, model.rank, model.size, apart, silent)
