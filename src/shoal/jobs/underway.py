"""What is under way while there is no step to show: the rooms below say it by `logging`, and the first rank's terminal shows it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _UnderWay(logging.Handler):
    """Hands each message of Shoal's loggers to `show`: a warning as such, the rest as it is."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.show: Callable[[str], None] = _print

    def emit(self, record: logging.LogRecord) -> None:
        warns = record.levelno >= logging.WARNING
        self.show(f"{'warning: ' if warns else ''}{record.getMessage()}")


def _print(text: str) -> None:
    print(text, flush=True)


_SHOWN = _UnderWay()  # one a process, as loggers are


@contextmanager
def tell_what_is_under_way(active: bool) -> Iterator[None]:
    """Inside, where `active`, a line says what Shoal is at as soon as that begins."""
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
    """Inside, those lines go to `show`, such as the progress line, which else they would tear."""
    _SHOWN.show = show
    try:
        yield
    finally:
        _SHOWN.show = _print
