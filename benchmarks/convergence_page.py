"""The record of `convergence` as a page of the documentation: a table in markdown and its picture."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REFERENCE = "allreduce"

Row = Mapping[str, Any]


def differences(row: Row, rows: Sequence[Row]) -> list[float]:
    """The row's losses less those of the exact all-reduce among as many replicas, seed by seed; empty where one of the
    two has none."""
    exact = next((other for other in rows if other["name"] == REFERENCE and other["replicas"] == row["replicas"]), None)
    if exact is None or len(exact["losses"]) != len(row["losses"]):
        return []
    return [own - reference for own, reference in zip(row["losses"], exact["losses"], strict=True)]


def markdown(record: Mapping[str, Any]) -> str:
    """The page."""
    setting, rows = record["results"]["setting"], record["results"]["rows"]
    replicas = sorted({row["replicas"] for row in rows})
    head = [f"loss, {count} replicas | against exact (min..max)" for count in replicas]
    lines = [
        "# Convergence",
        "",
        _introduction(record),
        "",
        f"| exchange | parameters | {' | '.join(head)} |",
        f"|{'---|' * (2 + 2 * len(replicas))}",
        *(_line(name, rows, replicas) for name in dict.fromkeys(row["name"] for row in rows)),
        "",
        "![Difference of the final validation loss to exact all-reduce, a dot a seed](convergence.png)",
        "",
        f"All take {setting['steps']} steps of the same samples. Where replicas train alone (`local_sgd`, `diloco`, "
        "...), each updates on its own, "
        "smaller share of a batch. `none` is the mean of replicas that never exchanged: what agreeing is worth. "
        "`async_average` averages by the clock, so its figures depend on the machine.",
        "",
    ]
    return "\n".join(lines)


def _introduction(record: Mapping[str, Any]) -> str:
    setting, machine = record["results"]["setting"], record["machine"]
    model = setting["model"]
    seeds = max(len(row["losses"]) for row in record["results"]["rows"])
    return (
        f"The validation loss (nats a byte) of a GPT ({model['layers']} layers, {model['d_model']} wide) after "
        f"{setting['steps']} steps of "
        f"{setting['global_batch']} rows of {model['sequence']} bytes of Python's standard library, with each way in "
        "which replicas can agree "
        f"([communication.md](communication.md)): mean over {seeds} seeds, and the difference to exact fp32 all-reduce "
        "with the same seed. "
        f"AdamW, lr {setting['lr']:g} with warm-up and cosine, clipping at {setting['clip']:g}.\n\n"
        "Written by `python -m benchmarks.convergence` from `benchmarks/results/convergence.json`: "
        f"{record['date'][:10]}, commit "
        f"{record['commit'].replace(record['commit'][10:40], '')}, torch {record['versions']['torch']}, "
        f"{machine['cpu']}, {machine['cores']} cores."
    )


def _line(name: str, rows: Sequence[Row], replicas: Sequence[int]) -> str:
    own = {row["replicas"]: row for row in rows if row["name"] == name}
    cells = [_cells(own[count], rows) if count in own else "- | -" for count in replicas]
    said = dict.fromkeys(_parameters(row["exchange"]) for row in own.values())
    return f"| `{name}` | {' / '.join(said)} | {' | '.join(cells)} |"


def _parameters(exchange: str | Mapping[str, Any]) -> str:
    """The parameters of a plan's exchange, as JSON without braces."""
    return (
        "" if isinstance(exchange, str) else f"`{json.dumps({k: v for k, v in exchange.items() if k != 'name'})[1:-1]}`"
    )


def _cells(row: Row, rows: Sequence[Row]) -> str:
    if row["error"]:
        return f"failed: {row['error']} | -"
    if not all(math.isfinite(loss) for loss in row["losses"]):
        return "diverged | -"
    loss = f"{statistics.fmean(row['losses']):.4f}"
    apart = differences(row, rows)
    if row["name"] == REFERENCE or not apart:
        return f"{loss} | -"
    return f"{loss} | {mean_and_spread(apart)}"


def mean_and_spread(apart: Sequence[float]) -> str:
    """Of differences, one a seed."""
    return f"{statistics.fmean(apart):+.4f} ({min(apart):+.4f}..{max(apart):+.4f})"


def plot(record: Mapping[str, Any], path: Path) -> None:
    """A row an exchange, a dot a seed, a colour a number of replicas. The axis is linear up to 0.02 and logarithmic
    beyond."""
    from matplotlib.figure import Figure

    rows = [row for row in record["results"]["rows"] if row["name"] != REFERENCE]
    names = list(dict.fromkeys(row["name"] for row in rows))
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    counts = sorted({row["replicas"] for row in rows})
    for place, count in enumerate(counts):
        dots = [
            (apart, names.index(row["name"]) + 0.2 * (place - (len(counts) - 1) / 2))
            for row in rows
            if row["replicas"] == count
            for apart in differences(row, record["results"]["rows"])
            if math.isfinite(apart)
        ]
        axes.plot(
            *zip(*dots, strict=True) if dots else ([], []), "o", markersize=4, alpha=0.8, label=f"{count} replicas"
        )
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_xscale("symlog", linthresh=0.02)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("final validation loss, difference to exact all-reduce in nats a byte (right is worse)")
    axes.legend()
    figure.savefig(path, dpi=150)
