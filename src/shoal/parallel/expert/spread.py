"""The distribution of experts over ranks that a plan's `ep` gives."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.comm import Group, Lane
from shoal.errors import UserError
from shoal.parallel.expert.dispatch import Dispatch


@dataclass(frozen=True)
class Spread:
    """Spreads experts over the ranks of `group`, in order, equally many each.

    `lane`: on it tokens are sent while something else is computed.
    """

    group: Group
    lane: Lane
    _dispatches: dict[int, Dispatch] = field(default_factory=dict)

    def share(self, name: str, number: int) -> tuple[int, int]:
        """Returns the experts [start, stop) of this rank, of `number`. Raises UserError if the ranks do not divide
        them."""
        ranks = self.group.size
        if number % ranks:
            fits = [degree for degree in range(1, number + 1) if number % degree == 0]
            raise UserError(
                f"{name} has {number} experts, which do not come out even among plan.ep = {ranks} ranks: take one of "
                f"{fits}"
            )
        each = number // ranks
        return self.group.rank * each, (self.group.rank + 1) * each

    def dispatch(self, number: int) -> Dispatch:
        """Returns the dispatch to `number` experts; all layers with as many share one."""
        if number not in self._dispatches:
            self._dispatches[number] = Dispatch(self.group, number, self.lane)
        return self._dispatches[number]
