"""The table of models and plans: `outcomes.json`, and `docs/models.md` that is printed from it.

`python -m tests.zoo.page` runs every row and writes both; with names of models, those rows only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.pool import end_ranks
from tests.zoo.runs import GLOBAL_BATCH, MICROBATCH, PLANS, STEPS, TOLERANCE, ZOO, outcome, share

OUTCOMES = Path(__file__).with_name("outcomes.json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
_REFUSED = "refused: "
SHARE = "cut by `tp 2`"
"""The column of the share of parameters of which a rank has a part."""


def expected() -> dict[str, dict[str, str]]:
    """What each row gave when the page was written: "equal", or "refused: " and the message."""
    return json.loads(OUTCOMES.read_text(encoding="utf-8"))


def printed(outcomes: dict[str, dict[str, str]]) -> str:
    """The page."""
    reasons: dict[str, int] = {}
    lines = []
    for name in ZOO:
        cells = [_cell(outcomes[name][column], reasons) for column in PLANS]
        lines.append(f"| {name} | {' | '.join(cells)} | {outcomes[name][SHARE]} |")
    notes = [f"{number}. {_escaped(reason)}" for reason, number in reasons.items()]
    head = f"| model | {' | '.join(f'`{column}`' for column in PLANS)} | {SHARE} |\n|---|{'---|' * len(PLANS)}---|"
    return "\n".join([_introduction(), head, *lines, "", "## Refused because", "", *notes, ""])


def _cell(what: str, reasons: dict[str, int]) -> str:
    if not what.startswith(_REFUSED):
        return what
    reason = what.removeprefix(_REFUSED)
    return f"refused [{reasons.setdefault(reason, len(reasons) + 1)}](#refused-because)"


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", r"\*")


def _introduction() -> str:
    bounds = {dtype: f"{loss:g}" for dtype, (loss, _) in TOLERANCE.items()}
    return (
        "# Models\n\n"
        "Models that nobody wrote for Shoal, as their users build them, under five plans on two ranks. "
        f"**equal**: the losses of {STEPS} steps (global batches of {GLOBAL_BATCH}, {GLOBAL_BATCH} and 4 samples, "
        "microbatches of "
        f"{MICROBATCH}) and every trained weight after them equal those of a loop by hand in plain torch, to "
        f"{bounds['fp64']} in fp64 "
        f"(to {bounds['fp32']} in fp32 for mixtures of experts, whose grouped products have no fp64). **refused**: the "
        "engine says so, the "
        "same on all ranks, when it is made or at the first step.\n\n"
        "`python -m tests.zoo.page` runs the rows and prints this page; `make test` runs a part of them, `make matrix` "
        "all. "
        "Under `tp 2` layers of models without rules are cut as their own graph says "
        "([parallel.md](parallel.md#a-model-without-rules)); the last column says of which share of the parameters "
        "a rank then has a part. What is not cut stays whole on every rank, and the table of layers says why.\n"
    )


def main(names: list[str]) -> None:
    outcomes = expected() if names else {}
    for name in names or ZOO:
        outcomes[name] = {SHARE: share(name)}
        for column in PLANS:
            outcomes[name][column] = outcome(name, column)
            print(f"{name}, {column}: {outcomes[name][column]}", flush=True)
    wrong = [name for name, row in outcomes.items() if any(what.startswith("WRONG") for what in row.values())]
    if wrong:
        sys.exit(f"not written: wrong numbers of {', '.join(wrong)}")
    ordered = {name: outcomes[name] for name in ZOO}
    OUTCOMES.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(printed(ordered), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        end_ranks()
