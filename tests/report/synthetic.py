"""A realistic run on two ranks, written the way a job writes it."""

from __future__ import annotations

import math
import random
from pathlib import Path

from shoal.report.jsonl import JsonLog
from shoal.report.metrics import (
    CheckpointRecord,
    EndRecord,
    EvalRecord,
    MetricsLog,
    RunRecord,
    SampleRecord,
    StepRecord,
    WarningRecord,
)
from shoal.report.timeline import Span

BEGAN = 1_800_000_000.0
SECONDS_PER_STEP = 0.11
TOKENS_PER_STEP = 4096


def run_record() -> RunRecord:
    config = {
        "model.preset": ("gpt-1m", "file"),
        "model.d_model": (128, "default"),
        "model.layers": (4, "default"),
        "model.heads": (4, "default"),
        "data.corpus": ("stdlib", "file"),
        "data.tokenizer": ("bytes", "default"),
        "data.sequence": (256, "file"),
        "train.steps": (400, "cli"),
        "train.global_batch": (16, "file"),
        "train.microbatch": (8, "planner"),
        "train.precision": ("fp32", "default"),
        "train.clip": (1.0, "default"),
        "train.lr": (0.003, "file"),
        "train.schedule": ("cosine", "default"),
        "train.seed": (0, "default"),
        "plan.dp": (2, "planner"),
        "plan.zero": (0, "default"),
        "plan.exchange": ("allreduce", "default"),
        "checkpoint.every": (100, "default"),
        "trackers": (["tensorboard"], "default"),
    }
    return RunRecord(
        host="laptop",
        device="cpu, 1 thread a rank",
        world=2,
        versions={"shoal": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.9"},
        parameters=1_060_000,
        peak_flops=1.9e11,
        config={key: {"value": value, "origin": origin} for key, (value, origin) in config.items()},
    )


def step_record(step: int, total: int = 400) -> StepRecord:
    noise = random.Random(step)
    seconds = SECONDS_PER_STEP * (
        1 + 0.08 * noise.random() + (4 if step == 1 else 0) + (0.7 if noise.random() < 0.02 else 0)
    )
    return StepRecord(
        step=step,
        epoch=step // 300,
        loss=1.9 + 3.65 * math.exp(-step / 70) + 0.08 * noise.gauss(0, 1),
        grad_norm=0.5 + 2.5 * math.exp(-step / 40) + 0.12 * abs(noise.gauss(0, 1)),
        lr=0.003 * min(step / 40, 0.5 * (1 + math.cos(math.pi * step / total))),
        tokens=TOKENS_PER_STEP,
        seconds=seconds,
        tokens_per_second=TOKENS_PER_STEP / seconds,
        mfu=6 * 1_060_000 * TOKENS_PER_STEP / seconds / 1.9e11 * 0.5,
        memory_bytes=int((410 + 60 * (1 - math.exp(-step / 20))) * 2**20),
        time=BEGAN + step * SECONDS_PER_STEP * 1.1,
    )


def step_spans(step: int, ranks: int = 2, microbatches: int = 2, chunks: int = 3) -> list[Span]:
    """Forward and backward of each microbatch; chunks are reduced beside the last backward, the last one after it."""
    spans = []
    for rank in range(ranks):
        clock = BEGAN + step * SECONDS_PER_STEP * 1.1 + 0.0008 * rank
        last_backward = clock
        for microbatch in range(microbatches):
            for name, seconds in (("forward", 0.015), ("backward", 0.031)):
                seconds *= 1 + 0.05 * random.Random(f"{step} {rank} {microbatch} {name}").random()
                last_backward = clock
                name = f"{name} {microbatch}"
                spans.append(Span(step=step, rank=rank, lane="compute", name=name, start=clock, seconds=seconds))
                clock += seconds
        for chunk in range(chunks):
            start = last_backward + 0.0105 * (chunk + 1)
            spans.append(
                Span(
                    step=step,
                    rank=rank,
                    lane="comm",
                    name=f"chunk {chunk}",
                    start=start,
                    seconds=0.0068,
                    bytes=1_413_000,
                )
            )
        clock = max(clock, start + 0.0068)
        spans.append(Span(step=step, rank=rank, lane="compute", name="optimizer", start=clock, seconds=0.0042))
    return spans


def write_run(run_dir: Path, steps: int = 400, ended: bool = True) -> Path:
    """Writes metrics.jsonl and timeline.jsonl of a run of `steps` steps, and returns `run_dir`."""
    log = MetricsLog(run_dir / "metrics.jsonl")
    timeline = JsonLog(run_dir / "timeline.jsonl")
    log.write(run_record())
    log.write(EvalRecord(step=0, loss=5.551, tokens=65_536))
    for step in range(1, steps + 1):
        log.write(step_record(step))
        if step in (10, 11, 12):
            timeline.write(step_spans(step))
        if step % 50 == 0:
            log.write(EvalRecord(step=step, loss=1.98 + 3.57 * math.exp(-step / 70), tokens=65_536))
        if step % 100 == 0:
            log.write(CheckpointRecord(step=step, path=f"checkpoints/step-{step:08d}", seconds=0.021))
        if step % 200 == 0:
            log.write(SampleRecord(step=step, prompt="def main", text=SAMPLE_TEXT))
    log.write(
        WarningRecord(message="tracker wandb failed in log() and is switched off; training goes on (OSError: no route)")
    )
    if ended:
        log.write(EndRecord(reason="All 400 steps are done.", seconds=52.3))
    log.close()
    timeline.close()
    return run_dir


SAMPLE_TEXT = '''(self, path, default=None):
    """Return the <b>value</b> & close the file."""
    if not isinstance(path, (str, bytes)):
        raise TypeError("expected str, got %r" % type(path))
    <script>alert("not run")</script>
    return self._read(path, default)
'''
