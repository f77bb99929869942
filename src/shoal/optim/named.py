"""torch's optimizers by the names that job files and messages give them."""

from __future__ import annotations

import torch

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): getattr(torch.optim, name)
    for name in ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Adafactor")
}
"""torch's optimizers that update any parameter from its gradient alone."""
