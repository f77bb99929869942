"""Shows on rank 0's terminal what Shoal is doing while there is no step to show, as reported through `logging`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _UnderWay(logging.Handler):
    """Passes each message of Shoal's loggers to `show`, warnings with a prefix."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.show: Callable[[str], None] = _print

    def emit(self, record: logging.LogRecord) -> None:
        warns = record.levelno >= logging.WARNING
        self.show(f"{'warning: ' if warns else ''}{record.getMessage()}")


def _print(text: str) -> None:
    print(text, flush=True)


_SHOWN = _UnderWay()  # one per process, like the logger it is added to


@contextmanager
def tell_what_is_under_way(active: bool) -> Iterator[None]:
    """Shows the messages of Shoal's loggers inside the context, where `active`."""
    if not active:
        yield
        return
    logger = logging.getLogger("shoal")
    level = logger.level
    logger.addHandler(_SHOWN)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(_SHOWN)


@contextmanager
def shown_by(show: Callable[[str], None]) -> Iterator[None]:
    """Sends those messages to `show` inside the context: to the progress line, which printing would break."""
    _SHOWN.show = show
    try:
        yield
    finally:
        _SHOWN.show = _print
