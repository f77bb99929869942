"""How long the planner takes for large models on clusters that are not here, and what it predicts of published rows.

    python -m benchmarks.planner

Seconds are CPU seconds of this process: of the traces, once a model, and of each search. Nothing is trained. The
published rows are those of torchtitan's table of December 2024 that neither compile nor compute in float8
(github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md): H100 of 96 GB at 2.4 TB/s and 500 W.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from shoal.models import build
from shoal.plan import Plan
from shoal.planner import SHALLOW, Subject
from shoal.planner.ask import legal_degrees
from shoal.planner.cluster import Cluster, cluster_of
from shoal.planner.degrees import Spread
from shoal.planner.machines import BETWEEN, MACHINES
from shoal.planner.profile import Profile, deepened, profile
from shoal.planner.search import Search, search
from shoal.planner.task import Choice, Numbers, Task
from shoal.precision import precision

ADAMW = Numbers(torch.bfloat16, 2, 4, 4, 8)
LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama-70b": (
        {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
        80,
        8192,
    ),
    "llama-8b": (
        {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
        32,
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
PUBLISHED = (("h100x8", 16, 5762, 82.4), ("h100x128", 256, 5605, 67.0))
"""Llama-8B under FSDP, two rows a microbatch, selective recompute: devices, rows, tokens a second of a device, GiB."""


def traced(name: str) -> tuple[Profile, dict[str, Any]]:
    """The profile of a model, from one with few blocks, and its settings. DeepSeek-V3 begins with three dense blocks,
    so its fourth stands for the rest."""
    config, blocks, tokens = MODELS[name]
    model = build({"name": "hf", "config": config, "num_hidden_layers": SHALLOW})
    row = {key: torch.zeros(tokens, dtype=torch.int64) for key in ("input_ids", "labels")}
    subject = Subject(model.factory, model.loss, row, 1, precision("bf16"), Plan())
    return deepened(profile(subject), blocks, SHALLOW - 1), model.values


def asked(name: str, machine: str, rows: int, found: tuple[Profile, dict[str, Any]]) -> dict[str, Any]:
    """Searches, and returns what was found."""
    cluster = cluster_of(machine, MACHINES, BETWEEN)
    legal = legal_degrees(found[1], found[0], MODELS[name][2], cluster.per_host)
    task = Task(found[0], cluster, rows, ADAMW, legal=legal)
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


def predicted(found: tuple[Profile, dict[str, Any]]) -> list[dict[str, Any]]:
    """What is predicted of the published rows; the device as published, all else as in `machines`."""
    rows = []
    for machine, batch, tokens, gib in PUBLISHED:
        cluster = of_the_table(cluster_of(machine, MACHINES, BETWEEN))
        asked = Search(Task(found[0], cluster, batch, ADAMW))
        choice = Choice(Spread(copies=cluster.size), 2, 3, None, "selective")
        estimate = asked.simulated(asked.estimate(choice))
        rate = batch * MODELS["llama-8b"][2] / estimate.seconds / cluster.size
        rows.append(
            {
                "devices": cluster.size,
                "published_tokens": tokens,
                "predicted_tokens": rate,
                "error": tokens / rate - 1,
                "published_gib": gib,
                "predicted_gib": estimate.bytes / 2**30,
            }
        )
    return rows


def of_the_table(cluster: Cluster) -> Cluster:
    """The cluster with the memory that the table's devices have."""
    hosts = tuple(
        replace(host, device=replace(host.device, memory=96 * 10**9, bandwidth=2.4e12)) for host in cluster.hosts
    )
    return replace(cluster, hosts=hosts)


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__).parse_args()
    profiles, traces = {}, {}
    for name in MODELS:
        began = time.process_time()
        profiles[name] = traced(name)
        traces[name] = time.process_time() - began
    solved = [asked(*each, profiles[each[0]]) for each in ASKED]
    published = predicted(profiles["llama-8b"])
    table = Table(title="solved", box=None)
    for heading in ("model", "machine", "trace, s", "search, s", "plan", "step, s"):
        table.add_column(heading)
    for row in solved:
        times = f"{traces[row['model']]:.1f}", f"{row['search_seconds']:.1f}"
        table.add_row(row["model"], row["machine"], *times, str(row["plan"]), f"{row['step_seconds']:.3g}")
    console = Console(width=200)
    console.print(table)
    for row in published:
        console.print(row)
    errors = [abs(row["error"]) for row in published]
    results = {
        "trace_seconds": traces,
        "solved": solved,
        "published": published,
        "mean_error": math.fsum(errors) / len(errors),
    }
    record = harness.write_record("planner", {}, results, ["transformers"])
    print(f"record: {record.relative_to(record.parents[2])}")


if __name__ == "__main__":
    main()
