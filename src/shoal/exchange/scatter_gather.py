"""The sum over replicas through a codec: each rank sums one cut of what all send, and sends the sum to all.

Bytes on the wire are those of a ring all-reduce times encoded/plain; every value is rounded twice (Bagua's ByteGrad,
https://arxiv.org/abs/2107.01499, section 3). All ranks decode the same bytes, so replicas stay equal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from shoal.chunks import Chunk
from shoal.comm import Group
from shoal.comm.codecs import Codec, ErrorFeedback
from shoal.exchange.algorithm import State, by_parameter
from shoal.exchange.kept import Kept, parts_of

ROW = 1024
"""Cuts start at multiples of this many elements, so that a codec's rows are the same however a tensor is cut."""


def cuts_of(numel: int, size: int) -> list[slice]:
    """Returns the cut of each rank: equal multiples of ROW, the last ones shorter or empty."""
    each = -(-numel // (size * ROW)) * ROW
    return [slice(min(rank * each, numel), min((rank + 1) * each, numel)) for rank in range(size)]


class Feedback:
    """Error feedback for both roundings (1-bit Adam, https://arxiv.org/abs/2102.02888).

    What encoding lost of the own gradient, and of the sum of this rank's cut, is added next time.
    """

    def __init__(self, chunks: Sequence[Chunk], group: Group) -> None:
        self._chunks, self._group = chunks, group
        device = chunks[0].data.device
        self.own = [torch.zeros(chunk.size, dtype=torch.float32, device=device) for chunk in chunks]
        # as long as the chunk, zero outside this rank's cut: can be summed when the number of replicas changes
        self.summed = [torch.zeros(chunk.size, dtype=torch.float32, device=device) for chunk in chunks]
        cuts = [cuts_of(chunk.size, group.size)[group.rank] for chunk in chunks]
        mine = [flat[cut] for flat, cut in zip(self.summed, cuts, strict=True)]
        parts = [parts_of(chunk, cut) for chunk, cut in zip(chunks, cuts, strict=True)]
        self._kept = (Kept(self.own, [parts_of(chunk) for chunk in chunks]), Kept(mine, parts))

    def drop(self) -> None:
        for kept in self._kept:
            kept.drop()

    def take(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns the residuals of a chunk for `scatter_gather`, in a step that may yet be left out."""
        for kept in self._kept:
            kept.take(index)
        return self.own[index], self.summed[index]

    def clear_padding(self, index: int) -> None:
        """Zeroes what encoding has made of the gaps between parameters, which no checkpoint has: it would go into the
        scale of their neighbours."""
        for flats in (self.own, self.summed):
            self._chunks[index].clear_padding(flats[index])

    def commit(self, to_mean: Tensor | None, skip: Tensor | None, untouched: Collection[str]) -> None:
        for kept in self._kept:
            kept.commit(to_mean, skip, untouched)

    def state(self) -> dict[str, State]:
        self.drop()
        return {
            "own_residual": State(by_parameter(self._chunks, self.own), "split"),
            "summed_residual": State(by_parameter(self._chunks, self.summed), "split"),
        }

    def restored(self) -> None:
        """Hands each rank its cut of what all of them hold of the sums: it was another rank's if the number of replicas
        or the chunks have changed."""
        for flat in self.summed:
            self._group.all_reduce(flat, purpose="residuals")
            mine = cuts_of(flat.numel(), self._group.size)[self._group.rank]
            flat[: mine.start].zero_()
            flat[mine.stop :].zero_()


def scatter_gather(
    flat: Tensor, group: Group, codec: Codec, purpose: str, own: Tensor | None = None, summed: Tensor | None = None
) -> None:
    """Replaces `flat` by the sum over `group`, rounded by `codec`. `own`, `summed`: residuals, updated."""
    if group.size == 1:
        return
    cuts = cuts_of(flat.numel(), group.size)
    total = sum_of_cut(flat, cuts, group, codec, purpose, own)
    sizes = [codec.encoded_bytes(cut.stop - cut.start) for cut in cuts]
    largest, mine = max(sizes), cuts[group.rank]
    gathered = flat.new_zeros(largest * group.size, dtype=torch.uint8)
    slot = gathered[group.rank * largest : (group.rank + 1) * largest]
    _remembering(codec, summed, mine).encode(total, slot[: sizes[group.rank]])
    group.all_gather(gathered, slot, purpose=purpose)
    with group.ledger.span("comm", "decode", gathered.nbytes, "decode"):
        for cut, data, size in zip(cuts, gathered.split(largest), sizes, strict=True):
            codec.decode(data[:size], flat[cut])


def sum_of_cut(
    flat: Tensor, cuts: Sequence[slice], group: Group, codec: Codec, purpose: str, own: Tensor | None = None
) -> Tensor:
    """Returns this rank's cut of the sum of `flat` over `group`, in fp32, each addend rounded by `codec`.

    - `cuts`: the cut of each rank
    - `own`: residual of error feedback, updated; None without
    """
    sizes = [codec.encoded_bytes(cut.stop - cut.start) for cut in cuts]
    sent = flat.new_empty(sum(sizes), dtype=torch.uint8)
    with group.ledger.span("comm", "encode", flat.nbytes, "encode"):
        for cut, data in zip(cuts, sent.split(sizes), strict=True):
            _remembering(codec, own, cut).encode(flat[cut], data)
    mine, size = cuts[group.rank], sizes[group.rank]
    received = sent.new_empty(size * group.size)
    group.all_to_all(received, sent, [size] * group.size, sizes, purpose=purpose)
    total = torch.zeros(mine.stop - mine.start, dtype=torch.float32, device=flat.device)
    with group.ledger.span("comm", "decode", received.nbytes, "decode"):
        for data in received.split(size) if size else ():
            codec.decode_add(data, total)
    return total


def _remembering(codec: Codec, residual: Tensor | None, cut: slice) -> Codec:
    return codec if residual is None else ErrorFeedback.over(codec, residual[cut])
