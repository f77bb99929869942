"""DiLoCo (https://arxiv.org/abs/2311.08105) and Streaming DiLoCo (https://arxiv.org/abs/2501.18512).

Replicas train alone. Every `every` steps the mean of their movements since then, anchor - x, is the gradient of an
outer SGD with Nesterov momentum on the anchor, from which all go on. Streaming: the chunks form `fragments` that take
turns, the mean of a fragment travels while `overlap` more steps compute, and the replica keeps the part `keep` of its
own weights in the merge.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shoal.chunks import Chunk
from shoal.comm.codecs import codec
from shoal.device import record_use
from shoal.errors import ArgumentError, UserError
from shoal.exchange.algorithm import Replica, State, TrainsAlone, by_parameter, part_of_mean
from shoal.exchange.scatter_gather import scatter_gather
from shoal.exchange.sends import CODED, TWICE, Sends, coded
from shoal.optim.outer import OuterSGD
from shoal.plan import Option


@dataclass
class DiLoCo(TrainsAlone):
    """An outer SGD with Nesterov momentum over the movements of replicas.

    - `every`: steps between two outer steps of a fragment
    - `outer_lr`, `outer_momentum`: of the outer SGD
    - `codec`: how movements travel
    - `fragments`: number of parts of the model that take turns
    - `overlap`: steps that compute while the movement of a fragment travels
    - `keep`: weight of a replica's own weights in the merge, in [0, 1)
    - `guard`: where the mean movement is that many times its usual size, the inner optimizer runs away with the outer
      momentum (seen with inner SGD with momentum); then a warning is given, and the outer step is a plain average
      without momentum. 0 switches it off
    """

    every: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    codec: Option = "fp16"
    fragments: int = 1
    overlap: int = 0
    keep: float = 0.0
    guard: float = 4.0
    chunk_bytes: int | None = 16 * 2**20

    def sends(self, ranks: int, itemsize: int, side: float) -> Sends:
        share = coded(self.codec, itemsize) / self.every
        return Sends(share, CODED / self.every, beside=self.overlap > 0, handed=TWICE)

    def __post_init__(self) -> None:
        if not 1 <= self.fragments <= self.every or not 0 <= self.overlap < self.every // self.fragments:
            raise UserError(
                f"plan.exchange: every = {self.every}, fragments = {self.fragments}, overlap = {self.overlap}: at most "
                "a fragment a step, and a fragment must arrive before the next one starts"
            )
        if not 0 <= self.keep < 1:
            raise UserError(
                f"plan.exchange: keep = {self.keep}: the part of its own weights that a replica keeps is in [0, 1)"
            )
        self._codec = codec(self.codec)
        try:
            self._outer = OuterSGD(self.outer_lr, self.outer_momentum, nesterov=True)
        except ArgumentError as error:
            raise UserError(f"plan.exchange.outer_{error}") from error

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        self._group = replica.background("diloco")
        self._anchors = [chunk.master.clone() for chunk in replica.chunks]
        self._momentum = [torch.zeros_like(chunk.master) for chunk in replica.chunks]
        self._moved = [torch.zeros_like(chunk.master) for chunk in replica.chunks]
        self._part: float | None = None
        # what had been counted when each fragment last started
        self._until = [torch.zeros_like(self._counts) for _ in range(self.fragments)]
        self._usual = {str(fragment): torch.zeros(1) for fragment in range(self.fragments)}
        self._started: set[int] = set()  # the fragments whose movement has been taken

    @torch.no_grad()
    def end(self, step: int) -> None:
        starting, arriving = self._due(step + 1), self._due(step + 1 - self.overlap)
        if starting is not None:
            self.replica.lane.submit(partial(self._weigh, self._counts - self._until[starting]), "counts")
            self._until[starting].copy_(self._counts)
            self._started.add(starting)
            for index in self._members(starting):
                chunk, moved = self.replica.chunks[index], self._moved[index]
                torch.sub(self._anchors[index], chunk.master, out=moved)
                self.replica.lane.submit(partial(self._average, chunk, moved), f"movement {chunk.index}")
        if arriving is not None and arriving in self._started:
            self.replica.lane.wait()
            self._outer_step(arriving)

    def settle(self) -> None:
        self.replica.lane.wait()

    def _due(self, steps: int) -> int | None:
        """Returns the fragment whose turn it is after this number of steps, or None."""
        if steps <= 0:
            return None
        turn = steps % self.every
        return next((f for f in range(self.fragments) if f * self.every // self.fragments == turn), None)

    def _members(self, fragment: int) -> Sequence[int]:
        """Returns the indices of a fragment's chunks: every `fragments`-th, so that fragments have similar sizes."""
        return range(fragment, len(self.replica.chunks), self.fragments)

    def _weigh(self, counts: Tensor) -> None:
        self._part = part_of_mean(counts, self._group)

    def _average(self, chunk: Chunk, moved: Tensor) -> None:
        record_use(moved)  # it may be given up meanwhile
        purpose = f"movement {chunk.index}"
        anywhere = torch.stack([slot.view(moved).any() for slot in chunk.slots]).to(moved.dtype)
        self._group.all_reduce(anywhere, "max", purpose=purpose)
        if self._part is not None:
            moved.mul_(self._part * self._group.size)
        scatter_gather(moved, self._group, self._codec, purpose)
        for slot, there in zip(chunk.slots, anywhere, strict=True):
            slot.view(moved).mul_(there)  # what nobody has moved stays, however the codec rounds
        chunk.clear_padding(moved.div_(self._group.size))

    def _outer_step(self, fragment: int) -> None:
        members = self._members(fragment)
        runaway = self._runs_away(fragment, [self._moved[index] for index in members])
        for index in members:
            chunk, anchor = self.replica.chunks[index], self._anchors[index]
            momentum, moved = self._momentum[index], self._moved[index]
            still = [slot for slot in chunk.slots if not slot.view(moved).any()]  # frozen, say: no momentum moves it
            kept = [(view, view.clone()) for slot in still for view in (slot.view(anchor), slot.view(momentum))]
            if runaway:
                momentum.zero_()
                anchor.sub_(moved)
            else:
                self._outer.step(anchor, moved, {"momentum": momentum})
            for view, before in kept:
                view.copy_(before)
            chunk.master.lerp_(anchor, 1 - self.keep) if self.keep else chunk.master.copy_(anchor)
            chunk.publish()

    def _runs_away(self, fragment: int, moved: Sequence[Tensor]) -> bool:
        if not moved or not self.guard:
            return False
        norm = math.sqrt(self._of_the_model(math.fsum(float(torch.linalg.vector_norm(flat)) ** 2 for flat in moved)))
        usual = float(self._usual[str(fragment)])
        if usual and norm > self.guard * usual:
            if self._group.rank == 0:
                warnings.warn(
                    f"DiLoCo: replicas moved {norm:.3g} in {self.every} steps, usually it is {usual:.3g}: the outer "
                    "momentum is dropped. An inner AdamW, a lower inner lr or a lower outer_lr is the remedy",
                    stacklevel=2,
                )
            return True
        self._usual[str(fragment)].fill_(norm if not usual else 0.8 * usual + 0.2 * norm)
        return False

    def _of_the_model(self, squares: float) -> float:
        """Sums over the ranks among whom a model is cut, so that they decide alike."""
        deciding = self.replica.deciding
        if deciding is None:
            return squares
        return float(deciding.all_reduce(torch.tensor([squares], dtype=torch.float64), purpose="movement"))

    def state(self) -> dict[str, State]:
        chunks = self.replica.chunks
        return {
            "anchor": State(by_parameter(chunks, self._anchors), "mean"),
            "momentum": State(by_parameter(chunks, self._momentum), "mean"),
            "moved": State(by_parameter(chunks, self._moved), "mean"),
            "usual": State(self._usual, "mean"),
            "counts": State(
                {"all": self._counts, **{str(fragment): until for fragment, until in enumerate(self._until)}}, "mean"
            ),
        }

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Has replicas move from the weights that were read."""
        super().begin_anew()
        for chunk, anchor in zip(self.replica.chunks, self._anchors, strict=True):
            anchor.copy_(chunk.master)

    def restored(self) -> None:
        moved = [float(flat.any()) for flat in self._moved]
        fragments = range(self.fragments)
        self._started = {each for each in fragments if self._of_the_model(sum(moved[each :: self.fragments])) > 0}
