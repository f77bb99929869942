"""Buffers that a forward changes and whose rule nobody told us: replicas are made equal after each step.

BatchNorm's statistics compose exactly (see batchnorm). Of others (a moving average of a codebook, a counter) floating ones become the mean
over microbatches and the rest the largest: equal on all ranks, near what one process would have, and documented as not exact.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.comm import Group


class OtherBuffers:
    """The persistent buffers of `root` outside BatchNorm. Non-persistent ones are derived tables, which nobody changes."""

    def __init__(self, root: nn.Module) -> None:
        self._buffers = [
            buffer
            for owner in root.modules()
            if not isinstance(owner, _BatchNorm)
            for name, buffer in owner._buffers.items()
            if buffer is not None and name not in owner._non_persistent_buffers_set
        ]
        self._versions: list[int] = []

    def __len__(self) -> int:
        return len(self._buffers)

    def begin(self) -> None:
        """Remembers where the step starts."""
        self._versions = [buffer._version for buffer in self._buffers]

    def changed(self) -> bool:
        """Whether this rank's forwards wrote any of them since."""
        return self._versions != [buffer._version for buffer in self._buffers]

    def merge(self, group: Group, microbatches: int) -> None:
        """Makes them equal over `group`; this rank ran `microbatches`."""
        total = group.all_reduce(torch.tensor(float(microbatches)))
        for buffer in self._buffers:
            if buffer.is_floating_point():
                mean: Tensor = group.all_reduce(buffer.double() * microbatches, purpose="buffers") / total.to(buffer.device)
                buffer.copy_(mean)
            else:
                wide = buffer.to(torch.int64)
                buffer.copy_(group.all_reduce(wide, "max", purpose="buffers"))
