"""What the engine is given, looked at before anything is built: an object of another library's kind is refused with
what to write instead."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from shoal.assembly.recipe import Recipe
from shoal.comm import Group, World
from shoal.data import Batch
from shoal.errors import ArgumentError, UserError, check_numbers
from shoal.plan import Plan

_NUMBERS = {
    "global_batch": Integral,
    "microbatch": Integral,
    "seed": Integral,
    "clip": Real,
    "clip_value": Real,
    "norms_every": Integral,
}


def check_arguments(given: Mapping[str, Any]) -> None:
    """The arguments of `Engine` by name. UserError for one of a wrong kind, with what to write."""
    if given["plan"] is not None:
        check_plan(given["plan"])
    check_world(given["world"])
    if not isinstance(given["model"], nn.Module) and not callable(given["model"]):
        raise ArgumentError(
            "model",
            f" is a {_kind(given['model'])}: give a torch module, or a function without arguments that makes one",
        )
    if not callable(given["loss"]):
        raise ArgumentError(
            "loss", f" is a {_kind(given['loss'])}: give a function loss(model, microbatch) that returns (sum, count)"
        )
    check_optimizer(given["optimizer"])
    if given["schedule"] is not None and not callable(given["schedule"]):
        raise ArgumentError(
            "schedule",
            f" is a {_kind(given['schedule'])}: give a function from the optimizer to a torch scheduler, e.g. "
            "schedule=shoal.optim.lr.cosine(total=1000, warmup=100) or "
            "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)",
        )
    if not isinstance(given["precision"], str | Mapping):
        name = str(given["precision"]).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
        raise ArgumentError(
            "precision", f" = {given['precision']!r}: give a name or a table with one, e.g. precision={name!r}"
        )
    for name in ("sync_bn", "keep_gradients"):
        if not isinstance(given[name], Integral):
            raise ArgumentError(name, f" = {given[name]!r}: give True or False")
    for name in ("param_groups", "collate"):
        if given[name] is not None and not callable(given[name]):
            raise ArgumentError(
                name, f" is a {_kind(given[name])}: give a function (see shoal.Engine), or leave it out"
            )
    if not isinstance(given["tensor_rules"], Mapping | None):
        raise ArgumentError(
            "tensor_rules",
            f" is a {_kind(given['tensor_rules'])}: give a table, from names of layers to how they are cut",
        )
    _check_numbers(given)


def check_plan(given: Any) -> None:
    """UserError for what is no Plan, with what to write."""
    if not isinstance(given, Plan):
        raise ArgumentError("plan", f" = {given!r} is a {_kind(given)}: write plan={_as_plan(given)}")


def check_world(given: Any) -> None:
    """UserError for what is no World, and not None."""
    if not isinstance(given, World | None):
        raise ArgumentError("world", f" = {given!r}: give what shoal.launch.join() returns, or leave it out")


def world_to_go_on(plan: Any, world: Any, now: World) -> World:
    """Returns the world of `engine.replan(plan, world)`, by default that of `now`. Raises UserError for a wrong kind of
    argument, and where more ranks are to go on than train in `now`."""
    check_plan(plan)
    check_world(world)
    if world is not None and world.size > now.size:
        raise UserError(
            f"engine.replan: {world.size} ranks are to go on, and {now.size} train: ranks join by engine.regroup, or "
            "by a checkpoint (engine.save here, then engine.load on an engine of all of them)"
        )
    return world or now


def check_regroup(plan: Any, world: Any, now: World) -> None:
    """UserError for a wrong kind of argument of `engine.regroup`, and for a world that ends with that of `now`."""
    check_plan(plan)
    check_world(world)
    if world is None or world is now:
        raise UserError(
            "engine.regroup goes on in a new world: give engine.world.without([1]) where rank 1 has failed, or a "
            "shoal.comm.World of all that come; to change the plan alone, engine.replan"
        )


def check_alike(recipe: Recipe, everyone: Group, failed: UserError | None = None) -> None:
    """UserError, on all ranks of `everyone` alike, where they were given other values of what decides who trains which
    samples, and how: one that joins may have been started otherwise. `failed`: why this rank could not build the model,
    which others may have done."""
    mine = {**recipe.settings(), "microbatch": recipe.microbatch, "sync_bn": recipe.sync_bn, "dropout": recipe.dropout}
    said = {name: repr(value) for name, value in mine.items()}, None if failed is None else str(failed)
    of_all = everyone.all_gather_object(said) if everyone.size > 1 else []
    if failed is not None:
        raise failed
    if why := next((why for _, why in of_all if why is not None), None):
        raise UserError(why)
    told = [settings for settings, _ in of_all]
    for rank, theirs in enumerate(told):
        for name, value in theirs.items():
            if value != told[0][name]:
                raise ArgumentError(
                    name, f" = {told[0][name]} on rank 0 and {value} on rank {rank}: give all ranks the same"
                )


def check_batch(batch: Any, step: int) -> None:
    """UserError for what is not the batch of this step."""
    if not isinstance(batch, Batch):
        raise UserError(
            f"engine.step was given a {_kind(batch)}, it takes the batches that the engine cuts for its ranks: "
            "for batch in engine.batches(dataset): engine.step(batch). A loop that loads its own data is "
            "shoal.initialize_engine (docs/doors.md)"
        )
    if batch.step != step:
        raise UserError(
            f"this batch is of step {batch.step}, the engine is at step {step}: take batches from engine.batches"
        )


def check_dataset(dataset: Any, *, indexed: bool) -> None:
    """UserError for what gives no samples. `indexed`: only a map-style dataset will do."""
    map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, DataLoader) and (indexed or dataset.batch_sampler is not None):
        raise UserError(
            "a DataLoader cuts batches by itself, which the engine does for all its ranks: give its dataset "
            "(loader.dataset)"
        )
    if not map_style and (indexed or not hasattr(dataset, "__iter__")):
        kinds = "" if indexed else ", or an iterable"
        raise UserError(
            f"a {_kind(dataset)} is no dataset: give one with __len__ and __getitem__{kinds}, of dicts of tensors"
        )


def check_max_batches(given: Any) -> None:
    """UserError for what is no number of batches, and not None."""
    if given is None:
        return
    if not isinstance(given, Integral) or isinstance(given, bool) or given < 1:
        raise ArgumentError("max_batches", f" = {given!r}: give 1 or more global batches, or None for all of them")


def check_save(keep: Any, extra: Any) -> None:
    """UserError for what is no number of checkpoints, or cannot be written beside one."""
    if not isinstance(keep, Integral) or isinstance(keep, bool) or keep < 1:
        raise ArgumentError("keep", f" = {keep!r}: give the number of newest checkpoints to keep, at least 1")
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            "extra",
            f" is not JSON data: {error}. Give numbers, texts, lists and dicts of them; tensors and objects are saved "
            "by engine.state(name, thing)",
        ) from error


def _check_numbers(given: Mapping[str, Any]) -> None:
    """Raises ArgumentError for what is no number, and for one beyond the bounds of a job's."""
    for name, kind in _NUMBERS.items():
        value = given[name]
        if (value is None and name not in ("global_batch", "seed", "norms_every")) or (
            name == "clip" and callable(value)
        ):
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ArgumentError(
                name, f" = {value!r} is a {_kind(value)}: give a {'whole ' if kind is Integral else ''}number"
            )
        if value != math.inf:  # a clip without an effect
            check_numbers(name, value)
        if name.startswith("clip") and not float(value) > 0:
            raise ArgumentError(name, f" = {value!r}: give a number above 0, or None for no clipping")
        if name == "norms_every" and value < 0:
            raise ArgumentError(name, f" = {value}: give 0 or more")
    check_numbers("precision", given["precision"])
    if given["plan"] is not None:
        check_numbers("plan", given["plan"].to_dict())


