"""Branches that only an accelerator takes and no step of the rows comes to: each use returns numbers to compare (see
`uses`)."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal import Engine, Plan, as_ddp_hook
from shoal import device as room
from shoal.assembly.offload import link_rate
from shoal.comm import World
from shoal.comm.links import measure
from shoal.device import group_backend
from shoal.errors import UserError
from shoal.jobs.config import Data, Job, Run, Train
from shoal.jobs.train import train
from shoal.planner import Subject, parts_of
from shoal.planner.cluster import Cluster
from shoal.planner.measure import here
from shoal.precision import precision
from shoal.report.metrics import read_metrics
from tests.device.uses import GPT_OF_A_USE, engine, exchanged, on
from tests.parity.cases import CASES, causal_lm, text
from tests.parity.cases import engine as row

TINY = 32
WIDTHS = "shoal.device.products.ACCELERATOR_WIDTHS"
"""Rows of the matrices by which a peak is measured."""


def exchanged_with_error_feedback(world: World, folder: str) -> list[float]:
    return exchanged({"name": "topk"}, world, folder)


def batch_statistics(world: World, folder: str) -> list[float]:
    """BatchNorm's statistics, merged over replicas."""
    running = row("resnet-batchnorm", "fp32", 1, world=world, plan=Plan(dp=world.size))
    data = CASES["resnet-batchnorm"].data()
    return [running.step(batch).loss for batch in running.batches(data, steps=2)]


