"""PowerSGD (https://arxiv.org/abs/1905.13727): sums gradient matrices as products of two thin ones.

For a gradient M_r (n x m) of replica r, with error feedback already added: P = sum_r M_r Q; orthonormal columns; Q =
sum_r M_r^T P; the sum is P Q^T. Each replica keeps M_r - P Q^T / W as its residual, so that the residuals add up to
what was left out. The next step starts from Q; P is made orthonormal, so the unit of Q does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.chunks import Chunk, Slot
from shoal.exchange.algorithm import USUAL_CHUNK, Algorithm, Replica, State, by_parameter
from shoal.exchange.kept import Kept, parts_of
from shoal.exchange.sends import CODED, Sends
from shoal.module.random import mix, name_key


@dataclass
class PowerSGD(Algorithm):
    """Approximates gradient matrices by low rank; the other gradients are summed exactly.

    - `rank`: rank of the approximation
    - `min_compression`: the least factor that the approximation must save for a matrix to be approximated
    - `start`: number of exact steps at the beginning

    A convolution kernel is a matrix of (output channels, all else).
    """

    rank: int = 4
    min_compression: float = 2.0
    start: int = 10
    chunk_bytes: int | None = USUAL_CHUNK

    def sends(self, ranks: int, itemsize: int, side: float) -> Sends:
        share = min(2 * self.rank / side, 1.0)
        return Sends(share if share <= 1 / self.min_compression else 1.0, CODED)

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        self._step = 0
        self._residual = [chunk.like_gradient() for chunk in replica.chunks]
        self._index = {chunk.index: index for index, chunk in enumerate(replica.chunks)}
        self._q: dict[str, Tensor] = {}
        for chunk in replica.chunks:
            for slot in chunk.slots:
                if self._thin(slot):
                    seed = int(mix(torch.tensor(name_key(slot.name))))
                    draw = torch.Generator().manual_seed(seed % 2**63)
                    q = torch.randn(
                        slot.numel // slot.shape[0], self._rank(slot), generator=draw, dtype=chunk.grad_dtype
                    )
                    self._q[slot.name] = q.to(chunk.data.device)
        self._kept = Kept(self._residual, [parts_of(chunk) for chunk in replica.chunks])
        self._start = Kept(list(self._q.values()), [{name: slice(None)} for name in self._q])
        self._index_of_q = {name: index for index, name in enumerate(self._q)}

    @property
    def keeps_back(self) -> bool:
        return True

    def begin(self, step: int) -> None:
        self._step = step
        self._kept.drop()
        self._start.drop()

    def reduce(self, chunk: Chunk, own_mean: Tensor) -> None:
        group, flat, purpose = self.replica.group, chunk.gradient, f"gradients {chunk.index}"
        thin = [slot for slot in chunk.slots if slot.name in self._q]
        if self._step < self.start or not thin or group.size == 1:
            group.all_reduce(flat, purpose=purpose)
            return
        residual = self._kept.take(self._index[chunk.index])
        starts = [self._start.take(self._index_of_q[slot.name]) for slot in thin]
        rest = [slot for slot in chunk.slots if slot.name not in self._q]
        for slot in thin:
            slot.view(flat).add_(slot.view(residual))
        matrices = [slot.view(flat).view(slot.shape[0], -1) for slot in thin]

        ps = [m @ start for m, start in zip(matrices, starts, strict=True)]
        together = torch.cat([*(p.flatten() for p in ps), *(slot.view(flat).flatten() for slot in rest)])
        group.all_reduce(together, purpose=purpose)
        parts = together.split([*(p.numel() for p in ps), *(slot.numel for slot in rest)])
        for slot, summed in zip(rest, parts[len(ps) :], strict=True):
            slot.view(flat).copy_(summed.view(slot.shape))
        ps = [_orthonormal(part.view_as(p)) for part, p in zip(parts, ps, strict=False)]

        qs = torch.cat([(m.T @ p).flatten() for m, p in zip(matrices, ps, strict=True)])
        group.all_reduce(qs, purpose=purpose)
        widths = [start.numel() for start in starts]
        for slot, m, p, q, start in zip(thin, matrices, ps, qs.split(widths), starts, strict=True):
            start.copy_(q.view_as(start))
            approximation = p @ start.T
            slot.view(residual).view_as(m).copy_(m - approximation / group.size)
            m.copy_(approximation)

    def renew(self, to_mean: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None:
        self._kept.commit(to_mean, skip, untouched)
        self._start.commit(None, skip, untouched)

    def state(self) -> dict[str, State]:
        self.begin(self._step)
        residual = by_parameter(self.replica.chunks, self._residual)
        return {"residual": State({name: residual[name] for name in self._q}, "split"), "q": State(self._q, "mean")}

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Forgets residuals. Any Q is one to start from, but that of zeros."""
        self.begin(self._step)
        for residual in self._residual:
            residual.zero_()

    def _rank(self, slot: Slot) -> int:
        return min(self.rank, slot.shape[0], slot.numel // slot.shape[0])

    def _thin(self, slot: Slot) -> bool:
        if len(slot.shape) < 2 or slot.numel == 0:
            return False
        n, m = slot.shape[0], slot.numel // slot.shape[0]
        return (n + m) * self._rank(slot) * self.min_compression <= n * m


def _orthonormal(columns: Tensor) -> Tensor:
    """Returns orthonormal columns of the same span, by QR in at least fp32; zero columns stay finite."""
    q, _ = torch.linalg.qr(columns)
    return q
