"""What the users of other frameworks write for the job of `recovery`: one worker of torchrun, TorchFT or Ray Train.

    python -m benchmarks.recovery_worker KIND FOLDER [PLACE LIGHTHOUSE]

All train the same GPT on the same rows, with SGD and momentum, and save a checkpoint each SAVE steps where the
framework has workers start again from one. Each committed step is a line in FOLDER/commits-PID: Unix time, step, number
of workers.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.models import GPT, GPTConfig, causal_lm

LAYERS, WIDTH, HEADS, VOCABULARY, SEQUENCE = 1, 16, 2, 258, 16
GLOBAL_BATCH, STEPS, SAVE, LEARNING_RATE = 8, 1_000_000, 50, 1e-3


class Commits:
    """The committed steps of this process, one line each."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"commits-{os.getpid()}").open("a", buffering=1)

    def add(self, step: int, world: int) -> None:
        self._file.write(f"{time.time()} {step} {world}\n")


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(VOCABULARY, SEQUENCE, LAYERS, WIDTH, HEADS))
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def rows(step: int, rank: int, world: int) -> dict[str, Tensor]:
    """The share of a worker of the rows of a step."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=draw)[rank::world]
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def loss_of(model: Any, step: int, rank: int, world: int) -> Tensor:
    total, count = causal_lm(model, rows(step, rank, world))[:2]
    return total / count


def torchrun(folder: Path) -> None:
    """DDP over gloo, as torchrun's guide to elastic training has it: a snapshot that all load when they start again."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = make()
    saved, first = folder / "snapshot.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    replica, commits = nn.parallel.DistributedDataParallel(model), Commits(folder)
    for step in range(first, STEPS):
        loss_of(replica, step, rank, world).backward()
        optimizer.step()
        optimizer.zero_grad()
        commits.add(step + 1, world)
        if rank == 0 and (step + 1) % SAVE == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").rename(saved)


def torchft(folder: Path, place: int, lighthouse: str) -> None:
    """A replica group of one process, as TorchFT's train_ddp.py has it; one that comes gets the state of another."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    model, optimizer = make()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica{place}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
    )
    replica, stepper, commits = DistributedDataParallel(manager, model), Optimizer(manager, optimizer), Commits(folder)
    while (step := manager.current_step()) < STEPS:
        stepper.zero_grad()
        loss_of(replica, step, place, 4).backward()
        stepper.step()
        if manager.current_step() > step:
            commits.add(manager.current_step(), manager.num_participants())


def ray_train(folder: Path) -> None:
    """Ray Train's TorchTrainer with 4 workers and any number of failures; a checkpoint is reported each SAVE steps."""
    import ray
    import ray.train
    from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def work(config: dict[str, Any]) -> None:
        import tempfile

        context = ray.train.get_context()
        rank, world = context.get_world_rank(), context.get_world_size()
        model, optimizer = make()
        first = 0
        if (checkpoint := ray.train.get_checkpoint()) is not None:
            with checkpoint.as_directory() as directory:
                state = torch.load(Path(directory) / "state.pt", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first = state["step"]
        replica, commits = nn.parallel.DistributedDataParallel(model), Commits(Path(config["folder"]))
        for step in range(first, STEPS):
            loss_of(replica, step, rank, world).backward()
            optimizer.step()
            optimizer.zero_grad()
            commits.add(step + 1, world)
            if (step + 1) % SAVE == 0:
                with tempfile.TemporaryDirectory() as directory:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(state, Path(directory) / "state.pt")
                    ray.train.report({}, checkpoint=Checkpoint.from_directory(directory) if rank == 0 else None)

    ray.init(num_cpus=5, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        work,
        train_loop_config={"folder": str(folder)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=4),
        run_config=RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=-1)),
    )
    trainer.fit()


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, where, *more = sys.argv[1:]
    if kind == "torchrun":
        torchrun(Path(where))
    elif kind == "torchft":
        torchft(Path(where), int(more[0]), more[1])
    else:
        ray_train(Path(where))
