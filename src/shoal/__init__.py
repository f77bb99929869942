"""Shoal trains one PyTorch model, written for one device, on whatever devices there are."""

from shoal import lr
from shoal.data import open_text
from shoal.engine import Engine, Evaluation
from shoal.errors import CheckpointError, LaunchError, ShoalError, TrainingError, UserError
from shoal.optimizer import decay_matrices_only
from shoal.plan import Plan
from shoal.step import StepResult

__all__ = [
    "CheckpointError",
    "Engine",
    "Evaluation",
    "LaunchError",
    "Plan",
    "ShoalError",
    "StepResult",
    "TrainingError",
    "UserError",
    "decay_matrices_only",
    "lr",
    "open_text",
]
