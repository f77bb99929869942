"""Operations beside a block that is checkpointed in part, which are none of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode


@contextmanager
def outside_checkpoints() -> Iterator[None]:
    """Leaves the modes of a block that is checkpointed in part, which keep what operations give, or expect them again
    in the order of the first time: for what goes on in the middle of the block, as a lane does on a thread of its
    own."""
    left = []
    while isinstance(_get_current_dispatch_mode(), _CachingTorchDispatchMode | _CachedTorchDispatchMode):
        left.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(left):
            _push_mode(mode)
