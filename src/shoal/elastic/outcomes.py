"""How the ranks of a node have left their generation, by what is known of each."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shoal.elastic.control import Left, as_told
from shoal.elastic.events import FOR_GOOD, NOW, UNABLE
from shoal.elastic.watchdog import Hang
from shoal.errors import LaunchError
from shoal.launch.store import rank_list
from shoal.launch.verdict import Ending, verdict


def outcome_of(
    endings: list[Ending], left: Sequence[Left], hang: Hang | None, how: str | None, asked: bool, ranks: int
) -> tuple[str, int, str]:
    """Returns outcome, exit code and message (see events.Ended) of a generation of so many `ranks`.

    endings: of the processes that ended in it; left: how the others left it. hang: of ranks there. how: they were told
    to leave, None if they were not; asked: they left because of it.
    """
    said, code = verdict(endings, ranks)
    at_fault = [each for each in endings if each.failed and not (each.failure and each.failure.lost_peer)]
    if hang is not None and hang.here:
        return "killed" if hang.stopped else "failed", LaunchError.exit_code, hang.text
    if at_fault:
        print(said, file=sys.stderr, flush=True)
        first = at_fault[0].failure
        text = first.message if first is not None else said.partition("\n")[0].removeprefix("error: ")
        killed = all(each.failure is None and each.returncode < 0 for each in at_fault)
        return "killed" if killed else "failed", code or LaunchError.exit_code, text
    early = [each.rank for each in endings if not each.failed and not each.stopped]
    if early and left and not asked:
        text = f"rank {rank_list(early)} ended with exit code 0 while others were at work"
        return "killed", LaunchError.exit_code, text
    if any(each.failed for each in endings) or how == NOW or (left and not asked):
        if hang is not None:
            return "killed", LaunchError.exit_code, hang.text
        return "lost", 0, "its ranks lost others"
    if unable := next((each.unable for each in left if each.unable), ""):
        return UNABLE, 0, unable
    return ("stopped" if left or how in FOR_GOOD else "finished"), *as_told(left)