def check_optimizer(given: Any) -> None:
    """Raises ArgumentError for what makes no optimizer: a ready one, or a name."""
    if isinstance(given, torch.optim.Optimizer):
        raise ArgumentError(
            "optimizer",
            f" is a ready {_kind(given)}: it is made here, over the parameters as they are kept. "
            f"Write optimizer={_as_factory(given)}"
            + (", and param_groups= for the options of each group" if len(given.param_groups) > 1 else ""),
        )
    if not callable(given):
        by_name = {name.lower(): name for name in vars(torch.optim)}
        meant = by_name.get(str(given).lower(), "AdamW")
        raise ArgumentError(
            "optimizer",
            f" = {given!r} is a {_kind(given)}: give a torch.optim.Optimizer class with its options, e.g. "
            f"optimizer=partial(torch.optim.{meant}, lr=3e-4)",
        )


def _as_factory(ready: torch.optim.Optimizer) -> str:
    """The expression that makes such an optimizer: its class, and of its options those that are not the class's own.
    Those of its only group are its options; of several groups each has its own."""
    only = ready.param_groups[0] if len(ready.param_groups) == 1 else {}
    own = {name: each.default for name, each in inspect.signature(type(ready)).parameters.items()}
    given = {key: only.get(key, value) for key, value in ready.defaults.items()}
    chosen = {key: value for key, value in given.items() if key in own and value != own[key]}
    options = "".join(f", {key}={value!r}" for key, value in chosen.items())
    where = "torch.optim" if type(ready).__module__.startswith("torch.optim") else type(ready).__module__
    name = f"{where}.{type(ready).__qualname__}"
    return f"partial({name}{options})" if options else name


def _as_plan(given: Any) -> str:
    """A Plan as one writes it: of a table its keys, of a text such as "dp=2, tp=2" the same."""
    if isinstance(given, Mapping) and given:
        return f"shoal.Plan({', '.join(f'{key}={value!r}' for key, value in given.items())})"
    parts = [part.strip() for part in given.split(",")] if isinstance(given, str) else []
    if parts and all(part.count("=") == 1 and part.split("=")[0].strip().isidentifier() for part in parts):
        return f"shoal.Plan({', '.join(parts)})"
    return "shoal.Plan(dp=2)" if not isinstance(given, int) else f"shoal.Plan(dp={given})"


def _kind(value: Any) -> str:
    return type(value).__name__
