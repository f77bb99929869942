"""What is open by thread, while functions of other modules give way to stand-ins."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class OpenByThread(Generic[T]):
    """Records, by thread, what the stand-ins use, the innermost last; they are in place while anything is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_thread: dict[int, list[T]] = {}

    def enter(self, used: T) -> None:
        with self._lock:
            if not self._by_thread:
                self._give_way()
            self._by_thread.setdefault(threading.get_ident(), []).append(used)
            self._look()

    def leave(self) -> None:
        with self._lock:
            mine = self._by_thread[threading.get_ident()]
            mine.pop()
            if not mine:
                del self._by_thread[threading.get_ident()]
            if not self._by_thread:
                self._put_back()
            self._look()

    def here(self) -> T | None:
        """Returns what this thread uses; where it opened nothing, like those that run backward on a GPU, the only ones
        that are open. None where there are none, or several."""
        with self._lock:
            mine = self._by_thread.get(threading.get_ident())
            if mine:
                return mine[-1]
            return next(iter(self._by_thread.values()))[-1] if len(self._by_thread) == 1 else None

    def _give_way(self) -> None:
        """Puts the stand-ins in place."""
        raise NotImplementedError

    def _put_back(self) -> None:
        """Puts the functions back."""
        raise NotImplementedError

    def _look(self) -> None:
        """Looks at what is open now."""
