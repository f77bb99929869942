"""What a loop written for PatrickStar or DeepSpeed holds in its hands: a model and an optimizer over one engine."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.whole import put_whole, whole_state
from shoal.doors.schedules import Schedule
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.training.result import StepResult


class Model(nn.Module):
    """The model of `engine`, whose loop is the caller's: `microbatches` times `loss = model(...)`, `model.backward(loss)`, `model.step()` make a step.

    `module` is the model itself, on its device; `optimizer` the optimizer; `lr_scheduler` what `schedule` made, stepped after each update;
    `result` what the last step did. State dicts and checkpoints are for all ranks together, between steps.
    """

    def __init__(
        self, engine: Engine, microbatches: int = 1, schedule: Callable[[torch.optim.Optimizer], Schedule] | None = None
    ) -> None:
        super().__init__()
        self.engine, self.module, self._loop = engine, engine.module, engine.loop(microbatches)
        self.result: StepResult | None = None
        self.optimizer = Optimizer(engine, self._update)
        self.lr_scheduler = schedule(self.optimizer) if schedule else None
        self.train()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns. Without gradients (`torch.no_grad`) it belongs to no step."""
        return self._loop(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Backward of `loss`, the mean over this rank's microbatch. Gradients are averaged over ranks and microbatches."""
        self._loop.backward(loss)

    def step(self) -> None:
        """Updates after the step's last microbatch, before it nothing. Raises UserError without a backward before it, TrainingError on a loss or
        gradient that is not finite."""
        self.optimizer.step()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the microbatch under way, up to its `step()`, is the step's last one: that `step()` updates."""
        return self._loop.at_boundary

    def gradient_accumulation_steps(self) -> int:
        return self._loop.microbatches

    def _update(self) -> None:
        result = self._loop.step()
        if result is not None:
            self.result = result
            if self.lr_scheduler is not None and not result.skipped:
                self.lr_scheduler.step()

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """All weights, fp32 masters, and buffers by the model's own names, whole, on every rank's CPU."""
        self._loop.close_step()
        self.engine.optimizer.settle()
        return whole_state(self.module, self.engine.parts.chunks)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = False, assign: bool = False) -> Any:
        """Takes weights and buffers, the same on every rank. Returns torch's (missing_keys, unexpected_keys); if `strict`, UserError for any."""
        self._loop.close_step()
        self.engine.optimizer.settle()
        return nn.modules.module._IncompatibleKeys(*put_whole(self.module, self.engine.parts.chunks, state_dict, strict))

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | None = None, client_state: Mapping[str, Any] | None = None
    ) -> None:
        """Writes a checkpoint of Shoal's below `save_dir`, or below `save_dir/tag`; none that is there is deleted. `client_state`: JSON."""
        self._loop.close_step()
        schedule = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        extra = {"client_state": dict(client_state or {}), "lr_scheduler": schedule}
        self.engine.save(Path(save_dir, tag or ""), keep=sys.maxsize, extra=extra)

    def load_checkpoint(self, load_dir: str | Path, tag: str | None = None) -> tuple[str, dict[str, Any]]:
        """Reads the newest good checkpoint there, written under any plan. Returns its directory and its client state; CheckpointError if there is none."""
        self._loop.close_step()
        path = Path(load_dir, tag or "")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*samples will not come exactly once")  # which come is the caller's affair
            extra = self.engine.load(path)
        if self.lr_scheduler is not None and extra.get("lr_scheduler"):
            self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        return str(path), extra.get("client_state", {})

    def close(self) -> None:
        """Ends background work."""
        self.engine.close()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise UserError(
            "the model is on its device and in its precision, in chunks that stay where they are: drop .to(), .cuda(), .half() and the like"
        )


class Optimizer(torch.optim.Optimizer):
    """The optimizer of `engine` as torch's schedulers and loops know one; its groups can be read and changed. `update` is what `step` does."""

    def __init__(self, engine: Engine, update: Callable[[], None]) -> None:
        self._engine, self._update = engine, update  # the parent would want parameters of its own

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._engine.optimizer.torch.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._engine.optimizer.torch.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._engine.optimizer.torch.defaults

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """As `Model.step`."""
        if closure is not None:
            raise UserError("optimizer.step takes no closure here: forward and backward are the model's")
        self._update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients begin anew with each step, and those of a step under way stay."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UserError("parameters cannot be added later: the engine lays all of them out in chunks when it is made")

    def state_dict(self) -> dict[str, Any]:
        """Options and state of what this rank owns, for the same rank under the same plan. For any plan: `Model.save_checkpoint`."""
        scale = self._engine.loss_scale
        return {
            "owner": self._owner(),
            "optimizer": self._engine.optimizer.state_dict(),
            "loss_scale": scale.state() if scale is not None else None,
            "step": self._engine.step_index,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave. UserError for that of another rank or plan."""
        if state_dict["owner"] != self._owner():
            raise UserError(
                f"this state is of {state_dict['owner']}, here it is {self._owner()}: each rank loads its own, under the same plan. "
                "model.save_checkpoint and load_checkpoint go between any plans"
            )
        self._engine.optimizer.settle()
        self._engine.optimizer.torch.load_state_dict(state_dict["optimizer"])
        if self._engine.loss_scale is not None and state_dict["loss_scale"] is not None:
            self._engine.loss_scale.load(state_dict["loss_scale"])
        self._engine.step_index = state_dict["step"]

    def _owner(self) -> dict[str, Any]:
        world = self._engine.world
        return {"rank": world.rank, "ranks": world.size, "plan": self._engine.plan.to_dict()}
