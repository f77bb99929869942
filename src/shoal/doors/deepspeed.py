"""Translates DeepSpeed's JSON (release 0.19): ZeRO stages, offload, precision, batch sizes, optimizer and schedule."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from shoal.doors.config import Settings, flag, inner, number
from shoal.doors.schedules import schedule
from shoal.errors import UserError, check_names, did_you_mean
from shoal.optim.fused.optimizer import OptimizerFactory
from shoal.optim.fused.trial import tried_out

CLIPPING = 1.0
"""DeepSpeed's default for the largest gradient norm."""
NOT_HERE = {
    "lamb": "torch has none: take AdamW, or give shoal.Engine a factory of one",
    "lion": "torch has none: take AdamW, or give shoal.Engine a factory of one",
    "muon": "it is Muon and Adam in one, and torch's takes matrices alone: give shoal.Engine a factory of an optimizer "
    "that is both, and param_groups that say which weights are whose",
    "onebitadam": 'give shoal.Engine Plan(exchange="qadam"), which is 1-bit Adam\'s kind',
    "onebitlamb": 'give shoal.Engine Plan(exchange="qadam")',
    "zerooneadam": 'give shoal.Engine Plan(exchange="qadam")',
    "muadam": "it is of the package mup: give shoal.Engine a factory of it",
    "muadamw": "it is of the package mup: give shoal.Engine a factory of it",
    "musgd": "it is of the package mup: give shoal.Engine a factory of it",
    "lbfgs": "it evaluates the loss several times a step",
    "sparseadam": "it takes sparse gradients only",
}
"""Optimizers of DeepSpeed or torch that this door refuses, and why."""


