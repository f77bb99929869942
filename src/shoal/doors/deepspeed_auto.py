"""Fills in the values "auto" of DeepSpeed's JSON, which the Trainer of transformers replaces by its arguments.

Values that follow from the file itself are filled in as the Trainer does; for others the error names its argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import UserError

BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

DEFINED = {
    "scheduler.params.warmup_min_lr": "0, as the Trainer has it",
    "scheduler.params.warmup_max_lr": "optimizer.params.lr",
    **dict.fromkeys(BATCH_SIZES, "by the others, of which at least one is a number"),
}
"""Values "auto" that follow from the file itself, and how."""

ARGUMENTS = {
    "train_batch_size": "per_device_train_batch_size, times gradient_accumulation_steps and the ranks",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "[adam_beta1, adam_beta2]",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps, or the steps of num_train_epochs",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
"""Values "auto" that come from the Trainer's arguments, which the file does not have."""


def filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config` with the values "auto" filled in that follow from the file itself.

    Raises UserError for a value "auto" that comes from the Trainer's arguments.
    """
    found = dict(config)
    if any(isinstance(found.get(name), int) for name in BATCH_SIZES[:2]):
        found = {key: value for key, value in found.items() if key not in BATCH_SIZES or value != "auto"}
    for name in ("optimizer", "scheduler"):
        table = found.get(name)
        if isinstance(table, Mapping) and isinstance(table.get("params"), Mapping):
            found[name] = {**table, "params": dict(table["params"])}
    rates, schedule = (_params(found, name) for name in ("optimizer", "scheduler"))
    if schedule.get("warmup_min_lr") == "auto":
        schedule["warmup_min_lr"] = 0.0
    if schedule.get("warmup_max_lr") == "auto" and "lr" in rates:
        schedule["warmup_max_lr"] = rates["lr"]
    missing = [f"{name} (its {argument})" for name, argument in ARGUMENTS.items() if _is_auto(found, name)]
    if missing:
        raise UserError(
            '"auto" is what the Trainer of transformers fills in from its arguments, which this file does not hold. '
            f"Give the values that your TrainingArguments have, for {'; '.join(missing)}"
        )
    return found


def _is_auto(config: Any, name: str) -> bool:
    for part in name.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return isinstance(config, str) and config == "auto"


def _params(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the parameters of the optimizer or scheduler; empty where there is no such table."""
    table = config.get(name)
    params = table.get("params") if isinstance(table, Mapping) else None
    return params if isinstance(params, dict) else {}
