"""An algorithm made of others, each for some of the chunks or among some of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shoal.exchange.algorithm import Algorithm, Holds


@dataclass(kw_only=True)
class Composed(Algorithm):
    """Runs several algorithms as one.

    - `first`: says what chunks hold at an update; set when it is made
    - `parts`: all that are attached, `first` before the others; set by `attach`
    """

    first: Algorithm = field(init=False, repr=False, compare=False)
    parts: Sequence[Algorithm] = field(init=False, default=(), repr=False, compare=False)

    def holds(self, step: int) -> Holds:
        return self.first.holds(step)

    @property
    def keeps_back(self) -> bool:
        return self.first.keeps_back

    def begin(self, step: int) -> None:
        for part in self.parts:
            part.begin(step)

    def exchanged(self, step: int, to_mean: Tensor) -> None:
        for part in self.parts:
            part.exchanged(step, to_mean)

    def due(self, step: int, untouched: Sequence[str]) -> Sequence[str]:
        due = [part.due(step, untouched) for part in self.parts]
        return due[0] if due else untouched

    def renew(self, to_mean: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None:
        for part in self.parts:
            part.renew(to_mean, skip, untouched)

    def end(self, step: int) -> None:
        for part in self.parts:
            part.end(step)

    def settle(self) -> None:
        for part in self.parts:
            part.settle()

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def begin_anew(self) -> None:
        for part in self.parts:
            part.begin_anew()

    def restored(self) -> None:
        for part in self.parts:
            part.restored()
