"""Which side of a cut network goes on: at most one, whoever coordinates there."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def outnumbered(members: Collection[str], gone: Mapping[str, bool], took_over: bool) -> str:
    """Says why this side must not go on, or "".

    members: those of the last generation.
    gone: those of them that are not on this side, and whether they are proven to have ended. The others may live.
    took_over: a coordinator took over here. It needs more than half of those that may live: the one before goes on with
        half, and another standby may have taken over as well.
    """
    silent = [name for name, proven in gone.items() if not proven]
    alive = len(members) - len(gone)
    if not silent or alive > len(silent) or (alive == len(silent) and not took_over):
        return ""
    what = "no more than half" if took_over else "less than half"
    return f"{', '.join(silent)} may live behind a cut link, and {what} of the members are on this side"
