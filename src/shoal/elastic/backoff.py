"""Members that fail again and again are put aside, longer each time."""

from __future__ import annotations


class Backoff:
    """The failures of members within `window` seconds; at the k-th, from the second on, one is put aside for
    min(2^k, `longest`) seconds."""

    def __init__(self, window: float, longest: float) -> None:
        self._window, self._longest = window, longest
        self._failures: dict[str, list[float]] = {}
        self.until: dict[str, float] = {}

    def failed(self, name: str, now: float) -> str:
        """Counts a failure; says for how long the member is put aside, or ""."""
        recent = [time for time in self._failures.get(name, []) if time > now - self._window]
        self._failures[name] = [*recent, now]
        times = len(recent) + 1
        if times == 1:
            return ""
        seconds = min(2.0 ** min(times, 30), self._longest)
        self.until[name] = now + seconds
        return f"{name} has failed {times} times and is put aside for {seconds:.0f} s"

    def left(self, name: str, now: float) -> float:
        """Returns the seconds for which a member is still aside; not above 0 where it is not."""
        return self.until.get(name, now) - now

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Backoff) and vars(self) == vars(other)
