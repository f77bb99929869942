"""Published tokens a second of named plans on A100 and H100, each with its source; only values that were looked up, and
only rows that say all of the plan (devices, microbatch, sharding, recompute) and do not use float8.

MPT: github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md, rows of 2,048 tokens of models from 1B on,
FSDP FULL_SHARD; "True" of activation checkpointing is every block. A100 hosts are said to have 1,600 Gb/s between them.
Llama on A100: github.com/pytorch/torchtitan, docs/performance.md (64 A100 of 80 GB, FSDP2). Llama on H100:
benchmarks/llama3_h100_202412_torchtitan.md (H100 of 96 GB at 2.4 TB/s and 500 W). GPT: Narayanan et al. 2021,
arXiv 2104.04473, table 2, PTD parallelism: tensor parallel in hosts, pipelines, microbatches of one row, all blocks
computed again; its teraFLOP/s are turned into tokens by its own formula (3). NeMo, which is Megatron Core, on DGX H100:
github.com/NVIDIA/dgxc-benchmarking, seconds of a step in bf16 of llama3.1/README_8b.md, _70b and _405b (24.09),
nemotron/README_15b.md and _340b (24.11), nemo_megatron/README_175b.md; what these do not say in the configurations that
they name, of github.com/NVIDIA/NeMo-Framework-Launcher: nothing is computed again, the optimizer's state is divided,
ranks that divide matrices divide tokens between them, and what they and stages send goes on beside products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.models import build
from shoal.plan import Plan
from shoal.planner import SHALLOW, Subject
from shoal.planner.cluster import Cluster, Link
from shoal.planner.cluster_file import cluster_of
from shoal.planner.degrees import Spread
from shoal.planner.machines import BETWEEN, MACHINES
from shoal.planner.profile import Cut, PartProfile, Profile, deepened, profile
from shoal.planner.search import Search
from shoal.planner.task import Choice, Estimate, Numbers, Task
from shoal.precision import precision

ADAMW = Numbers(torch.bfloat16, 2, 4, 4, 8)
"""Weights and products in bf16, masters, gradients and moments in fp32."""
FOUNDRY = "llm-foundry"
TITAN = "torchtitan"
MEGATRON = "arXiv 2104.04473"
NEMO = "NeMo"


@dataclass(frozen=True)
class Model:
    """A `[model]` table without its number of blocks, that number, tokens of a row, and the published parameters."""

    table: dict[str, Any]
    blocks: int
    tokens: int
    parameters: int | None = None


def gpt(blocks: int, width: int, heads: int, parameters: int | None = None, vocabulary: int = 50368) -> Model:
    """A GPT with learned positions, biases and a tied head, as MPT was measured, and Megatron's."""
    table = {"name": "gpt", "d_model": width, "heads": heads, "vocab_size": vocabulary, "sequence": 2048}
    return Model(table, blocks, 2048, parameters)


def llama(blocks: int, width: int, inner: int, heads: int, shared: int, vocabulary: int, tokens: int) -> Model:
    """A Llama of transformers."""
    config = {"model_type": "llama", "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner,
              "num_attention_heads": heads, "num_key_value_heads": shared,
              "max_position_embeddings": tokens}  # fmt: skip
    return Model({"name": "hf", "config": config}, blocks, tokens)


def nemotron(blocks: int, width: int, heads: int) -> Model:
    """A Nemotron of transformers: eight heads of keys, squared ReLU, an MLP four times as wide."""
    config = {"model_type": "nemotron", "vocab_size": 256000, "hidden_size": width, "intermediate_size": 4 * width,
              "num_attention_heads": heads, "num_key_value_heads": 8, "max_position_embeddings": 4096}  # fmt: skip
    return Model({"name": "hf", "config": config}, blocks, 4096)


MODELS = {
    "mpt-1b": gpt(24, 2048, 16, 1315950592),
    "mpt-3b": gpt(32, 2560, 20, 2651837440),
    "mpt-7b": gpt(32, 4096, 32, 6658859008),
    "mpt-13b": gpt(40, 5120, 40, 12853954560),
    "mpt-30b": gpt(48, 7168, 56, 29975214080),
    "mpt-70b": gpt(80, 8192, 64, 64862437376),
    "gpt-175b": gpt(96, 12288, 96, None, 51200),
    "gpt-530b": gpt(105, 20480, 128, None, 51200),
    "llama3-8b": llama(32, 4096, 14336, 32, 8, 128256, 8192),
    "llama3-70b": llama(80, 8192, 28672, 64, 8, 128256, 8192),
    "llama2-13b": llama(40, 5120, 13824, 40, 40, 32000, 4096),
    "llama2-70b": llama(80, 8192, 28672, 64, 8, 32000, 4096),
    "llama3-405b": llama(126, 16384, 53248, 128, 16, 128256, 8192),
    "nemotron-15b": nemotron(32, 6144, 48),
    "nemotron-340b": nemotron(96, 18432, 96),
}


