"""The sums of a step on this rank, and the number that backward starts from.

The loss gives (sum, count), so a step's numbers do not depend on how its samples were split: the objective is the sum
of all sums over the sum of all counts. Before backward each sum is divided by a power of two near the expected count,
so that low precision does not overflow; the exact factor comes with the clip coefficient in one multiplication. The
power of two cancels exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.errors import UserError
from shoal.precision import LossScale
from shoal.training.loss import Sums


class Totals:
    """Adds up what the loss returns of each microbatch.

    - `sees_loss`: the loss is computed on this rank, which in a pipeline the last stage does
    - `values`: (sum, count, auxiliary numerators ...), fp64 [2 + auxiliary losses]
    - `names`: of the auxiliary losses; None until a loss has told them
    - `ran`: microbatches that count, so far in this step
    - `expected`: what sums are divided by before backward
    - `agreed`: all ranks know the names
    """

    def __init__(self, device: torch.device, scale: LossScale | None, sees_loss: bool) -> None:
        self._device, self._scale, self._sees_loss = device, scale, sees_loss
        self.names: tuple[str, ...] | None = None
        self.values = torch.zeros(2, dtype=torch.float64, device=device)
        self.ran, self.expected, self.agreed = 0, 1.0, False

    def begin(self, expected: float, exactly: bool) -> None:
        """Begins a step that counts about `expected` over all ranks.

        `exactly`: sums are divided by just that, since gradients of other steps are added, in the unit of their mean.
        """
        self.ran = 0
        self.expected = max(1e-6, expected) if exactly else 2.0 ** round(math.log2(max(1.0, expected)))
        self.values = torch.zeros(2 + len(self.names or ()), dtype=torch.float64, device=self._device)

    @property
    def scale(self) -> Tensor | None:
        """What the loss is multiplied by (0-dim); None without loss scaling."""
        return None if self._scale is None else self._scale.scale

    @property
    def unscale(self) -> Tensor | None:
        """What gradients are multiplied by before they are exchanged (0-dim)."""
        return None if self._scale is None else self._scale.scale.reciprocal()

    def objective(self, sums: Sums) -> Tensor:
        """Adds `sums`, and returns what backward starts from."""
        self._add(sums)
        objective = sums.total / self.expected
        for value in sums.aux.values():
            objective = objective + value * (sums.count / self.expected)
        return objective if self._scale is None else objective * self._scale.scale.to(objective.dtype)

    def own_mean(self) -> Tensor:
        """What turns this rank's gradients so far into those of their mean (0-dim); 1 where it does not see the
        loss."""
        count = self.values[1]
        known = self.ran and self._sees_loss
        return torch.where(count > 0, self.expected / count, 0.0) if known else torch.ones_like(count)

    def learn(self, names: tuple[str, ...] | None) -> None:
        """Takes the names of the auxiliary losses from a rank that has run one."""
        if self.names is None:
            self.names = names or ()
            self.values = torch.cat([self.values, self.values.new_zeros(len(self.names))])

    def _add(self, sums: Sums) -> None:
        names = tuple(sums.aux)
        self.learn(names)
        if names != self.names:
            raise UserError(
                f"loss returned the auxiliary losses {names}, before it was {self.names}: return the same each time"
            )
        if sums.count.requires_grad:
            raise UserError(
                "loss returned a count that depends on the weights: no gradient goes through the division by it, which "
                "comes once, over all microbatches. Detach it, or return the quotient as a sum, with what that counts"
            )
        row = [sums.total.detach(), sums.count, *(value.detach() * sums.count for value in sums.aux.values())]
        self.values = self.values + torch.stack([item.double() for item in row])
