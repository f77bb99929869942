"""Question `convergence_stages`: what do delayed updates cost, where a pipeline's schedule has no flush?

    python -m benchmarks.convergence_stages [--stages 2,4] [--seeds 3] [--steps 240] [--quick]
    python -m benchmarks.convergence_stages --picture        only draws the picture again, from the record

The training of `convergence` (a GPT of 1.1M parameters, untied, on the bytes of Python's standard library) in 2 and 4
stages, with each schedule the same global batches: 1f1b, which is exact; 2bw; pipedream, with and without vertical
sync, whose step is one microbatch, here the whole batch. The validation loss on the way and at the end, against that of
1f1b with the same seed. Writes results/convergence-stages.json and docs/convergence-stages.png; with --quick into a
temporary directory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.convergence import DOCS, MODEL, QUICK, Setting, idle
from benchmarks.convergence_page import mean_and_spread
from benchmarks.processes import ProcessGroup
from shoal import Engine, Plan
from shoal.data import open_text
from shoal.launch import join
from shoal.models.gpt import GPT
from shoal.models.losses import causal_lm
from shoal.optim.lr import cosine
from shoal.plan import Option

REFERENCE = "1f1b"


@dataclass(frozen=True)
class Row:
    """A schedule, and how many microbatches a step of it has."""

    schedule: Option
    microbatches: int


ROWS = {
    "1f1b": Row("1f1b", 4),
    "2bw": Row("2bw", 4),
    "pipedream": Row("pipedream", 1),
    "pipedream, vertical sync": Row({"name": "pipedream", "vertical_sync": True}, 1),
}


def train(setting: Setting, row: Row, seed: int) -> tuple[list[tuple[int, float]], float]:
    """One training, this rank one stage: (step, validation loss in nats a byte over a fourth of the `evaluated`
    batches) eleven times on the way, and the loss over all of them at the end."""
    world = join()
    text = open_text("stdlib", tokenizer="bytes", sequence=setting.model.sequence)
    assert text.validation is not None
    engine = Engine(
        partial(GPT, replace(setting.model, tied=False)),
        causal_lm,
        partial(torch.optim.AdamW, lr=setting.lr, fused=True),
        Plan(pp=world.size, schedule=row.schedule),
        global_batch=setting.global_batch,
        microbatch=setting.global_batch // row.microbatches,
        seed=seed,
        clip=setting.clip,
        schedule=cosine(setting.steps, warmup=setting.steps // 10),
        world=world,
    )
    curve, every = [], setting.steps // 12
    for batch in engine.batches(text.train, steps=setting.steps):
        engine.step(batch)
        done = batch.step + 1
        if done % every == 0 and done < setting.steps:
            curve.append((done, engine.evaluate(text.validation, max_batches=max(1, setting.evaluated // 4)).loss))
    final = engine.evaluate(text.validation, max_batches=setting.evaluated).loss
    engine.close()
    return curve, final


def run(stages: int, seeds: int, setting: Setting) -> list[dict[str, Any]]:
    """Every schedule in so many stages."""
    results = []
    for name, row in ROWS.items():
        started = time.perf_counter()
        with ProcessGroup(idle, {}, size=stages, warm_up=0) as group:
            curves, finals = zip(
                *(group.call(partial(train, setting, row, seed))[0] for seed in range(seeds)), strict=True
            )
        seconds = time.perf_counter() - started
        results.append(
            {"stages": stages, "name": name, **asdict(row), "curves": curves, "finals": finals, "seconds": seconds}
        )
        shown = " ".join(f"{loss:.4f}" for loss in finals)
        print(f"{stages} stages, {name}: {shown}  ({seconds:.0f} s)", flush=True)
    return results


def differences(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """The last losses of `row` less those of 1f1b in as many stages, seed by seed."""
    exact = next(each for each in rows if each["name"] == REFERENCE and each["stages"] == row["stages"])
    return [own - other for own, other in zip(row["finals"], exact["finals"], strict=True)]


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The last losses."""
    found = Table(title="validation loss at the end, nats a byte", title_justify="left")
    for column in ("stages", "schedule", "loss", "against 1f1b (min..max)"):
        found.add_column(column)
    for row in rows:
        loss = f"{statistics.fmean(row['finals']):.4f}"
        apart = "-" if row["name"] == REFERENCE else mean_and_spread(differences(row, rows))
        found.add_row(str(row["stages"]), row["name"], loss, apart)
    return found


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The validation loss on the way, mean over seeds: a panel for each number of stages, a curve a schedule."""
    from matplotlib.figure import Figure

    numbers = sorted({row["stages"] for row in rows})
    figure = Figure(figsize=(4.5 * len(numbers), 3.6), layout="constrained")
    panels = figure.subplots(1, len(numbers), sharey=True, squeeze=False)[0]
    for axes, number in zip(panels, numbers, strict=True):
        for row, style in zip(
            (row for row in rows if row["stages"] == number), itertools.cycle(["-", "--", "-.", ":"]), strict=False
        ):
            steps = [step for step, _ in row["curves"][0]]
            means = [statistics.fmean(loss for _, loss in points) for points in zip(*row["curves"], strict=True)]
            axes.plot(steps, means, style, label=row["name"])
        axes.set_title(f"{number} stages")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("validation loss, nats a byte")
    panels[-1].legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=harness.several(["2", "4"]), default=["2", "4"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=Setting().steps)
    parser.add_argument("--picture", action="store_true", help="no training: draw the picture from the record")
    arguments = harness.parse(parser, "one seed, 24 steps of a tiny model, written elsewhere", seeds=1)
    docs = DOCS
    if arguments.quick:
        harness.RESULTS = docs = Path(tempfile.mkdtemp(prefix="convergence-"))
    path = harness.RESULTS / "convergence-stages.json"
    if not arguments.picture:
        setting = (
            replace(QUICK, model=replace(QUICK.model, layers=MODEL.layers))
            if arguments.quick
            else Setting(steps=arguments.steps)
        )
        rows = [row for stages in arguments.stages for row in run(int(stages), arguments.seeds, setting)]
        path = harness.write_record("convergence-stages", vars(arguments), {"setting": asdict(setting), "rows": rows})
    rows = json.loads(path.read_text())["results"]["rows"]
    Console(width=120).print(table(rows))
    plot(rows, docs / "convergence-stages.png")
    print(f"record: {path}\npicture: {docs / 'convergence-stages.png'}")


if __name__ == "__main__":
    main()