@dataclass(frozen=True)
class Published:
    """A row. `rate`: tokens a second of a device; `gib`: of the fullest device, where published."""

    source: str
    model: str
    machine: str
    devices: int
    rows: int
    choice: Choice
    rate: float
    gib: float | None = None

    @property
    def name(self) -> str:
        """Says the row in short."""
        compiled = self.choice.compile and self.source != NEMO
        return f"{self.model} on {self.devices} {self.machine}{', compiled' * compiled}"


def sharded(source: str, model: str, machine: str, *row: Any, compiled: bool = False) -> Published:
    """A row under FSDP. `row`: devices, rows of a microbatch, microbatches of a device, recompute, tokens a second of a
    device, and GiB."""
    devices, microbatch, number, recompute, rate, *gib = row
    choice = Choice(Spread(copies=devices), microbatch, 3 if devices > 1 else 0, None, recompute, compile=compiled)
    return Published(source, model, machine, devices, devices * microbatch * number, choice, rate, *gib)


def evenly(blocks: int, stages: int) -> tuple[int, ...]:
    """The blocks of stages that have as many; where that does not come out even, the first and the last one less each,
    beside which the embedding and the head count as one."""
    each, left = divmod(blocks + 2 * bool(blocks % stages), stages)
    if left:
        raise ValueError(f"{blocks} blocks in {stages} stages")
    less = [stage in (0, stages - 1) and blocks % stages > 0 for stage in range(stages)]
    return tuple(each - own for own in less)


