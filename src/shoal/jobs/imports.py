"""Imports at the start of a process, with the garbage collector at rest.

Modules are no garbage. But the collector looks again and again through all that they have made so far, for a fifth of
the time that torch and torch._dynamo take, and later at each full collection.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.jobs import lazy_dynamo

MANY = 500
"""Modules that one import of torch, or of what Shoal needs of it, brings at least."""


@contextmanager
def imports(compiled: bool = True) -> Iterator[None]:
    """Context of a command's imports. Nothing is collected inside; if they are the process's own first ones, what they
    made is never looked at again. `compiled`: the command may run what torch.compile makes; if not, that is imported
    only if something else asks for it."""
    before, running = len(sys.modules), gc.isenabled()
    gc.disable()
    if not compiled:
        lazy_dynamo.later()
    try:
        yield
    finally:
        if len(sys.modules) - before >= MANY:
            gc.freeze()
        if running:
            gc.enable()
