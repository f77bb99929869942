"""No file that a user gives, however broken, ends in a traceback: it is taken, or refused by an error of ours, soon."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import tomllib
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from shoal import checkpoint
from shoal.checkpoint import Want
from shoal.comm import World
from shoal.data.cached.record import pack, unpack
from shoal.doors import _settings
from shoal.errors import CheckpointError, ShoalError, UserError
from shoal.jobs.cluster.render import render
from shoal.jobs.cluster.request import read_request
from shoal.jobs.optimizers import optimizer_named
from shoal.jobs.ranks import ranks_here, spread
from shoal.jobs.read import load_job, parse_job
from shoal.models import build
from shoal.optim.lr import by_name
from shoal.parallel import Box
from shoal.pipeline.files import read_schedule
from shoal.precision import precision
from tests.checkpoint.fake_ranks import save_alone
from tests.fuzz.mutate import bounded, damaged, mutated, tries

ROOT = Path(__file__).parents[2]
LENGTHS = [pytest.param(200, id="part"), pytest.param(2000, id="whole", marks=pytest.mark.matrix)]

EXAMPLES = ("gpt_stdlib.toml", "moe_stdlib.toml", "stages_stdlib.toml")
JOBS = [tomllib.loads((ROOT / "examples" / name).read_text()) for name in EXAMPLES] + [
    {
        "model": {"name": "gpt", "preset": "1m", "layers": 2},
        "data": {
            "source": "stdlib", "tokenizer": "bytes", "sequence": 64, "validation": 0.1, "attend": "row",
            "field": "text",
        },
        "train": {
            "steps": 3, "epochs": 1.5, "seconds": 60.0, "global_batch": 8, "microbatch": 2,
            "precision": {"name": "fp16", "hysteresis": 1}, "optimizer": {"name": "sgd", "momentum": 0.9},
            "lr": 1e-3, "weight_decay": 0.1, "schedule": "cosine", "warmup": 3, "clip": 1.0, "seed": 0,
        },
        "plan": {
            "dp": 2, "pp": 1, "tp": 1, "cp": 1, "ep": 1, "zero": 2, "shard": 2,
            "exchange": {"name": "allreduce", "chunk_bytes": 65536}, "compile": "inductor",
            "recompute": {"name": "some", "every": 2}, "memory": {"device": "1GiB", "disk": {"path": "runs/x"}},
        },
        "run": {
            "dir": "runs/x", "nproc": 2, "eval_every": 3, "save_every": 4, "keep": 2, "resume": "auto",
            "trackers": ["tensorboard"], "sample": "a",
        },
    },
    {
        "model": {"name": "mlp", "sizes": [64, 8, 10]},
        "data": {"source": "digits", "validation": 0.1, "size": 8},
        "train": {"global_batch": 8, "optimizer": "sgd", "lr": 0.1},
        "cluster": {
            "nodes": 2, "least": 1, "cpus": 4.5, "memory": "16GiB", "gpus": 2, "time": "1-12:00:00", "queue": "gpu",
            "image": "lab/shoal", "volumes": {"training": "/data"}, "secret": "s", "env": {"A": "b"}, "setup": ["true"],
            "finish": ["true"], "options": ["--account=lab"],
        },
        "server": {
            "policy": "staleness:2", "scale": "inverse", "drop_above": 3, "codec": {"name": "u8"}, "grace": 5.0,
            "timeout": 9.0, "restarts": 2, "durable": True, "tables": ["a.weight"], "device": "cpu",
        },
        "federated": {
            "rounds": 3, "clients": 4, "fraction": 0.5, "strategy": {"name": "fedprox", "mu": 0.1}, "local_steps": 2,
            "partition": {"name": "label", "alpha": 0.5}, "weighting": "equal", "deadline": 9.0, "late": "partial",
            "speeds": 0.5, "dropout": 0.1, "least": 1, "secure": 0.6, "eval_every": 1,
        },
    },
]  # fmt: skip
CLOUDML = {
    "job_name": "mnist", "module_name": "trainer.task", "job_args": "--steps 100", "gpu_limit": 2, "worker_count": 3,
    "cpu_limit": "8", "memory_limit": "64G", "docker_image": "lab/trainer", "prepare_command": "true",
    "finish_command": "true", "ps_count": 1,
}  # fmt: skip


def read_all(content: dict[str, Any]) -> None:
    """What is said of a job before its data is opened."""
    job, origins = parse_job(content)
    build(job.model)
    optimizer_named(job.train.optimizer, job.train.lr)
    precision(job.train.precision)
    by_name(job.train.schedule or "cosine", job.train.steps or 1, job.train.warmup or 0, 0.1)
    spread(job, origins, ranks_here(job))


@pytest.mark.parametrize("number", LENGTHS)
def test_jobs(number: int, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"

    def attempt(draw: random.Random) -> None:
        content = mutated(draw.choice(JOBS), draw)
        with bounded(content), suppress(ShoalError):
            read_all(content)
        data = damaged((ROOT / "examples" / "gpt_stdlib.toml").read_bytes(), draw)
        file.write_bytes(data)
        with bounded(data), suppress(ShoalError):
            load_job(file)

    tries(number, 1, attempt)


@pytest.mark.parametrize("number", LENGTHS)
def test_jobs_in_cloudmls_words(number: int, tmp_path: Path) -> None:
    file = tmp_path / "job.json"

    def attempt(draw: random.Random) -> None:
        content = mutated(CLOUDML, draw)
        file.write_text(json.dumps(content))
        for target in ("slurm", "ray", "local"):
            with bounded(content), suppress(ShoalError):
                render(read_request(file), target)

    tries(number, 9, attempt)


DEEPSPEED = [
    {
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0, "steps_per_print": 10,
        "optimizer": {"type": "Adam", "params": {
            "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "torch_adam": True,
            "adam_w_mode": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10, "total_num_steps": 100}},
        "fp16": {
            "enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp/x", "pin_memory": True},
            "offload_param": {"device": "cpu"}, "overlap_comm": True, "stage3_max_live_parameters": 1e9,
            "mics_shard_size": -1,
        },
        "wandb": {"enabled": False},
    },
    {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "scheduler": {
        "type": "OneCycle", "params": {
            "cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 10, "decay_lr_rate": 0.1,
            "cycle_momentum": True}}},
    {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "scheduler": {
        "type": "WarmupCosineLR", "params": {
            "total_num_steps": 20, "warmup_num_steps": 3, "warmup_type": "linear", "cos_min_ratio": 0.1}}},
    {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "scheduler": {
        "type": "LRRangeTest", "params": {
            "lr_range_test_step_size": 20, "lr_range_test_step_rate": 3, "lr_range_test_staircase": True}}},
    {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"reduce_bucket_size": "auto"},
        "scheduler": {"type": "WarmupLR", "params": {
            "warmup_num_steps": 3, "warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
    },
]  # fmt: skip
PATRICKSTAR = {
    "optimizer": {"type": "Adam", "params": {
        "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0, "use_hybrid_adam": True}},
    "fp16": {
        "enabled": True, "loss_scale": 0, "initial_scale_power": 10, "loss_scale_window": 1000, "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "default_chunk_size": 1024, "release_after_init": True, "use_cpu_embedding": False, "gradient_clipping": 1.0,
    "client": {"mem_tracer": {"overall_gpu_mem_ratio": 0.8, "use_fake_dist": False}, "opts": {"with_mem_cache": True}},
}  # fmt: skip


def use(config: Any) -> None:
    """The configuration in Shoal's terms, and what an engine makes of them at once: optimizer, schedule over some
    steps, precision."""
    settings = _settings(config, World.single("cpu"))
    optimizer = settings.optimizer([torch.nn.Parameter(torch.ones(2))])
    precision(settings.engine["precision"])
    if settings.schedule is not None:
        schedule = settings.schedule(optimizer)
        for _ in range(40):
            schedule.step()
        assert all(isinstance(rate, (int, float)) for rate in schedule.get_last_lr())


@pytest.mark.parametrize("number", LENGTHS)
def test_configurations_of_other_frameworks(number: int, tmp_path: Path) -> None:
    file = tmp_path / "config.json"

    def attempt(draw: random.Random) -> None:
        sound = draw.choice([*DEEPSPEED, PATRICKSTAR])
        config = mutated(sound, draw)
        with bounded(config), suppress(ShoalError):
            use(config)
        data = damaged(json.dumps(sound).encode(), draw)
        file.write_bytes(data)
        with bounded(data), suppress(ShoalError):
            use(file)

    tries(number, 2, attempt)


SCHEDULE = b"""# two ranks, three microbatches: kind, stage, microbatch
F0:0 F0:1 B0:0 F0:2 B0:1 B0:2
F1:0 B1:0 F1:1 B1:1 F1:2 B1:2
"""


@pytest.mark.parametrize("number", LENGTHS)
def test_schedules(number: int, tmp_path: Path) -> None:
    file = tmp_path / "schedule.txt"

    def attempt(draw: random.Random) -> None:
        data = damaged(SCHEDULE, draw)
        if draw.randrange(2):
            words = SCHEDULE.split()
            words[draw.randrange(10, len(words))] = draw.choice(
                [b"F0:9999999999", b"F99999999:0", b"B0:0", b"U0:0", b"F0:" + b"9" * 5000, b"W1:1", b"I1:1"]
            )
            data = b" ".join(words[10:16]) + b"\n" + b" ".join(words[16:])
        file.write_bytes(data)
        with bounded(data), suppress(UserError):
            read_schedule(file, draw.choice([1, 2]), draw.choice(["loop", "v"]))

    tries(number, 3, attempt)


def sound_checkpoint(directory: Path) -> tuple[Path, list[Want]]:
    state = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
    save_alone(directory, 3, state, extra={"step": 3, "user": {"a": 1}})
    wants = [
        Want(name, tuple(value.shape), Box.whole(tuple(value.shape)), torch.empty_like(value))
        for name, value in state.items()
    ]
    return directory / "step-00000003", wants


def rehashed(content: Any) -> bytes:
    """A manifest that says of itself that it is sound."""
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key != "sha256"}
        content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps(content).encode()


def read_checkpoint(path: Path, wants: list[Want]) -> None:
    checkpoint.listing(path.parent)
    checkpoint.verify(path)
    checkpoint.newest(path.parent, lambda bad, why: None)
    with suppress(CheckpointError):
        checkpoint.load(path, wants)
    with suppress(CheckpointError):
        checkpoint.tensor_names(path)


@pytest.mark.parametrize("number", LENGTHS)
def test_manifests(number: int, tmp_path: Path) -> None:
    path, wants = sound_checkpoint(tmp_path)
    file = path / "manifest.json"
    sound = file.read_bytes()

    def attempt(draw: random.Random) -> None:
        for data in (rehashed(mutated(json.loads(sound), draw)), damaged(sound, draw)):
            file.write_bytes(data)
            with bounded(data):
                read_checkpoint(path, wants)

    tries(number, 4, attempt)


def a_pickle(metadata: Any, draw: random.Random) -> bytes:
    """The index with fields that are something else."""
    odd = (
        None,
        3,
        -1,
        2**70,
        "x",
        "../x",
        (),
        [],
        {},
        (1, 2),
        ("a",),
        torch.float16,
        MetadataIndex("w", None),
        torch.Size((9, 9)),
    )
    for _ in range(draw.randint(1, 3)):
        entries = list(metadata.state_dict_metadata.values()) if isinstance(metadata.state_dict_metadata, dict) else []
        infos = list(metadata.storage_data.values()) if isinstance(metadata.storage_data, dict) else []
        chunks = [
            chunk for entry in entries if isinstance(getattr(entry, "chunks", None), list) for chunk in entry.chunks
        ]
        holder = draw.choice([metadata, *entries, *infos, *chunks])
        if not getattr(holder, "__dict__", None):
            continue
        key = draw.choice(list(vars(holder)))
        if draw.randrange(4) == 0:
            del vars(holder)[key]
        else:
            vars(holder)[key] = draw.choice(odd)
        if not hasattr(metadata, "state_dict_metadata") or not hasattr(metadata, "storage_data"):
            break
    return pickle.dumps(metadata, protocol=draw.choice([2, 4, 5]))


@pytest.mark.parametrize("number", LENGTHS)
def test_indexes_of_checkpoints(number: int, tmp_path: Path) -> None:
    path, wants = sound_checkpoint(tmp_path)
    file = path / ".metadata"
    sound = file.read_bytes()

    def attempt(draw: random.Random) -> None:
        made: list[Callable[[], bytes]] = [lambda: damaged(sound, draw), lambda: a_pickle(pickle.loads(sound), draw)]
        for make in made:
            with suppress(AttributeError):  # a field that pickle itself needs was taken away
                data = make()
                file.write_bytes(data)
                with bounded(data):
                    read_checkpoint(path, wants)

    tries(number, 5, attempt)


@pytest.mark.parametrize("number", LENGTHS)
def test_samples_of_a_cache(number: int) -> None:
    sample = {"a": torch.arange(6.0).view(2, 3), "b": 3, "c": "text", "d": np.arange(4), "e": None}
    sound = pack(sample)

    def attempt(draw: random.Random) -> None:
        data = damaged(sound, draw)
        with bounded(data):
            found = unpack(data)
        assert found is None or isinstance(found, dict)

    assert set(unpack(sound) or ()) == set(sample)
    tries(number, 8, attempt)


@pytest.mark.parametrize("number", LENGTHS)
def test_tensors_of_checkpoints(number: int, tmp_path: Path) -> None:
    path, wants = sound_checkpoint(tmp_path)
    file = path / "__0_0.distcp"
    sound = file.read_bytes()

    def attempt(draw: random.Random) -> None:
        data = damaged(sound, draw)
        file.write_bytes(data)
        with bounded(data[:50]), warnings.catch_warnings(action="ignore"):
            read_checkpoint(path, wants)

    tries(number // 4, 6, attempt)
