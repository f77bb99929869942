"""Checks of `transformers` and of `torch.distributions` that read values, which fake tensors do not have."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.distributions import Distribution

_NAME = "TRANSFORMERS_DISABLE_TORCH_CHECK"
"""Where set to 1, `torch_compilable_check` of transformers returns at once. Models with images ask it whether a row has
as many places for them as there are features."""


class _Switch:
    """A setting of the process that is `off` inside of contexts, of any threads, and behind the last one what it was
    before the first."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None], off: Any) -> None:
        self._lock, self._number, self._before = threading.Lock(), 0, None
        self._read, self._write, self._off = read, write, off

    @contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if not self._number:
                self._before = self._read()
                self._write(self._off)
            self._number += 1
        try:
            yield
        finally:
            with self._lock:
                self._number -= 1
                if not self._number:
                    self._write(self._before)


def _set(value: str | None) -> None:
    if value is None:
        os.environ.pop(_NAME, None)
    else:
        os.environ[_NAME] = value


_places = _Switch(lambda: os.environ.get(_NAME), _set, "1")
_arguments = _Switch(lambda: Distribution._validate_args, Distribution.set_default_validate_args, False)


@contextmanager
def values_unchecked() -> Iterator[None]:
    """Leaves the checks out inside the context, for runs on fake tensors; real forwards make them."""
    with _places.off(), _arguments.off():
        yield


def distributions_unchecked() -> AbstractContextManager[None]:
    """Leaves out inside the context what distributions check of their arguments, for stages of a pipeline, in which
    values that they do not need are NaN."""
    return _arguments.off()
