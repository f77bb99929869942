"""The model and the optimizer, over one engine, for loops written for PatrickStar or DeepSpeed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from shoal.assembly.assembled import Assembled
from shoal.assembly.own_loops import check_loop
from shoal.checkpoint.whole import put_whole, whole_state
from shoal.device import moving_calls
from shoal.doors.schedules import Schedule
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.training.result import StepResult


class Model(nn.Module):
    """The model of `engine` for a loop of the caller. A step is `microbatches` times `loss = model(...)`,
    `model.backward(loss)`, `model.step()`.

    module: the model itself, on its device.
    optimizer: the optimizer, as torch's schedulers know one.
    lr_scheduler: made by `schedule`, stepped after each update.
    result: the StepResult of the last step.

    State dicts and checkpoints are collective calls, between steps.
    """

    def __init__(
        self, engine: Engine, microbatches: int = 1, schedule: Callable[[torch.optim.Optimizer], Schedule] | None = None
    ) -> None:
        super().__init__()
        self.engine, self.module, self._loop = engine, engine.module, engine.loop(microbatches)
        engine.followers.add(self)
        self.result: StepResult | None = None
        self.optimizer = Optimizer(engine, self._update)
        self.lr_scheduler = schedule(self.optimizer) if schedule else None
        self.train()

    def check(self, new: Assembled) -> None:
        """Raises UserError where the engine's new plan does not go with a loop of the caller's."""
        check_loop(new.local.ranks.plan, self._loop.microbatches, new.memory.precision)

    def follow(self) -> None:
        """Goes on with the engine's module and steps under its new plan (see Engine.replan)."""
        self.module, self._loop = self.engine.module, self.engine.loop(self._loop.microbatches)
        self.module.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Puts the model in training or evaluation mode. Raises UserError where that writes to weights, and goes
        wrong."""
        if mode != self.training:
            self._loop.switch(mode)
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model. A forward without gradients (`torch.no_grad`) is not part of a step."""
        return self._loop(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Runs backward of `loss`, a mean over this rank's microbatch. Gradients are averaged over the whole step."""
        self._loop.backward(loss)

    def step(self) -> None:
        """Updates the weights after the step's last microbatch, and does nothing after the others. Raises UserError
        without a backward before it, TrainingError where the loss or a gradient is not finite."""
        self.optimizer.step()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns whether the current microbatch is the last of its step, so that its `step()` updates."""
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
        """Returns all weights (fp32 masters) and buffers by the model's own names, whole, on every rank's CPU."""
        self._loop.close_step()
        self.engine.optimizer.settle()
        return whole_state(self.module, self.engine.parts.chunks)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = False, assign: bool = False) -> Any:
        """Loads weights and buffers, the same on every rank. Returns torch's (missing_keys, unexpected_keys).

        Raises UserError for any such key if `strict`.
        """
        self._loop.close_step()
        self.engine.optimizer.settle()
        return nn.modules.module._IncompatibleKeys(
            *put_whole(self.module, self.engine.parts.chunks, state_dict, strict)
        )

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | None = None, client_state: Mapping[str, Any] | None = None
    ) -> None:
        """Writes a checkpoint below `save_dir`, or `save_dir/tag`; keeps all earlier ones. `client_state`: JSON."""
        self._loop.close_step()
        schedule = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        extra = {"client_state": dict(client_state or {}), "lr_scheduler": schedule}
        self.engine.save(Path(save_dir, tag or ""), keep=sys.maxsize, extra=extra)

    def load_checkpoint(self, load_dir: str | Path, tag: str | None = None) -> tuple[str, dict[str, Any]]:
        """Loads the newest good checkpoint there, written under any plan; returns its directory and client state.

        Raises CheckpointError if there is none.
        """
        self._loop.close_step()
        path = Path(load_dir, tag or "")
        with warnings.catch_warnings():
            # The caller chooses the samples.
            warnings.filterwarnings("ignore", message=".*samples will not come exactly once")
            extra = self.engine.load(path)
        if self.lr_scheduler is not None and extra.get("lr_scheduler"):
            self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        return str(path), extra.get("client_state", {})

    def close(self) -> None:
        """Ends background work."""
        self.engine.close()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise UserError(
            "the model is on its device and in its precision, in chunks that stay where they are: drop "
            f"{', '.join(moving_calls())}, .half() and the like"
        )


class Optimizer(torch.optim.Optimizer):
    """The optimizer of `engine` as a torch optimizer; its groups can be read and changed. `step` calls `update`."""

    def __init__(self, engine: Engine, update: Callable[[], None]) -> None:
        self._engine, self._update = engine, update  # without the parent's constructor, which needs parameters

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
        """Calls `Model.step`."""
        if closure is not None:
            raise UserError("optimizer.step takes no closure here: forward and backward are the model's")
        self._update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: gradients start at zero with each step, and those of the current step stay."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UserError("parameters cannot be added later: the engine lays all of them out in chunks when it is made")

    def state_dict(self) -> dict[str, Any]:
        """Returns options and state of this rank's part, for the same rank under the same plan.

        For any plan use `Model.save_checkpoint`.
        """
        scale = self._engine.loss_scale
        return {
            "owner": self._owner(),
            "optimizer": self._engine.optimizer.state_dict(),
            "loss_scale": scale.state() if scale is not None else None,
            "step": self._engine.step_index,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a result of `state_dict`. Raises UserError for that of another rank or plan."""
        if state_dict["owner"] != self._owner():
            raise UserError(
                f"this state is of {state_dict['owner']}, here it is {self._owner()}: each rank loads its own, under "
                "the same plan. model.save_checkpoint and load_checkpoint go between any plans"
            )
        self._engine.optimizer.settle()
        self._engine.optimizer.torch.load_state_dict(state_dict["optimizer"])
        if self._engine.loss_scale is not None and state_dict["loss_scale"] is not None:
            self._engine.loss_scale.load(state_dict["loss_scale"])
        self._engine.step_index = state_dict["step"]

    def _owner(self) -> dict[str, Any]:
        world = self._engine.world
        return {"rank": world.rank, "ranks": world.size, "plan": self._engine.plan.to_dict()}
