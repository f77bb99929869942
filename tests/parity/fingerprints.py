"""Fingerprints of runs: what five steps under each of many plans leave, to the bit, on one commit and on another.

A refactoring must not change a bit of any of them. Another CPU, or another torch, has other bits, so a record of hashes
is worth nothing elsewhere: `make fingerprints` checks out the commit named in `fingerprints.json` beside this one and
runs both here.

    python -m tests.parity.fingerprints run SOURCES OUT [NAME ...]  the fingerprints of the package in SOURCES, as JSON
    python -m tests.parity.fingerprints compare [NAME ...]          of the recorded commit and this tree; what differs
    python -m tests.parity.fingerprints record                      makes HEAD the commit to compare with

Only what every commit has is used: `Engine`, its `step` and `save`, and the models.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("fingerprints.json")
ROOT = Path(__file__).resolve().parents[2]
STEPS, SAMPLES, GLOBAL_BATCH, LENGTH, VOCABULARY = 5, 41, 12, 12, 61

Row = dict[str, Any]
"""`model`, `precision`, `microbatch`, `clip`, `optimizer`, ... and the fields of a plan under `plan`."""


def _rows() -> dict[str, Row]:
    """At least one row for each value of each field of a plan, and the pairs that share a mechanism."""
    plans: dict[str, Row] = {
        "one": {},
        "dp2": {"dp": 2},
        "dp3": {"dp": 3},
        "dp2-zero1": {"dp": 2, "zero": 1},
        "dp2-zero2": {"dp": 2, "zero": 2},
        "dp2-zero3": {"dp": 2, "zero": 3},
        "dp4-hybrid": {"dp": 4, "zero": 2, "shard": 2},
        "tp2": {"tp": 2},
        "dp2-tp2-zero1": {"dp": 2, "tp": 2, "zero": 1},
        "tp2-zero3": {"dp": 2, "tp": 2, "zero": 3},
        "cp2": {"cp": 2},
        "ring2": {"cp": 2, "context": "ring"},
        "cp2-tp2-zero2": {"cp": 2, "tp": 2, "zero": 2},
        "pp2": {"pp": 2},
        "pp2-gpipe": {"pp": 2, "schedule": "gpipe"},
        "pp2-interleaved": {"pp": 2, "schedule": "interleaved"},
        "pp2-zb1p-dp2": {"pp": 2, "dp": 2, "schedule": "zb1p"},
        "pp2-zbv": {"pp": 2, "schedule": "zbv"},
        "pp2-2bw": {"pp": 2, "schedule": "2bw"},
        "pp2-2bw-dp2-zero1": {"pp": 2, "dp": 2, "zero": 1, "schedule": "2bw"},
        "pp2-pipedream": {"pp": 2, "schedule": "pipedream"},
        "pp2-tp2": {"pp": 2, "tp": 2},
        "pp2-cp2": {"pp": 2, "cp": 2},
        "pp2-zero3": {"pp": 2, "dp": 2, "zero": 3},
        "memory": {"memory": {}},
        "dp2-memory-zero3": {"dp": 2, "zero": 3, "memory": {}},
        "memory-deferred": {"dp": 2, "zero": 1, "memory": {"update": "deferred", "activations": 0.5}},
        "memory-disk": {"dp": 2, "zero": 3, "memory": {"disk": "DIRECTORY"}},
        "tp2-memory": {"tp": 2, "memory": {}},
        "pp2-memory": {"pp": 2, "memory": {"activations": 0.5}},
        "recompute": {"dp": 2, "recompute": "full"},
        "selective": {"dp": 2, "zero": 1, "recompute": "selective"},
        "budget": {"dp": 2, "zero": 3, "recompute": {"name": "budget", "keep": 0.5}},
        "pp2-recompute-zbv": {"pp": 2, "recompute": "full", "schedule": "zbv"},
        "compiled": {"dp": 2, "compile": "aot_eager"},
    }
    exchanges: dict[str, Row] = {
        "qadam": {"warmup": 2},
        "onebit_adam": {"warmup": 2},
        "local_sgd": {"every": 2},
        "diloco": {"every": 2},
    }
    exchanges["streaming_diloco"] = {"every": 4, "fragments": 2, "overlap": 1}
    for name in ("hierarchical", "fp16", "bf16", "bytegrad", "powersgd", "topk", "adasum", "delayed", "none"):
        exchanges[name] = {}
    exchanges |= {"decentralized": {}, "low_precision_decentralized": {}}
    rows = {name: {"plan": plan} for name, plan in plans.items()}
    rows |= {name: {"plan": {"dp": 2, "exchange": {"name": name, **more}}} for name, more in exchanges.items()}
    rows["pp2-pipedream"]["microbatch"] = GLOBAL_BATCH  # an update a microbatch
    rows["topk-dp3"] = {"plan": {"dp": 3, "exchange": "topk"}, "precision": "bf16"}
    for name in (
        "dp2",
        "dp2-zero2",
        "dp2-zero3",
        "tp2",
        "pp2",
        "memory",
        "cp2",
        "dp2-memory-zero3",
        "pp2-zbv",
        "budget",
    ):
        rows[f"{name}-bf16"] = {"plan": plans[name], "precision": "bf16"}
    rows["dp2-fp16"] = {"plan": plans["dp2"], "precision": {"name": "fp16", "initial_scale_power": 30}}  # skips steps
    rows["pp2-fp16"] = {"plan": plans["pp2"], "precision": {"name": "fp16", "initial_scale_power": 8}}
    rows["dp2-fp64"] = {"plan": plans["dp2"], "precision": "fp64"}
    rows["dp2-clip-value"] = {"plan": plans["dp2"], "clip_value": 0.01}
    for name in ("dp2", "dp2-zero2", "pp2"):
        rows[f"resnet-{name}"] = {"plan": plans[name], "model": "resnet", "sgd": True}
    rows["resnet-sync-bn"] = {"plan": plans["dp2"], "model": "resnet", "sgd": True, "sync_bn": True, "microbatch": None}
    rows["lstm-dp2"] = {"plan": plans["dp2"], "model": "lstm"}
    rows["lstm-pp2"] = {"plan": plans["pp2"], "model": "lstm"}
    for name, plan in {
        "ep2": {"dp": 2, "ep": 2},
        "ep2-tp2": {"dp": 2, "ep": 2, "tp": 2},
        "ep2-zero3": {"dp": 4, "ep": 2, "zero": 3},
    }.items():
        rows[f"moe-{name}"] = {"plan": plan, "model": "moe"}
    rows["moe-pp2-ep2"] = {"plan": {"pp": 2, "dp": 2, "ep": 2}, "model": "moe"}
    return rows


ROWS = _rows()


def _model(name: str) -> tuple[Any, Any]:
    """A factory and its loss."""
    from shoal.models import (
        GPT,
        LSTM,
        GPTConfig,
        LSTMConfig,
        MoEConfig,
        ResNet,
        ResNetConfig,
        causal_lm,
        classification,
    )

    if name == "resnet":
        return lambda: ResNet(ResNetConfig(depth=20, classes=5)), classification
    if name == "lstm":
        return lambda: LSTM(
            LSTMConfig(vocab_size=VOCABULARY, embedding=16, hidden=16, layers=4, dropout=0.1)
        ), causal_lm
    moe = MoEConfig(4, shared=1, noise="gumbel", z_loss=1e-3, d_ff=16, every=2) if name == "moe" else None
    config = GPTConfig(VOCABULARY, LENGTH, 4, 32, 4, tied=name == "gpt", dropout=0.1 if name == "gpt" else 0.0, moe=moe)
    return partial(GPT, config), causal_lm


def _data(model: str) -> list[dict[str, Any]]:
    import torch

    draw = torch.Generator().manual_seed(1)
    if model == "resnet":
        return [
            {"inputs": torch.randn(3, 12, 12, generator=draw), "labels": torch.randint(5, (), generator=draw)}
            for _ in range(SAMPLES)
        ]
    rows = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=draw)
    ignored = torch.rand(SAMPLES, LENGTH, generator=draw) < torch.rand(SAMPLES, 1, generator=draw) * 0.4
    return [
        {"input_ids": row[:-1], "labels": row[1:].masked_fill(mask, -100)}
        for row, mask in zip(rows, ignored, strict=True)
    ]


def _train(row: Row, directory: str) -> list[str]:
    """Trains on this rank; the losses to the bit. The checkpoint is in `directory`."""
    import torch

    import shoal
    from shoal import lr

    torch.set_num_threads(1)
    name = row.get("model", "gpt")
    fields = json.loads(json.dumps(row["plan"]).replace("DIRECTORY", f"{directory}/tier"))
    plain = (
        fields.get("schedule") in ("2bw", "pipedream") or fields.get("context") == "ring"
    )  # no ties, no dropout there
    factory, loss = _model("gpt-plain" if name == "gpt" and plain else name)
    adamw, sgd = partial(torch.optim.AdamW, lr=3e-3), partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    clip = None if "clip_value" in row or fields.get("schedule") == "pipedream" else 0.8
    options = {key: row[key] for key in ("clip_value", "sync_bn", "precision") if key in row}
    plan = shoal.Plan(**fields)
    engine = shoal.Engine(
        factory,
        loss,
        sgd if row.get("sgd") else adamw,
        plan,
        global_batch=GLOBAL_BATCH,
        microbatch=row.get("microbatch", 3),
        clip=clip,
        schedule=lr.cosine(20, warmup=3),
        **options,
    )
    losses = [float(engine.step(batch).loss).hex() for batch in engine.batches(_data(name), steps=STEPS)]
    engine.save(f"{directory}/saved")
    engine.close()
    return losses


def _rank(pipe: Any, rank: int, size: int, port: int, row: Row, directory: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pipe.send(_train(row, directory))
    pipe.recv()  # the first rank has the store, which the others may still need


def _fingerprint(name: str) -> str:
    """A hash of the losses of all ranks and of every tensor of the checkpoint: weights, optimizer, buffers, state of
    the exchange."""
    row = ROWS[name]
    size = 1
    for axis in ("pp", "dp", "cp", "tp"):
        size *= row["plan"].get(axis, 1)
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            processes.append(_context.Process(target=_rank, args=(theirs, rank, size, port, row, directory)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            losses = [pipe.recv() for pipe in pipes]
            for pipe in pipes:
                pipe.send(None)
        except EOFError:
            raise SystemExit(f"{name}: a rank failed, see above") from None
        finally:
            for process in processes:
                process.join(60)
                process.kill()
        found = hashlib.sha256(json.dumps(losses).encode())
        for key, tensor in _tensors(Path(directory) / "saved"):
            found.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().view(-1).view(dtype=_bytes()).numpy().tobytes())
    return found.hexdigest()[:16]


def _bytes() -> Any:
    import torch

    return torch.uint8


def _tensors(saved: Path) -> Iterator[tuple[str, Any]]:
    """The tensors of the one checkpoint in `saved`, by name, in order."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    (checkpoint,) = saved.glob("step-*")
    reader = FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in sorted(entries.items())
        if hasattr(entry, "size")
    }
    load(state, storage_reader=reader, no_dist=True)
    yield from state.items()


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "shoal.engine", "shoal.models"])


