"""Members that fail again and again, or are much slower than others, are put aside, longer each time."""

from __future__ import annotations


class Backoff:
    """Who is put aside until when.

    failed: at the k-th failure within `window` seconds, from the second on, for min(2^k, `longest`) seconds.
    slow: for min(4 x 2^k, `longest`) seconds; k counts how often a member was slow again within `window` seconds after
        it had come back.
    """

    def __init__(self, window: float, longest: float) -> None:
        self._window, self._longest = window, longest
        self._failures: dict[str, list[float]] = {}
        self._slow: dict[str, int] = {}
        self._failed_until: dict[str, float] = {}
        self._slow_until: dict[str, float] = {}

    def failed(self, name: str, now: float) -> str:
        """Counts a failure; says for how long the member is put aside, or ""."""
        recent = [time for time in self._failures.get(name, []) if time > now - self._window]
        self._failures[name] = [*recent, now]
        times = len(recent) + 1
        if times == 1:
            return ""
        seconds = min(2.0 ** min(times, 30), self._longest)
        self._failed_until[name] = now + seconds
        return f"{name} has failed {times} times and is put aside for {seconds:.0f} s"

    def slow(self, name: str, why: str, now: float) -> str:
        """Puts a member aside that is slow; says for how long."""
        again = name in self._slow and now < self._slow_until[name] + self._window
        self._slow[name] = self._slow[name] + 1 if again else 1
        seconds = min(4 * 2.0 ** min(self._slow[name], 30), self._longest)
        self._slow_until[name] = now + seconds
        return f"{why}: {name} is put aside for {seconds:.0f} s"

    def left(self, name: str, now: float, even_slow: bool = False) -> float:
        """Returns the seconds for which a member is still aside; not above 0 where it is not. even_slow: asks only
        about failures."""
        until = self._failed_until.get(name, now)
        return (until if even_slow else max(until, self._slow_until.get(name, now))) - now

    @property
    def ends(self) -> list[float]:
        """When members come back, or came."""
        return [*self._failed_until.values(), *self._slow_until.values()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Backoff) and vars(self) == vars(other)
