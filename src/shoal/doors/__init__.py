"""Doors: adapters for code written for other frameworks, with their configuration and loop over Shoal's engine.

config (dict, or path of a JSON file) -> patrickstar or deepspeed: keys checked, Settings -> Engine -> Model, Optimizer
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.comm import World
from shoal.device import accelerators
from shoal.doors import deepspeed, deepspeed_keys, patrickstar
from shoal.doors.config import Settings, check_keys
from shoal.doors.deepspeed_auto import filled
from shoal.doors.model import Model, Optimizer
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.launch import join
from shoal.plan import Plan
from shoal.training.loop import callers_loss

__all__ = ["Model", "Optimizer", "initialize_engine"]


def initialize_engine(
    model_func: nn.Module | Callable[[], nn.Module],
    local_rank: int | None,
    config: Mapping[str, Any] | str | Path | None = None,
    client: None = None,
    *,
    world: World | None = None,
) -> tuple[Model, Optimizer]:
    """Returns the model and the optimizer for PatrickStar's or DeepSpeed's loop, given the framework's configuration:

        optimizer.zero_grad(); loss = model(data); model.backward(loss); optimizer.step()

    model_func: a factory without arguments, or a module.
    local_rank: this process among those of its host, and its GPU; None or -1: from the launcher.
    config: a dict, or the path of a JSON file. A key that only DeepSpeed has makes it DeepSpeed's; otherwise it is
        PatrickStar's.
    client: PatrickStar's; has to be None.
    world: by default from the launcher's variables.

    The seed is rank 0's `torch.initial_seed()`. Raises UserError for an unknown, refused or contradictory key or value.
    """
    if client is not None:
        raise UserError("client: Shoal has none to orchestrate, the engine makes its chunks itself; leave it out")
    world = world or _join(local_rank)
    settings = _settings({} if config is None else config, world)
    engine = Engine(
        model_func,
        callers_loss,
        settings.optimizer,
        Plan(dp=world.size, **settings.plan),
        world=world,
        seed=world.everyone.broadcast_object(torch.initial_seed()),
        buffers="averaged",
        **{"global_batch": world.size, "microbatch": 1, **settings.engine},
    )
    model = Model(engine, settings.microbatches, settings.schedule)
    return model, model.optimizer


def _settings(config: Mapping[str, Any] | str | Path, world: World) -> Settings:
    table = config if isinstance(config, Mapping) else _read(Path(config))
    own = [key for key in table if key in patrickstar.OWN]
    theirs = sorted(
        {key.split(".")[0] for key in deepspeed_keys.KEYS} - {key.split(".")[0] for key in patrickstar.KEYS}
    )
    foreign = [key for key in table if key in theirs]
    if own and foreign:
        raise UserError(
            f"{own[0]} is a key of PatrickStar's configuration, {foreign[0]} of DeepSpeed's: give one or the other"
        )
    if foreign:
        table = filled(table)
        check_keys(table, deepspeed_keys.KEYS, "DeepSpeed's configuration")
        return deepspeed.translate(table, world.size)
    check_keys(table, patrickstar.KEYS, "PatrickStar's configuration", deepspeed_keys.KEYS)
    return patrickstar.translate(table, world.device)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read the configuration {path}: {error}") from error
    if not isinstance(table, Mapping):
        raise UserError(f"the configuration {path} is a JSON {type(table).__name__}, not an object")
    return table


def _join(local_rank: int | None) -> World:
    """Joins the launcher's world; a single process uses the GPU `local_rank`."""
    world = join()
    if local_rank is None or local_rank == -1 or local_rank == world.local_rank:
        return world
    if world.size > 1:
        raise UserError(
            f"local_rank = {local_rank}, but the launcher says {world.local_rank}: pass "
            "int(os.environ['LOCAL_RANK']), or None"
        )
    found = accelerators()
    if not found:
        return world
    if not 0 <= local_rank < len(found):
        raise UserError(f"local_rank = {local_rank}: this host has the GPUs 0 to {len(found) - 1}")
    return World.single(found[local_rank])
