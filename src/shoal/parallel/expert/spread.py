"""Which experts a rank has, of a plan's `ep`."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.comm import Group, Lane
from shoal.errors import UserError
from shoal.parallel.expert.dispatch import Dispatch


@dataclass(frozen=True)
class Spread:
    """Experts are spread over the ranks of `group`, in order, as many each; tokens travel on `lane` where something is computed meanwhile."""

    group: Group
    lane: Lane
    _dispatches: dict[int, Dispatch] = field(default_factory=dict)

    def share(self, name: str, number: int) -> tuple[int, int]:
        """The experts [start, stop) of this rank, of `number`. UserError if they do not come out even."""
        ranks = self.group.size
        if number % ranks:
            fits = [degree for degree in range(1, number + 1) if number % degree == 0]
            raise UserError(
                f"{name} has {number} experts, which do not come out even among plan.ep = {ranks} ranks: take one of {fits}"
            )
        each = number // ranks
        return self.group.rank * each, (self.group.rank + 1) * each

    def dispatch(self, number: int) -> Dispatch:
        """To `number` experts; the layers that have as many take turns with one."""
        if number not in self._dispatches:
            self._dispatches[number] = Dispatch(self.group, number, self.lane)
        return self._dispatches[number]
