"""Placements: what of a chunk's weights lies on which rank.

    Replicated   every rank has all of it and owns all of it
    Sharded      each rank owns a stretch; the whole weights are on every rank, or once in memory of all (ZeRO 1, 2)
    Gathered     each rank keeps its stretch; the whole weights exist only while they are used (ZeRO 3, offload)

Stretches are even, so a cut may go through a parameter:

    |  owned by rank 0  |  owned by rank 1  |
    | weight ......... |pad| bias .. | pad |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.chunks.allocate import Private
from shoal.chunks.executor import Pause
from shoal.comm import Group
from shoal.comm.alike import gather_alike, meet_alike
from shoal.comm.transport import Unlike
from shoal.errors import UserError

ALIKE = (
    "Where weights are gathered (plan.zero with plan.memory; plan.zero = 3 without shared memory) all ranks must run "
    "the same modules in the same order. plan.zero = 2 without plan.memory does not ask for that, nor does plan.memory "
    "without plan.zero"
)

ASKS = "which weights"
"""The purpose of meetings of ranks that gather weights, or do not."""


@dataclass(frozen=True)
class Shards:
    """Ranks among which chunks are cut, and what each of them keeps.

    - `group`, `inside`: two groups of the same ranks, for weights and for gradients, which travel at the same time
    - `across`: the ranks that keep the same stretch in other groups (hybrid sharding); None: there is one copy
    - `device`: where whole weights are used
    - `stage`: of ZeRO. A rank keeps whole gradients at 1, its stretch at 2 and 3; whole weights at 1 and 2, its stretch
      at 3
    - `home`: allocates on the host, where stretches are kept (offload), also for a single rank
    - `whole_parameters`: no cut goes through a parameter
    """

    group: Group
    inside: Group
    across: Group | None
    device: torch.device
    stage: int
    home: Private | None = None
    whole_parameters: bool = False

    @property
    def keep_gradients(self) -> bool:
        return self.stage < 2

    @property
    def cut_frozen(self) -> bool:
        return self.stage == 3

    @property
    def copy(self) -> tuple[int, int]:
        """Index and number of the copies of the whole state; this rank has a stretch of that one."""
        return (0, 1) if self.across is None else (self.across.rank, self.across.size)

    def stretch(self, size: int) -> slice:
        """This rank's part of `size` elements."""
        each = size // self.group.size
        return slice(self.group.rank * each, (self.group.rank + 1) * each)

    def gathers(self) -> bool:
        """Whether weights will be gathered for each use; all ranks ask together."""
        if self.stage < 3 or self.device.type != "cpu" or self.home is not None:
            return self.stage == 3
        return self.group.allocate_common(0, torch.uint8) is None

    def place(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Sharded | Gathered]:
        """Storage for whole weights, zeroed or without memory, and their placement; all ranks allocate together."""
        on_host = self.device.type == "cpu" and self.home is None
        common = self.group.allocate_common(numel, dtype) if on_host else None
        if common is not None:
            return common, Sharded(self, True)
        if self.stage < 3:
            return torch.zeros(numel, dtype=dtype, device=self.device), Sharded(self, False)
        data = torch.empty(numel, dtype=dtype, device=self.device)
        data.untyped_storage().resize_(0)
        return data, Gathered(self)

    def reduce_scatter(self, own: Tensor, whole: Tensor, purpose: str) -> None:
        """Sums the gradients `whole` of a copy's ranks, each rank's stretch of the sum into its `own`."""
        self.inside.reduce_scatter(own, whole, purpose=purpose)

    def add_copies(self, own: Tensor, purpose: str) -> None:
        """Adds to `own`, a stretch of a copy's sum, those of the other copies."""
        if self.across is not None:
            self.across.all_reduce(own, purpose=purpose)


@dataclass(frozen=True)
class Replicated:
    """Every rank has all of the chunk and owns all of it."""

    shards: None = None

    def share(self, whole: Tensor, own: Tensor, purpose: str) -> None:
        """Does nothing: the update of each rank is the update of all."""


@dataclass(frozen=True)
class Sharded:
    """Each rank owns a stretch and reads whole weights, in one memory of all ranks (`common`) or in its own copy."""

    shards: Shards
    common: bool

    def share(self, whole: Tensor, own: Tensor, purpose: str) -> None:
        """After an update of `own`: the other ranks' stretches are in `whole`."""
        if self.common:
            self.shards.group.barrier()
        else:
            self.shards.group.all_gather(whole, own, purpose=purpose)


@dataclass(frozen=True)
class Gathered:
    """Each rank keeps its stretch; the storage of the whole weights has memory between `open` and `let_go` only."""

    shards: Shards

    def open(self, whole: Tensor) -> None:
        """Allocates the memory."""
        whole.untyped_storage().resize_(whole.nbytes)

    def let_go(self, whole: Tensor) -> None:
        """Frees the memory; nobody may read `whole` any more."""
        whole.untyped_storage().resize_(0)

    def fill(self, whole: Tensor, own: Tensor, index: int, name: str) -> None:
        """Gathers `whole` from every rank's `own`; all ranks call it.

        `index`, `name`: of the chunk and of a parameter in it, for the error if ranks ask for different chunks.
        """
        group = self.shards.group
        if group.size == 1 or own.device != whole.device:
            own = whole[self.shards.stretch(whole.numel())].copy_(own, non_blocking=True)
        if group.size == 1:
            return
        if whole.device.type != "cpu":  # there the host would have to wait
            group.all_gather(whole, own, purpose=f"weights {index}")
            return
        with _told(group, name, index):
            gather_alike(group, whole, own, 1 + len(Pause) + index, f"weights {index}", ASKS)

    def share(self, whole: Tensor, own: Tensor, purpose: str) -> None:
        """Does nothing: the next `fill` brings the updated weights."""


Placement = Replicated | Sharded | Gathered


def ask_for_none(group: Group, pause: Pause, device: torch.device) -> None:
    """Raises UserError, on all ranks of `group`, if another one gathers weights on a CPU, or pauses for another
    reason."""
    if device.type == "cpu":
        with _told(group):
            meet_alike(group, 1 + list(Pause).index(pause), ASKS)


@contextmanager
def _told(group: Group, name: str = "", index: int = 0) -> Iterator[None]:
    """Says what ranks ask for that do not ask alike. `name`: of a parameter in the chunk `index`, for which this one
    asks."""
    try:
        yield
    except Unlike as unlike:
        wants = [pause.value for pause in Pause]
        said = [wants[each - 1] if each <= len(wants) else str(each - 1 - len(wants)) for each in unlike.numbers]
        where = f" ({name} is in {index})" if name else ""
        raise UserError(
            f"ranks need different weights at the same time: of the chunks, the ranks of {group.name} ask for "
            f"{'; '.join(said)}{where}. {ALIKE}"
        ) from None