class Averages(nn.Module):
    """A model with a moving average, in a buffer that its forwards write themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(61, 16), nn.Linear(16, 61)
        self.register_buffer("usual", torch.zeros(16))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        if self.training:
            self.usual.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return self.head(x)


def buffers_of_replicas(world: World, folder: str) -> list[float]:
    """Buffers outside BatchNorm, which replicas make equal at the end of each step."""
    plan, adamw = Plan(dp=world.size), partial(torch.optim.AdamW, lr=3e-3)
    running = Engine(Averages, causal_lm, adamw, plan, global_batch=12, microbatch=3, world=world)
    losses = on(running, 3)
    return [*losses, *running.module.usual.tolist()]


def goes_on_after_an_error(world: World, folder: str) -> list[float]:
    """A step that ends early in a forward, with weights on their way."""
    running = engine(world, {"dp": world.size, "memory": {}})
    losses = on(running, 1)
    handle = running.module.blocks[0].register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        on(running, 2)
    except ZeroDivisionError:
        handle.remove()
    return losses + on(running, 2)


def a_job(world: World, folder: str) -> list[float]:
    """A job with its record: the timeline, the memory of the device, the peak."""
    os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
    source = Path(folder, "corpus")
    source.mkdir()
    for number in range(20):
        (source / f"{number}.txt").write_text("\n".join(f"{i} + {number} = {i + number}" for i in range(20)))
    job = Job(
        model={"name": "gpt", "layers": 1, "d_model": 16, "heads": 2},
        train=Train(steps=8, global_batch=4, microbatch=2, lr=1e-2, warmup=0),
        data=Data(source=str(source), sequence=16, validation=0.2),
        run=Run(dir=f"{folder}/run", trackers=[]),
    )
    tiny = patch.multiple("shoal.device.peak", CPU_SIZE=TINY, ACCELERATOR_SIZE=TINY)
    with tiny, patch("shoal.jobs.outcome.write_report", lambda run_dir: run_dir):
        train(job, world=world)
    spans = [json.loads(line) for line in Path(folder, "run/timeline.jsonl").read_text().splitlines()]
    records = read_metrics(Path(folder, "run/metrics.jsonl"))
    return [float(len(spans) > 0), *(step.loss for step in records.steps)]


def stages_by_time(world: World, folder: str) -> list[float]:
    """The parts of a model as they are timed; parts that communicate are not timed alone."""
    sample = {key: torch.as_tensor(value) for key, value in text()[0].items()}

    def parts(plan: Plan) -> list[float]:
        subject = Subject(GPT_OF_A_USE, causal_lm, sample, 2, precision("fp32"), plan)
        found = parts_of(subject, partial(torch.optim.AdamW, lr=1e-3), True, world.device)
        return [float(part.forward > 0 and part.backward > 0) for part in found]

    refused = ""
    try:
        parts(Plan(pp=2, tp=2))
    except UserError as error:
        refused = str(error)
    return [*parts(Plan(pp=2)), float(room.is_accelerator(world.device) == ("not timed alone on a GPU" in refused))]


def transports(world: World, folder: str) -> list[float]:
    """What no plan asks of the transport between accelerators."""
    group, rank, at = world.everyone, world.rank, world.device
    transport = group.transports[room.kind_of(at)]
    assert transport.carrier
    mine, cuts = torch.zeros(2, device=at), torch.arange(4.0, device=at)
    transport.scatter(mine, cuts if rank == 1 else None, 1)
    whole = torch.zeros(4, device=at) if rank == 0 else None
    transport.gather(whole, mine * 10, 0)
    here = torch.zeros(2, device=at)
    transport.exchange(here, rank, mine, rank)
    transport.broadcast(here, 0)
    here *= 2
    transport.barrier()
    return [*mine.tolist(), *here.tolist(), *([] if whole is None else whole.tolist())]


def hook_of_ddp(world: World, folder: str) -> list[float]:
    """torch's DistributedDataParallel with an algorithm that keeps something back."""
    store = dist.PrefixStore("ddp", world.store)
    dist.init_process_group(group_backend(world.device), store=store, rank=world.rank, world_size=world.size)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(world.device)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(*as_ddp_hook({"name": "topk", "ratio": 0.5}, ddp))
    ddp.logger = SimpleNamespace(set_runtime_stats_and_log=lambda: None)  # its clock needs a build with CUDA
    optimizer, losses = torch.optim.SGD(ddp.parameters(), lr=0.1), []
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + world.rank)).to(world.device)
        optimizer.zero_grad()
        loss = (ddp(x) - x[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def rate_of_a_link(world: World, folder: str) -> list[float]:
    return [float(link_rate(world.device) > 0)]


def rate_between_ranks(world: World, folder: str) -> list[float]:
    return [float(measure(world.everyone, world.device, (1 << 10,)).latency > 0)]


def answers(world: World, folder: str) -> dict[str, object]:
    """What the room of devices says of the accelerator that a process finds."""
    device = room.own_device(None, 0, 1)
    with patch.multiple("shoal.device.peak", CPU_SIZE=TINY, ACCELERATOR_SIZE=TINY, PEAK_SECONDS=0.0):
        peak = room.measure_peak_flops(device, torch.float32)
    room.allow_tf32(device)
    refused = []
    for asked in (f"{device.type}:7", "sim:7"):
        try:
            room.own_device(asked, 0, 1)
        except UserError as error:
            refused.append(str(error).partition(":")[0])
    query: Any = SimpleNamespace(is_cuda=True, device=device, dtype=torch.bfloat16, shape=(2, 64))
    with patch("torch.backends.cuda.is_flash_attention_available", lambda: True):
        flash = room.has_flash_attention(query)
    return {
        "own": [str(device), str(room.own_device(device.type, 0, 1)), str(room.any_device())],
        "name": room.hardware_name(device),
        "memory": (room.free_memory(device) or 0) > 0 and (room.total_memory(device) or 0) > 0,
        "capability": room.compute_capability(device),
        "attention": [room.attention_kernel(device, dtype) for dtype in (torch.bfloat16, torch.float32)],
        "flash": flash,
        "peak": peak > 0,
        "allocator": room.allocator(device),
        "refused": refused,
    }


def peaks(world: World, folder: str) -> list[bool]:
    """The most that was allocated, and the most that was asked for since it began anew."""
    device = world.device
    room.forget_most_allocated(device)
    large = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    del large
    room.begin_most_asked_for(device)
    small = torch.empty(1 << 10, dtype=torch.uint8, device=device)
    of_all, since = room.most_allocated(device), room.asked_for(device)[1]
    unnamed = room.most_allocated(torch.device(device.type))
    room.forget_most_allocated(torch.device(device.type))
    return [of_all >= 1 << 20, unnamed == of_all, small.nbytes <= since < 1 << 20, room.most_allocated(device) == since]


def measured_here(world: World) -> Cluster:
    """This device as a cluster, from measurements of small tensors that nobody keeps."""
    small = patch.multiple("shoal.planner.measure", COPIED=1 << 16, read=lambda _: None, keep=lambda *_: None)
    with small, patch("shoal.planner.measure._disk", lambda: 0.0), patch(WIDTHS, (8, 16)):
        return here(1, 1, torch.bfloat16, world.device)


def measured(world: World, folder: str) -> dict[str, object]:
    """A cluster of this device, from measurements of small tensors that nobody keeps."""
    (host,) = measured_here(world).hosts
    return {
        "formats": sorted(host.device.flops),
        "rates": min(*host.device.flops.values(), host.device.bandwidth, host.to_host) > 0,
        "on cores": host.device.on_host,
        "peak": room.most_allocated(world.device) == room.allocated(world.device),
    }