def run(sources: Path, out: Path, names: list[str]) -> None:
    """Writes the fingerprints of the package in `sources`, which has to be the one that is imported."""
    import shoal

    assert Path(shoal.__file__).resolve().is_relative_to(sources.resolve()), (shoal.__file__, sources)
    found = {}
    for name in names or ROWS:
        found[name] = _fingerprint(name)
        print(f"{name:24} {found[name]}", flush=True)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _of(sources: Path, names: list[str]) -> dict[str, str]:
    """The same in a process that imports the package from `sources`."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "found.json")
        environment = {**os.environ, "PYTHONPATH": f"{sources}{os.pathsep}{ROOT}"}
        command = [sys.executable, "-m", "tests.parity.fingerprints", "run", str(sources), str(out), *names]
        subprocess.run(command, env=environment, cwd=ROOT, check=True)
        return json.loads(out.read_text(encoding="utf-8"))


@contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    """The tree of `commit` in a folder that goes afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory, "tree")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def compare(names: list[str]) -> int:
    """Runs both commits; the number of fingerprints that differ."""
    commit = json.loads(RECORD.read_text(encoding="utf-8"))["commit"]
    print(f"the commit before, {commit[:12]}:", flush=True)
    with _checked_out(commit) as tree:
        before = _of(tree / "src", names)
    print("this tree:", flush=True)
    now = _of(ROOT / "src", names)
    differ = [name for name in before if before[name] != now[name]]
    print(
        f"{len(before) - len(differ)} of {len(before)} fingerprints are equal"
        + "".join(f"\n  differs: {name}" for name in differ)
    )
    return len(differ)


def record() -> None:
    """Makes HEAD the commit to compare with, with its fingerprints on this machine."""
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    import platform

    import torch

    about = {
        "commit": head,
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
    }
    RECORD.write_text(json.dumps({**about, "fingerprints": _of(ROOT / "src", [])}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", sources, out, *names]:
            run(Path(sources), Path(out), names)
        case ["compare", *names]:
            sys.exit(min(1, compare(names)))
        case ["record"]:
            record()
        case _:
            sys.exit(__doc__)
