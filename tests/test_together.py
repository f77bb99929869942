"""What goes together: the table in docs/parallel.md is what engines say when they are made so."""

from __future__ import annotations

import copy
import os
import re
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from shoal import Engine, Plan
from shoal.errors import UserError
from shoal.exchange.named import ALGORITHMS
from shoal.models import GPT, GPTConfig, MoEConfig, causal_lm
from tests.pool import run_ranks

PAGE = Path(__file__).parents[1] / "docs" / "parallel.md"
BEGIN, END = "<!-- what goes together: written by tests/test_together.py -->", "<!-- end -->"
COLUMNS: dict[str, dict[str, Any]] = {
    "tp": {"dp": 2, "tp": 2},
    "cp": {"dp": 2, "cp": 2},
    "ep": {"dp": 2, "ep": 2},
    "pp": {"dp": 2, "pp": 2},
    "zero = 1": {"dp": 2, "zero": 1},
    "zero = 2": {"dp": 2, "zero": 2},
    "zero = 3": {"dp": 2, "zero": 3},
    "memory": {"dp": 2, "memory": {}},
}
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f'exchange = "{name}"': ({"exchange": name}, {}) for name in ALGORITHMS},
    'recompute = "full"': ({"recompute": "full"}, {}),
    'recompute = "selective"': ({"recompute": "selective"}, {}),
    "compile": ({"compile": "aot_eager"}, {}),
    "zero = 3": ({"zero": 3}, {}),
    "memory": ({"memory": {}}, {}),
    "clip_value": ({}, {"clip_value": 1.0}),
    "precision bf16": ({}, {"precision": "bf16"}),
    "precision bf16, masters by Kahan": ({}, {"precision": {"name": "bf16", "master": "kahan"}}),
    "an optimizer of whole matrices (Adafactor)": ({}, {"optimizer": partial(torch.optim.Adafactor, lr=1e-2)}),
    "sync_bn": ({}, {"sync_bn": True, "microbatch": None}),
}


def model() -> GPT:
    moe = MoEConfig(2, balance_loss=0.0)
    return GPT(GPTConfig(vocab_size=16, sequence=8, layers=2, d_model=16, heads=4, moe=moe))


def tried(world) -> dict[str, dict[str, str]]:
    """By row and column of as many ranks: nothing, or why not. Each engine takes a copy of one model, which costs most
    to make."""
    made = model()
    found: dict[str, dict[str, str]] = {row: {} for row in ROWS}
    columns = {column: base for column, base in COLUMNS.items() if Plan(**base).size == world.size}
    for (row, (plan, more)), (column, base) in product(ROWS.items(), columns.items()):
        options = {"optimizer": partial(torch.optim.AdamW, lr=1e-3), "global_batch": 8, "microbatch": 1, **more}
        try:
            Engine(copy.deepcopy(made), causal_lm, plan=Plan(**{**base, **plan}), world=world, **options).close()
            found[row][column] = ""
        except UserError as error:
            found[row][column] = str(error)
    return found


def table(found: dict[str, dict[str, str]]) -> str:
    reasons: dict[str, int] = {}
    lines = ["| | " + " | ".join(f"`{column}`" for column in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row, cells in found.items():
        marks = []
        for why in map(cells.__getitem__, COLUMNS):
            if why:
                why = re.sub(r"^plan\.exchange = \"\w+\" (does not go with [^:]+: )?", "", why)
                reasons.setdefault(why, len(reasons) + 1)
            marks.append(f"no ({reasons[why]})" if why else "yes")
        lines.append(f"| {row} | " + " | ".join(marks) + " |")
    return "\n".join([*lines, "", *(f"{number}. {why}" for why, number in reasons.items())])


def test_the_table_in_the_docs_is_what_engines_say():
    """SHOAL_WRITE_DOCS=1 writes it."""
    found: dict[str, dict[str, str]] = {row: {} for row in ROWS}
    for size in sorted({Plan(**base).size for base in COLUMNS.values()}):
        answers = run_ranks(tried, size)
        assert all(answer == answers[0] for answer in answers), "ranks refuse alike"
        for row, cells in answers[0].items():
            found[row] |= cells
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    now, after = rest.split(END)
    if os.environ.get("SHOAL_WRITE_DOCS"):
        PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}")
        return
    assert now.strip() == table(found)
