"""Questions to a store whose server may have stopped: it then answers nothing, and ends nothing, for minutes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress


def ask(question: Callable[[], object], seconds: float) -> bool:
    """Calls `question` in a thread of its own, and returns whether it has returned within so many seconds. One that the
    store refuses by a RuntimeError, because its server is gone, counts as answered."""

    def asked() -> None:
        with suppress(RuntimeError):
            question()

    thread = threading.Thread(target=asked, name="shoal-store", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