def piped(model: str, devices: int, rows: int, stages: int, teraflops: float) -> Published:
    """A row of Megatron: `stages` of the pipeline, 8 parts of each matrix in a host, one row a microbatch."""
    tokens, blocks = MODELS[model].tokens, MODELS[model].blocks
    width, vocabulary = MODELS[model].table["d_model"], MODELS[model].table["vocab_size"]
    of_a_token = 96 * blocks * width**2 * (1 + tokens / (6 * width) + vocabulary / (16 * blocks * width))
    spread = Spread(stages=stages, copies=devices // (8 * stages), parts=8)
    choice = Choice(spread, 1, 0, None, "full", stages=evenly(blocks, stages))
    return Published(MEGATRON, model, "a100", devices, rows, choice, 1e12 * teraflops / of_a_token)


def nemo(
    model: str, degrees: Sequence[int], microbatch: int, least: tuple[int, int], *seconds: float
) -> list[Published]:
    """Rows of NeMo, whose kernels are as fused as a compiler's. `degrees`: stages, ranks that divide each matrix, ranks
    that divide a row, and stages of a rank; `least`: devices of the first row, and rows of its batch; `seconds`: of a
    step, of which each has twice as many."""
    stages, parts, tokens, chunks = degrees
    schedule = "interleaved" if chunks > 1 else "1f1b"
    own = evenly(MODELS[model].blocks, stages * chunks)
    found = []
    for place, taken in enumerate(seconds):
        devices, rows = (2**place * number for number in least)
        spread = Spread(stages, devices // (stages * parts * tokens), tokens, parts, ring=tokens > 1)
        choice = Choice(spread, microbatch, 1, schedule=schedule, chunks=chunks, compile=True, stages=own)
        rate = rows * MODELS[model].tokens / taken / devices
        found.append(Published(NEMO, model, "h100-dgx", devices, rows, choice, rate))
    return found


F, N, S = "full", "none", "selective"
ROWS = (
    *(
        sharded(FOUNDRY, f"mpt-{size}", "h100", *row)
        for size, *row in (
            ("70b", 64, 8, 4, F, 1039), ("70b", 32, 2, 16, F, 882),
            ("30b", 32, 14, 3, F, 2308), ("30b", 16, 10, 3, F, 2263), ("30b", 8, 3, 21, F, 2002),
            ("13b", 64, 2, 1, N, 4800), ("13b", 32, 2, 1, N, 4811), ("13b", 16, 2, 1, N, 4767),
            ("13b", 8, 2, 1, N, 4792), ("7b", 8, 6, 1, N, 10643),
            ("3b", 64, 6, 3, N, 22525), ("3b", 32, 6, 3, N, 23021), ("3b", 16, 10, 3, N, 24142),
            ("1b", 64, 20, 1, N, 44402), ("1b", 32, 20, 1, N, 45130), ("1b", 16, 20, 1, N, 46037),
            ("1b", 8, 14, 1, N, 45455),
        )
    ),
    *(
        sharded(FOUNDRY, f"mpt-{size}", "a100", *row)
        for size, *row in (
            ("70b", 64, 8, 4, F, 410), ("70b", 32, 2, 16, F, 373), ("30b", 8, 3, 21, F, 916),
            ("13b", 8, 2, 3, N, 2262), ("7b", 8, 6, 2, N, 4641), ("3b", 8, 10, 2, N, 10811), ("1b", 8, 14, 4, N, 20513),
        )
    ),
    *(
        sharded(FOUNDRY, f"mpt-{size}", "a100-40", *row)
        for size, *row in (
            ("70b", 128, 4, 1, F, 376), ("70b", 64, 2, 1, F, 276),
            ("30b", 128, 6, 1, F, 865), ("30b", 32, 4, 1, F, 857),
            ("13b", 128, 16, 1, F, 1972), ("13b", 64, 16, 1, F, 1976), ("13b", 32, 14, 1, F, 1998),
            ("13b", 16, 10, 1, F, 1993), ("13b", 8, 4, 16, F, 1668),
            ("7b", 128, 18, 1, F, 3623), ("7b", 64, 18, 1, F, 3665), ("7b", 32, 18, 1, F, 3725),
            ("7b", 16, 16, 1, F, 3645), ("7b", 8, 12, 4, F, 3679),
            ("3b", 128, 6, 1, N, 9538), ("3b", 64, 6, 1, N, 9736), ("3b", 32, 6, 1, N, 9914), ("3b", 16, 5, 1, N, 9750),
            ("3b", 8, 5, 8, N, 10065),
            ("1b", 128, 10, 1, N, 18647), ("1b", 64, 10, 1, N, 19001), ("1b", 32, 10, 1, N, 15555),
            ("1b", 16, 8, 1, N, 19085), ("1b", 8, 8, 8, N, 19271),
        )
    ),
    sharded(TITAN, "llama3-8b", "a100", 64, 1, 1, S, 2973),
    sharded(TITAN, "llama3-70b", "a100", 64, 1, 1, F, 331),
    sharded(TITAN, "llama2-13b", "a100", 64, 2, 1, N, 2162),
    sharded(TITAN, "llama2-13b", "a100", 64, 2, 1, S, 1904),
    sharded(TITAN, "llama2-70b", "a100", 64, 1, 1, S, 355),
    sharded(TITAN, "llama2-70b", "a100", 64, 2, 1, F, 353),
    sharded(TITAN, "llama3-8b", "h100-96", 8, 2, 1, S, 5762, 82.4),
    sharded(TITAN, "llama3-8b", "h100-96", 128, 2, 1, S, 5605, 67.0),
    sharded(TITAN, "llama3-8b", "h100-96", 8, 2, 1, S, 6667, 77.0, compiled=True),
    sharded(TITAN, "llama3-8b", "h100-96", 128, 2, 1, S, 6514, 62.0, compiled=True),
    piped("gpt-175b", 384, 1536, 12, 153), piped("gpt-175b", 768, 1536, 12, 149),
    piped("gpt-175b", 1536, 1536, 12, 141), piped("gpt-530b", 560, 2240, 35, 171),
    piped("gpt-530b", 1120, 2240, 35, 167), piped("gpt-530b", 2240, 2240, 35, 159),
    *nemo("gpt-175b", (8, 4, 1, 12), 1, (128, 256), 8.309, 8.408, 8.42, 8.453, 8.49),
    *nemo("nemotron-15b", (1, 4, 1, 1), 4, (16, 64), 2.812, 2.824, 2.845, 2.859, 2.852, 2.875, 2.895, 2.887),
    *nemo("nemotron-340b", (8, 8, 1, 12), 1, (128, 32), 4.61, 4.67, 4.7, 4.73, 4.84),
    *nemo("llama3-8b", (1, 1, 2, 1), 1, (8, 128), 12.91, 13.00, 13.05, 13.08, 13.10),
    *nemo("llama3-70b", (4, 4, 2, 5), 1, (64, 128), 14.72, 14.73, 14.8, 14.89, 14.92, 14.98),
    *nemo("llama3-405b", (9, 8, 2, 7), 1, (576, 252), 17.20, 17.52, 17.62),
)  # fmt: skip
"""All rows."""

EXPOSED = 0.2
"""The share of what ranks of NeMo send inside of a model that is not hidden by products. Assumed, as of other overlap
on an accelerator."""
REACHES = 0.8
"""The share of the peak that products of NeMo reach on DGX H100, such that its rows come out right on average."""
PORT = Link(15e-6, 25e9 * 0.8)
"""One port of 200 Gb/s for each A100, as in DGX A100 and where MPT was measured, times 0.8."""


def machine_of(row: Published) -> Cluster:
    """The devices of a row, as published, all else as in `machines`. Watts go with the third power of the clock, as the
    voltage does with it, so what has fewer computes slower by their cube root."""
    kind, _, memory = row.machine.partition("-")
    cluster = cluster_of(f"{kind}x{row.devices}", MACHINES, PORT if kind == "a100" else BETWEEN)
    changed: dict[str, Any] = {
        "40": {"memory": 40 * 10**9, "bandwidth": 1.555e12},
        "96": {"memory": 96 * 10**9, "bandwidth": 2.4e12},
        "dgx": {"reaches": REACHES},
    }.get(memory, {})
    if memory == "96":
        changed["flops"] = {name: (500 / 700) ** (1 / 3) * rate for name, rate in cluster.hosts[0].device.flops.items()}
    hosts = tuple(replace(host, device=replace(host.device, **changed)) for host in cluster.hosts)
    return replace(cluster, hosts=hosts)


def traced(model: Model, ways: tuple[str, ...] = ()) -> Profile:
    """The profile of a model, from one of few blocks."""
    key = "layers" if model.table["name"] == "gpt" else "num_hidden_layers"
    shallow = build({**model.table, key: SHALLOW})
    row = {key: torch.zeros(model.tokens, dtype=torch.int64) for key in ("input_ids", "labels")}
    subject = Subject(shallow.factory, shallow.loss, row, 1, precision("bf16"), Plan())
    return deepened(profile(subject, dict.fromkeys(ways, (2,))), model.blocks, SHALLOW - 1)


def ways_of(name: str) -> tuple[str, ...]:
    """How ranks of a model's rows divide it."""
    spreads = [row.choice.spread for row in ROWS if row.model == name]
    return ("parts",) * any(each.parts > 1 for each in spreads) + ("ring",) * any(each.ring for each in spreads)


def left_out(model: Model) -> tuple[float, float]:
    """Of a Llama's block, operations and bytes of results of a token that torchtitan's selective recompute does not
    keep: those of every second product, which are the keys', attention's output and one of the MLP's first two."""
    config = model.table["config"]
    width, inner = config["hidden_size"], config["intermediate_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    return 2.0 * width * (keys + width + inner), 2.0 * (keys + width + inner)


def as_there(row: Published, found: Profile) -> Profile:
    """The profile as the system of a row has it: recompute of Megatron runs blocks to their end, selective recompute of
    torchtitan keeps less; ranks of NeMo that divide matrices divide all else of a block, too, and most of what they
    send goes on beside products."""
    model = MODELS[row.model]

    def changed(part: PartProfile) -> PartProfile:
        if row.source == MEGATRON:
            return replace(part, spared=0.0)
        if row.source == NEMO:
            sent = tuple(replace(each, payload=EXPOSED * each.payload) for each in part.messages)
            fused = Cut(part.fused.value, {**part.fused.shares, "parts": 1.0})
            boundary = replace(part.boundary, value=EXPOSED * part.boundary.value)
            return replace(part, messages=sent, fused=fused, boundary=boundary)
        if row.source == TITAN and row.choice.recompute == "selective" and part.is_block:
            less = left_out(model)[1] * model.tokens
            return replace(part, results=Cut(part.results.value - less, part.results.shares))
        return part

    return replace(found, parts=tuple(map(changed, found.parts)))


def task_of(row: Published, found: Profile, **others: Any) -> Task:
    """What the planner is asked of a row."""
    spread = row.choice.spread
    legal = {"parts": 8 if spread.parts > 1 else 1, "tokens": spread.tokens, "ring": spread.tokens}
    compiled, chunks = row.choice.compile, row.choice.chunks
    schedules = (*Task.schedules, (row.choice.schedule, chunks)) if chunks > 1 else Task.schedules
    return Task(
        as_there(row, found), machine_of(row), row.rows, ADAMW, legal=legal, compiled=compiled, schedules=schedules,
        **others,
    )  # fmt: skip


def estimated(row: Published, found: Profile) -> tuple[Estimate, float]:
    """What is predicted of a row, and tokens a second of a device."""
    asked, model = Search(task_of(row, found, limit=math.inf)), MODELS[row.model]
    estimate = asked.simulated(asked.estimate(row.choice))
    seconds = estimate.seconds
    if row.source == TITAN and row.choice.recompute == "selective":
        device = asked.prices.slowest
        tokens = row.rows * model.tokens / row.devices
        seconds += model.blocks * tokens * left_out(model)[0] / (device.peak(ADAMW.dtype) * device.reaches)
    return estimate, row.rows * model.tokens / seconds / row.devices
