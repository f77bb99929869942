"""Which modules are being called now."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Mapping
from types import FrameType
from typing import Any

from torch import nn

_CALL = nn.Module._call_impl.__code__


def calls_of(parts: Container[nn.Module]) -> Iterator[tuple[nn.Module, Mapping[str, Any]]]:
    """Yields those of `parts` that are being called now and their keyword arguments, the innermost call first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL and (found := frame.f_locals)["self"] in parts:
            yield found["self"], found["kwargs"]
        frame = frame.f_back
