"""Question `convergence`: how good is the model at the end, with each way in which replicas agree?

    python -m benchmarks.convergence [--replicas 2] [--only bytegrad,diloco] [--seeds 3] [--steps 240] [--quick]
    python -m benchmarks.convergence --page                  only writes the page again, from the record

A GPT of 1.1M parameters on the bytes of Python's standard library, the same global batches for everybody; the
validation loss of the replicas' mean against that of exact all-reduce with the same seed. Ranks are processes of one
thread. Writes results/convergence.json, docs/convergence.md and docs/convergence.png; with --quick into a temporary
directory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import convergence_page, harness
from benchmarks.processes import ProcessGroup, Step
from shoal import Engine, Plan
from shoal.data import open_text
from shoal.launch import join
from shoal.models.gpt import GPT, GPTConfig
from shoal.models.losses import causal_lm
from shoal.models.presets import PRESETS
from shoal.optim.lr import cosine
from shoal.plan import Option

DOCS = Path(__file__).parent.parent / "docs"
MODEL = replace(PRESETS["1m"], sequence=128)


@dataclass(frozen=True)
class Setting:
    """One training: `steps` steps of `global_batch` rows of `model.sequence` bytes, then the loss over `evaluated`
    batches."""

    model: GPTConfig = MODEL
    steps: int = 240
    global_batch: int = 8
    evaluated: int = 64
    lr: float = 1e-3
    clip: float = 1.0


QUICK = Setting(model=replace(MODEL, layers=1, d_model=32, sequence=32), steps=24, evaluated=1)


def exchanges(replicas: int, steps: int) -> dict[str, Option]:
    """By the name of its row: each algorithm with parameters for a run of `steps` steps. Islands need two islands of
    two."""
    fifth = max(1, steps // 5)
    rows: dict[str, Option] = {
        "allreduce": "allreduce",
        "hierarchical": {"name": "hierarchical", "codec": "fp16", "ranks_per_host": replicas // 2},
        "fp16": "fp16",
        "bf16": "bf16",
        "bytegrad": "bytegrad",
        "bytegrad-u4": {"name": "bytegrad", "codec": "u4", "error_feedback": True},
        "bytegrad-sign": {"name": "bytegrad", "codec": "sign", "error_feedback": True},
        "powersgd": {"name": "powersgd", "rank": 4},
        "topk": {"name": "topk", "ratio": 0.01},
        "adasum": "adasum",
        "delayed": {"name": "delayed", "delay": 1},
        "qadam": {"name": "qadam", "warmup": fifth},
        "onebit_adam": {"name": "onebit_adam", "warmup": fifth},
        "decentralized": {"name": "decentralized", "peers": "shift_one"},
        "low_precision_decentralized": "low_precision_decentralized",
        "async_average": {"name": "async_average", "interval_ms": 500.0},
        "local_sgd": {"name": "local_sgd", "every": 8},
        "post_local_sgd": {"name": "post_local_sgd", "every": 8, "start": fifth},
        "diloco": {"name": "diloco", "every": 20},
        # Chunks of 1 MiB: a model of 4.4 MB would else be a single fragment.
        "streaming_diloco": {
            "name": "streaming_diloco",
            "every": 20,
            "fragments": 4,
            "overlap": 2,
            "chunk_bytes": 2**20,
        },
        "islands": {"name": "islands", "ranks": 2, "inside": "allreduce", "across": {"name": "diloco", "every": 20}},
        "none": "none",
    }
    return rows if replicas >= 4 else {name: exchange for name, exchange in rows.items() if name != "islands"}


def train(setting: Setting, exchange: Option, seed: int) -> float:
    """One training on this rank; returns the validation loss in nats a byte, the same on every rank."""
    world = join()
    text = open_text("stdlib", tokenizer="bytes", sequence=setting.model.sequence)
    assert text.validation is not None
    engine = Engine(
        partial(GPT, setting.model),
        causal_lm,
        partial(torch.optim.AdamW, lr=setting.lr, fused=True),
        Plan(dp=world.size, exchange=exchange),
        global_batch=setting.global_batch,
        seed=seed,
        clip=setting.clip,
        schedule=cosine(setting.steps, warmup=setting.steps // 10),
        world=world,
    )
    for batch in engine.batches(text.train, steps=setting.steps):
        engine.step(batch)
    loss = engine.evaluate(text.validation, max_batches=setting.evaluated).loss
    engine.close()
    return loss


def idle() -> Step:
    """What the processes are built with: they are there to be called."""
    return lambda: None


def run(replicas: int, names: Sequence[str] | None, seeds: int, setting: Setting) -> list[dict[str, Any]]:
    """Every row of one number of replicas. Each has processes of its own, so that one that fails does not end the
    others."""
    results = []
    for name, exchange in exchanges(replicas, setting.steps).items():
        if names is not None and name not in names:
            continue
        started, losses, error = time.perf_counter(), [], None
        try:
            with ProcessGroup(idle, {}, size=replicas, warm_up=0) as group:
                for seed in range(seeds):
                    losses.append(group.call(partial(train, setting, exchange, seed))[0])
        except RuntimeError as failure:
            error = str(failure).strip().splitlines()[-1]
        seconds = time.perf_counter() - started
        results.append(
            {
                "replicas": replicas,
                "name": name,
                "exchange": exchange,
                "losses": losses,
                "seconds": seconds,
                "error": error,
            }
        )
        shown = error or " ".join(f"{loss:.4f}" for loss in losses)
        print(f"{replicas} replicas, {name}: {shown}  ({seconds:.0f} s)", flush=True)
    return results


def main() -> None:
    arguments = _arguments()
    docs = DOCS
    if arguments.quick:
        harness.RESULTS = docs = Path(tempfile.mkdtemp(prefix="convergence-"))
    path = harness.RESULTS / "convergence.json"
    if not arguments.page:
        setting = QUICK if arguments.quick else replace(Setting(), steps=arguments.steps)
        rows = [
            row
            for replicas in arguments.replicas
            for row in run(int(replicas), arguments.only, arguments.seeds, setting)
        ]
        path = harness.write_record("convergence", vars(arguments), {"setting": asdict(setting), "rows": rows})
    record = json.loads(path.read_text())
    convergence_page.plot(record, docs / "convergence.png")
    page = docs / "convergence.md"
    page.write_text(convergence_page.markdown(record))
    print(f"record: {path}\npage: {page}")


def _arguments() -> argparse.Namespace:
    known = list(exchanges(4, 1))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence", description="The final loss with each exchange."
    )
    parser.add_argument(
        "--replicas", type=harness.several(["2", "4"]), default=["2"], help="numbers of ranks, of 2,4 (2)"
    )
    parser.add_argument("--only", type=harness.several(known), help=f"rows, of {','.join(known)}")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each row (3)")
    parser.add_argument("--steps", type=int, default=Setting().steps, help="steps of a training (240)")
    parser.add_argument("--page", action="store_true", help="no training: write the page from the record")
    return harness.parse(parser, "one seed, 24 steps of a tiny model, written elsewhere", seeds=1)


if __name__ == "__main__":
    main()
