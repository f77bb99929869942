"""A job with embeddings by rows whose server and worker have an accelerator each, and what torch has for embeddings:
programs for the simulated one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.jobs.config import Job, Origins
from shoal.jobs.read import parse_job
from shoal.jobs.served.serve import serve
from shoal.jobs.served.worker import work
from shoal.launch.identity import Identity
from shoal.launch.tf_config import local_cluster
from shoal.models.registry import BUILDERS, ModelSpec
from shoal.report.metrics import RunRecords, read_metrics
from tests.device.servers import tell, until_there
from tests.device.simulator.run import Rank
from tests.server.common import TOKEN

TABLES = ["each.weight", "bag.weight", "dense.weight"]


class Words(nn.Module):
    """Computes on an embedding and a bag of sparse gradients, and an embedding of dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Embedding(257, 8, padding_idx=32, sparse=True)
        self.bag = nn.EmbeddingBag(257, 8, mode="mean", sparse=True)
        self.dense = nn.Embedding(257, 8)
        self.head = nn.Linear(24, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.cat([self.each(ids).mean(1), self.bag(ids), self.dense(ids).mean(1)], 1))


def classified(model: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    ids = mb["input_ids"]
    return F.cross_entropy(model(ids), mb["labels"][:, 0] % 4, reduction="sum"), torch.tensor(len(ids))


def words(settings: object) -> ModelSpec:
    return ModelSpec("words", Words, classified, {}, 257)


def write_corpus(folder: Path) -> None:
    (folder / "corpus").mkdir()
    for number in range(10):
        lines = (f"{number} + {i} = {number + i}" for i in range(9))
        (folder / "corpus" / f"{number}.txt").write_text("\n".join(lines))


def job(folder: Path) -> tuple[Job, Origins]:
    """Returns a job of 4 steps on the corpus in `folder`; its run goes there, too."""
    return parse_job(
        {
            "model": {"name": "words"},
            "data": {"source": str(folder / "corpus"), "sequence": 8, "validation": 0.2},
            "train": {
                "steps": 4,
                "global_batch": 8,
                "microbatch": 4,
                "optimizer": "adagrad",
                "lr": 0.05,
                "weight_decay": 0.0,
                "clip": 0.5,
            },
            "server": {"policy": "sync", "tables": TABLES},
            "run": {"dir": str(folder / "run"), "trackers": [], "eval_every": 2},
        }
    )


def both_ends(rank: Rank) -> RunRecords | None:
    """Rank 0 works on the first device, rank 1 serves from the one that is left; returns what it recorded."""
    folder, told = Path(rank.folder), Path(rank.folder) / "told"
    os.environ |= {"SHOAL_SECRET": TOKEN, "XDG_CACHE_HOME": str(folder / "cache")}
    BUILDERS["words"] = words
    if rank.rank == 1:
        write_corpus(folder)
        addresses = tuple(local_cluster({"ps": 1})["ps"])
        tell(told, addresses[0])
        serve(*job(folder), Identity(0, 1, 0, 1, "", 0, "test", servers=addresses, serves=0))
        return read_metrics(folder / "run/metrics.jsonl")
    until_there(told.exists)
    work(*job(folder), Identity(0, 1, None, None, "", 0, "test", servers=(told.read_text(),)))
    return None


def gradients(name: str) -> dict[str, bool]:
    """Whether embeddings and bags compute, and leave as gradients of the table, on the device `name` what they do on
    the CPU."""
    ids, offsets = torch.tensor([3, 7, 3, 2, 9, 7, 0, 2]), torch.tensor([0, 3, 3, 5])
    cases: dict[str, dict[str, Any]] = {"embedding": {"padding_idx": 2}}
    cases |= {mode: {"mode": mode} for mode in ("sum", "mean", "max")}
    cases |= {
        "padded": {"mode": "sum", "padding_idx": 2},
        "last offset": {"mode": "mean", "include_last_offset": True},
        "by frequency": {"mode": "sum", "scale_grad_by_freq": True},
        "weighted": {"mode": "sum"},
    }
    found = {}
    for case, options in cases.items():
        for sparse in (False, True):
            if sparse and case in ("max", "by frequency"):  # torch has none
                continue
            results = []
            for device in ("cpu", name):
                torch.manual_seed(0)
                table = torch.randn(10, 4).to(device).requires_grad_()
                given, more = ids.to(device), {**options, "sparse": sparse}
                if case == "embedding":
                    out = F.embedding(given, table, **more)
                else:
                    at = torch.cat([offsets, torch.tensor([8])]) if case == "last offset" else offsets
                    if case == "weighted":
                        more["per_sample_weights"] = torch.linspace(0.5, 2.0, 8).to(device)
                    out = F.embedding_bag(given, table, at.to(device), **more)
                (out * out).sum().backward()
                gradient = table.grad
                assert gradient is not None and gradient.is_sparse == sparse
                results.append([out, _dense(gradient)])
            found[f"{case}, sparse: {sparse}"] = all(
                torch.allclose(theirs.detach().cpu(), mine) for mine, theirs in zip(*results, strict=True)
            )
    return found


def _dense(gradient: Tensor) -> Tensor:
    """Returns a gradient on the CPU, with the rows of a sparse one each once."""
    if not gradient.is_sparse:
        return gradient.cpu()
    once = gradient.coalesce()
    return torch.sparse_coo_tensor(once.indices().cpu(), once.values().cpu(), once.shape).to_dense()
