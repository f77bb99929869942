"""What an engine was given beside model, plan and world: how to train, on whatever ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from shoal.data.loader import Collate
from shoal.errors import ArgumentError
from shoal.optim.groups import GroupRule, OptimizerFactory
from shoal.optim.lr import Schedule
from shoal.parallel.tensor import Rules
from shoal.precision import Precision
from shoal.precision import precision as precision_named
from shoal.training.loss import Loss
from shoal.training.norms import ClipRule

SAME = "same"
"""Stands for the microbatch that was given before."""


@dataclass(frozen=True)
class Recipe:
    """The arguments of `Engine` by their names there. `microbatch`: as it was given, None where the engine chooses."""

    loss: Loss
    optimizer: OptimizerFactory
    global_batch: int
    microbatch: int | None
    precision: Precision
    seed: int
    clip: float | ClipRule | None
    clip_value: float | None
    schedule: Schedule | None
    param_groups: GroupRule | None
    tensor_rules: Rules | None
    sync_bn: bool
    dropout: str
    buffers: str
    keep_gradients: bool
    norms_every: int
    collate: Collate | None

    @classmethod
    def taken_from(cls, arguments: Mapping[str, Any]) -> Recipe:
        """The recipe in the `arguments` of `Engine`. Raises UserError for a rule of buffers or a precision that there
        is not."""
        own = {field.name: arguments[field.name] for field in fields(cls)}
        if own["buffers"] not in ("exact", "averaged"):
            said = '"exact" refuses what ranks cannot have as one process would, "averaged" takes the mean'
            raise ArgumentError("buffers", f' = "{own["buffers"]}": {said}')
        return cls(**{**own, "precision": precision_named(own["precision"])})

    def dealt(self, microbatch: int | str | None) -> Recipe:
        """The recipe with another microbatch; SAME leaves it as it is."""
        return self if isinstance(microbatch, str) else replace(self, microbatch=microbatch)

    @property
    def even(self) -> bool:
        """Whether a step's samples are dealt out as evenly as can be, not in microbatches of one fixed cut."""
        return self.microbatch is None or self.sync_bn

    @property
    def by_name(self) -> str | None:
        """What asks for gradients by name; None for nothing."""
        asks = {"clip by a function": callable(self.clip), "keep_gradients": self.keep_gradients}
        asks["norms_every"] = self.norms_every > 0
        return next((what for what, is_so in asks.items() if is_so), None)

    def settings(self) -> dict[str, Any]:
        """What a checkpoint records of it, and says when it was another."""
        clip: Any = getattr(self.clip, "__qualname__", "a function") if callable(self.clip) else self.clip
        scaling = {} if self.precision.scaling is None else asdict(self.precision.scaling)
        return {
            "global_batch": self.global_batch,
            "seed": self.seed,
            "precision": self.precision.name,
            "clip": clip,
            "clip_value": self.clip_value,
            **{f"precision.{key}": value for key, value in scaling.items()},
        }
