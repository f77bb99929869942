"""How long the planner takes for large models on clusters that are not here, and what it predicts of published rows.

    python -m benchmarks.planner

Seconds are CPU seconds of this process: of the traces, once a model, and of each search. Nothing is trained. The
published rows stand in `planner_published`, each with its source.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks import planner_published as published
from shoal.models import build
from shoal.plan import Plan
from shoal.planner import SHALLOW, Subject
from shoal.planner.ask import legal_degrees
from shoal.planner.cluster_file import cluster_of
from shoal.planner.degrees import ways
from shoal.planner.machines import BETWEEN, MACHINES
from shoal.planner.profile import Profile, deepened, profile
from shoal.planner.search import search
from shoal.planner.task import Task
from shoal.precision import precision

LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama-70b": (
        {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
        80,
        8192,
    ),
    "deepseek-v3": ({"model_type": "deepseek_v3"}, 61, 4096),
}
"""The configuration of each model in the terms of transformers, its blocks, and tokens of a row."""
ASKED = (
    ("llama-70b", "h100x16", 64),
    ("llama-70b", "h100x1024", 1024),
    ("llama-70b", "h100x16384", 4096),
    ("deepseek-v3", "h100x2048", 4096),
)
"""Model, machine, rows of a global batch."""


def traced(name: str) -> tuple[Profile, dict[str, Any]]:
    """The profile of a model, from one with few blocks, and its settings. DeepSeek-V3 begins with three dense blocks,
    so its fourth stands for the rest."""
    config, blocks, tokens = MODELS[name]
    model = build({"name": "hf", "config": config, "num_hidden_layers": SHALLOW})
    row = {key: torch.zeros(tokens, dtype=torch.int64) for key in ("input_ids", "labels")}
    subject = Subject(model.factory, model.loss, row, 1, precision("bf16"), Plan())
    return deepened(profile(subject, ways({}, 2)), blocks, SHALLOW - 1), model.values


def task_of(name: str, machine: str, rows: int, found: tuple[Profile, dict[str, Any]]) -> Task:
    """What is asked; `found`: what `traced` returned."""
    cluster = cluster_of(machine, MACHINES, BETWEEN)
    legal = legal_degrees(found[1], found[0], MODELS[name][2], cluster.per_host)
    return Task(found[0], cluster, rows, published.ADAMW, legal=legal)


def asked(name: str, machine: str, rows: int, found: tuple[Profile, dict[str, Any]]) -> dict[str, Any]:
    """Searches, and returns what was found."""
    task = task_of(name, machine, rows, found)
    began = time.process_time()
    answer = search(task)
    seconds = time.process_time() - began
    best = answer.best[0]
    return {
        "model": name,
        "machine": machine,
        "rows": rows,
        "parameters": found[0].parameters,
        "search_seconds": seconds,
        "priced": answer.priced,
        "degrees": answer.spreads,
        "left_out": answer.bounded,
        "plan": best.choice.plan({}).to_dict(),
        "microbatch": best.choice.microbatch,
        "step_seconds": best.seconds,
        "terms": dict(best.terms),
        "gib": best.bytes / 2**30,
    }


def predicted() -> list[dict[str, Any]]:
    """What is predicted of the published rows."""
    profiles = {name: published.traced(model, published.ways_of(name)) for name, model in published.MODELS.items()}
    rows = []
    for row in published.ROWS:
        estimate, rate = published.estimated(row, profiles[row.model])
        rows.append(
            {
                "row": row.name,
                "source": row.source,
                "plan": row.choice.plan({}).to_dict(),
                "microbatch": row.choice.microbatch,
                "published_tokens": row.rate,
                "predicted_tokens": rate,
                "error": row.rate / rate - 1,
                "published_gib": row.gib,
                "predicted_gib": estimate.bytes / 2**30,
            }
        )
    return rows


def mean_errors(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean absolute errors of the predicted seconds, by source and device, and together; of memory, where published."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for key in (f"{row['source']} {row['row'].split()[-1]}", "together"):
            found.setdefault(key, []).append(abs(row["error"]))
        if row["published_gib"]:
            found.setdefault("memory", []).append(abs(row["predicted_gib"] / row["published_gib"] - 1))
    return {key: math.fsum(errors) / len(errors) for key, errors in found.items()}


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__).parse_args()
    profiles, traces = {}, {}
    for name in MODELS:
        began = time.process_time()
        profiles[name] = traced(name)
        traces[name] = time.process_time() - began
    solved = [asked(*each, profiles[each[0]]) for each in ASKED]
    rows = predicted()
    table = Table(title="solved", box=None)
    for heading in ("model", "machine", "trace, s", "search, s", "plan", "step, s"):
        table.add_column(heading)
    for row in solved:
        times = f"{traces[row['model']]:.1f}", f"{row['search_seconds']:.1f}"
        table.add_row(row["model"], row["machine"], *times, str(row["plan"]), f"{row['step_seconds']:.3g}")
    console = Console(width=200)
    console.print(table)
    table = Table(title="published", box=None)
    for heading in ("row", "microbatch", "recompute", "published", "predicted", "error", "GiB", "predicted"):
        table.add_column(heading)
    for row in rows:
        memory = [f"{row['published_gib']:.1f}" if row["published_gib"] else "", f"{row['predicted_gib']:.1f}"]
        rates = f"{row['published_tokens']:.0f}", f"{row['predicted_tokens']:.0f}", f"{row['error']:+.1%}"
        table.add_row(row["row"], str(row["microbatch"]), row["plan"].get("recompute", "none"), *rates, *memory)
    console.print(table)
    errors = mean_errors(rows)
    for what, error in errors.items():
        console.print(f"mean error, {what}: {error:.1%}")
    results = {"trace_seconds": traces, "solved": solved, "published": rows, "mean_errors": errors}
    record = harness.write_record("planner", {}, results, ["transformers"])
    print(f"record: {record.relative_to(record.parents[2])}")


if __name__ == "__main__":
    main()
