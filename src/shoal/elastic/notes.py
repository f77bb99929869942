"""What has happened to members, in words."""

from __future__ import annotations

MOST = 20
"""Lines that the next generation is told."""


class Notes:
    """Lines for the log, and those that the next generation is told."""

    def __init__(self) -> None:
        self._history, self._said = list[str](), list[str]()

    def add(self, text: str) -> None:
        """Takes in a line; nothing where it is ""."""
        if text:
            self._history.append(text)
            self._said.append(text)

    def said(self) -> list[str]:
        """Returns what is new for the log."""
        said, self._said = self._said, []
        return said

    def history(self) -> tuple[str, ...]:
        """Returns what has happened since the last generation was told."""
        history, self._history = tuple(self._history[-MOST:]), []
        return history

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Notes) and vars(self) == vars(other)
