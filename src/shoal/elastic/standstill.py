"""Whether no rank of a generation comes further, on any host.

A rank that waits in a collective may be late as long as another one is not: in an evaluation a rank elsewhere may have
more microbatches, or be slower. So no supervisor can tell alone. Each tells, once a second, while all of its ranks are
late and wait (see watchdog.Watchdog.standstill); where all members of the generation do, nobody is left for whom one
could wait. Then a rank hangs in the code of a collective, or ranks wait for each other in different ones. All are to
leave, and those that hang do not.
"""

from __future__ import annotations

from collections.abc import Collection

STALE, SECONDS = 3.0, 5.0
"""Seconds for which what a member has told holds; for which all have to tell it. The second is the longer one, and both
are shorter than the least time after which a rank is late: so all ranks were late at one moment."""


class Standstill:
    """What members tell of their ranks. All times are of one clock (time.monotonic)."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, float]] = {}
        self._since: float | None = None

    def take(self, name: str, generation: int, now: float) -> None:
        """Takes in that all ranks of a member are late and wait."""
        self._told[name] = generation, now

    def look(self, generation: int, members: Collection[str], now: float) -> bool:
        """Returns whether all `members` of a generation have told it for SECONDS; once, then they have to tell it for
        as long again."""
        known = {name for name, (number, at) in self._told.items() if number == generation and now - at <= STALE}
        if not members or not known.issuperset(members):
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        if now - self._since < SECONDS:
            return False
        self._told, self._since = {}, None
        return True
