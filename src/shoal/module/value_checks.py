"""Checks in models of `transformers` that read values, which fake tensors do not have."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH = "TRANSFORMERS_DISABLE_TORCH_CHECK"
"""Where set to 1, `torch_compilable_check` of transformers returns at once. Models with images ask it whether a row has
as many places for them as there are features."""


class _Off:
    """Counts the contexts in which the checks are off, and keeps what the variable was before the first."""

    def __init__(self) -> None:
        self._lock, self._number, self._before = threading.Lock(), 0, os.environ.get(_SWITCH)

    def begin(self) -> None:
        with self._lock:
            if not self._number:
                self._before = os.environ.get(_SWITCH)
                os.environ[_SWITCH] = "1"
            self._number += 1

    def end(self) -> None:
        with self._lock:
            self._number -= 1
            if self._number:
                return
            del os.environ[_SWITCH]
            if self._before is not None:
                os.environ[_SWITCH] = self._before


_off = _Off()


@contextmanager
def values_unchecked() -> Iterator[None]:
    """Leaves the checks out inside the context, for runs on fake tensors; real forwards make them."""
    _off.begin()
    try:
        yield
    finally:
        _off.end()