def translate(config: Mapping[str, Any], ranks: int) -> Settings:
    """Translates `config`, whose keys have been checked, for `ranks` ranks. Raises UserError for an invalid value."""
    zero = inner(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise UserError(f"zero_optimization.stage = {stage!r}: give 0, 1, 2 or 3")
    train, micro, steps = batch_sizes(config, ranks)
    scheduler = inner(config, "scheduler")
    return Settings(
        optimizer=_optimizer(inner(config, "optimizer")),
        plan={"zero": stage, "memory": _memory(zero, stage)},
        microbatches=steps,
        schedule=schedule(scheduler["type"], inner(scheduler, "scheduler.params")) if scheduler.get("type") else None,
        engine={
            "precision": _precision(config),
            "clip": number(config, "gradient_clipping", CLIPPING) or None,
            "global_batch": train,
            "microbatch": micro,
        },
    )


def batch_sizes(config: Mapping[str, Any], ranks: int) -> tuple[int, int, int]:
    """Returns (train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps).

    The first is the product of the others and `ranks`. Two of them give the third; one of the first two alone means one
    microbatch per step. Raises UserError where they contradict each other.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in names:
        value = config.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**63):
            raise UserError(f"{name} = {value!r:.100}: give a whole number of at least 1")
    given: list[Any] = [config.get(name) for name in names]
    train, micro, steps = given
    if train is None and micro is None:
        raise UserError(
            f"the configuration gives neither {names[0]} nor {names[1]}: give one of them, or any two of "
            f"{', '.join(names)}"
        )
    if train is not None:
        steps = steps or (train // (micro * ranks) if micro else 1)
        micro = micro or train // (steps * ranks)
    else:
        steps = steps or 1
        train = micro * steps * ranks
    if train != micro * steps * ranks:
        said = ", ".join(f"{name} = {config[name]}" for name in names if config.get(name) is not None)
        each = (given[1] or 1) * (given[2] or 1) * ranks
        multiple = f"a multiple of {each} as {names[0]}, such as {max(1, train // each) * each}"
        remedy = multiple if None in given else f"{names[0]} = {each}, or leave it out"
        raise UserError(
            f"{said} on {ranks} rank(s) do not fit: {names[0]} is {names[1]} x {names[2]} x ranks. Give {remedy}"
        )
    return train, micro, steps


def _memory(zero: Mapping[str, Any], stage: int) -> str | dict[str, Any] | None:
    """Returns `plan.memory`. With offloaded parameters the device has the budget "auto", otherwise none."""
    state, weights = (_home(zero, key) for key in ("offload_optimizer", "offload_param"))
    if state != "none" and stage == 0:
        raise UserError("zero_optimization.offload_optimizer needs stage 1, 2 or 3")
    if weights != "none" and stage != 3:
        raise UserError(f"zero_optimization.offload_param needs stage 3, this is {stage}")
    if weights == "nvme":
        raise UserError('zero_optimization.offload_param.device = "nvme": weights are at home on the host. Take "cpu"')
    memory: dict[str, Any] = {"device": "auto"} if weights == "cpu" else {}
    if state == "nvme":
        path = zero["offload_optimizer"].get("nvme_path")
        if not isinstance(path, str):
            raise UserError('zero_optimization.offload_optimizer.device = "nvme" needs nvme_path, a directory')
        return {**memory, "disk": {"path": path}}
    return memory if state == "cpu" or weights == "cpu" else None


def _home(zero: Mapping[str, Any], key: str) -> str:
    device = inner(zero, f"zero_optimization.{key}").get("device", "none")
    if device not in ("none", "cpu", "nvme"):
        raise UserError(f'zero_optimization.{key}.device = {device!r}: give "cpu", "nvme" or "none"')
    return device


def _precision(config: Mapping[str, Any]) -> str | dict[str, Any]:
    half, brain = inner(config, "fp16"), inner(config, "bf16" if "bf16" in config else "bfloat16")
    half_on, brain_on = flag(half, "fp16.enabled"), flag(brain, "bf16.enabled")
    if half_on and brain_on:
        raise UserError("fp16.enabled and bf16.enabled contradict each other: enable one of them")
    if brain_on:
        return "bf16"
    if not half_on:
        return "fp32"
    scaling = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
    return {"name": "fp16", **{key: half[key] for key in scaling if key in half}}


def _optimizer(table: Mapping[str, Any]) -> OptimizerFactory:
    if not table.get("type"):
        raise UserError(
            'the configuration names no optimizer: give optimizer = {"type": "AdamW", "params": {"lr": ...}}'
        )
    name, params = str(table["type"]), dict(inner(table, "optimizer.params"))
    if "max_grad_norm" in params:
        raise UserError(
            "optimizer.params.max_grad_norm: give gradient_clipping beside optimizer, as DeepSpeed wants it"
        )
    classes: dict[str, Any] = {
        key.lower(): each for key, each in vars(torch.optim).items() if inspect.isclass(each) and key != "Optimizer"
    }
    kind = name.lower()
    if kind in NOT_HERE:
        raise UserError(f'optimizer.type = "{name}" is refused: {NOT_HERE[kind]}')
    if kind not in classes:
        known = [each.__name__ for key, each in classes.items() if key not in NOT_HERE]
        raise UserError(f'optimizer.type = "{name}" is not one of {", ".join(known)}.{did_you_mean(name, known)}')
    if kind in ("adam", "adamw"):
        kind = _adam(kind, params)
    known = [key for key in inspect.signature(classes[kind]).parameters if key != "params"]
    check_names(f"{name} has no parameter", params, known)
    return tried_out(classes[kind], params, f"optimizer.params = {params!r:.300} of {name}")


def _adam(kind: str, params: dict[str, Any]) -> str:
    """Returns "adam" or "adamw", and removes DeepSpeed's own keys from `params`.

    DeepSpeed's "Adam" is AdamW unless adam_w_mode = false; its default weight decay is 0, not torch's 0.01.
    """
    for key, only in (("bias_correction", True), ("fp32_optimizer_states", True)):
        if params.pop(key, only) != only:
            raise UserError(f"optimizer.params.{key} = {not only} is refused: Shoal's Adam is torch's, with {key}")
    if not params.pop("torch_adam", False):
        params.setdefault("weight_decay", 0.0)
    return "adamw" if params.pop("adam_w_mode", True) or kind == "adamw" else "adam"
