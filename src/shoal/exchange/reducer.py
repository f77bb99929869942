"""The reducer: collects gradients into their chunks and hands full chunks to the algorithm during backward, in order.

Autograd's own gradient of a parameter is copied (the first time in a step) or added to its view of the chunk as soon as
it is there, and freed: one pass over memory, with the cast to the chunk's dtype in it, and nothing to zero beforehand.

All chunks are exchanged once a step, in a round, during the last backward. Where chunks keep only their stretch of the
gradient (ZeRO 2) every backward is a round of those that it adds to (see `rounds`), whose sums are added up in the
stretch; all ranks have as many rounds as the one with most microbatches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate

import torch
from torch import Tensor

from shoal.chunks import Chunk, Slot, norms, weakly
from shoal.chunks.exact import weights_of
from shoal.chunks.gradient_pool import bring_home
from shoal.errors import UserError
from shoal.exchange.algorithm import Algorithm, Holds
from shoal.exchange.hooks import Hook, UserHooks, only_zeroed, run_on_sum, watch
from shoal.exchange.rounds import Round, of_another_stage, rounds_of
from shoal.exchange.rows import add_rows, clear, keep, put, sum_rows

_in_backward: set[int] = set()
"""The reducers, by `id`, whose step is in a backward."""


class Reducer:
    """Watches each parameter's gradient; hands over a chunk when all its parameters are in and it is at the front.

    - `touched[name]`: whether any backward of this step reached the parameter on this rank
    - `norms`: where the chunks hold the group's sum, those of the pieces of this rank's part of all chunks (1-D, fp64),
      taken on the lane while the chunk is still in the cache: the ranks share that work
    - `rows[name]`: rows of a sparse chunk's gradient that are not zero, None for all
    - `arrivals`: parameters in the order in which the last backward completed them
    - `rounds`: of the step

    `users`: the users' hooks on the parameters.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], algorithm: Algorithm, users: UserHooks | None = None
    ) -> None:
        replica = algorithm.replica
        self._algorithm, self._chunks, self._lane = algorithm, replica.chunks, replica.lane
        self._group = algorithm.partners
        self._gradient_pool, self._beside = replica.gradient_pool, replica.beside
        self._users = users or UserHooks({}, {}, ())
        self._borrowing = {slot.name for chunk in self._chunks if chunk.borrows for slot in chunk.slots}
        self.touched = {slot.name: False for chunk in self._chunks for slot in chunk.slots}
        self.rows: dict[str, Tensor | None] = {}
        self.norms = torch.empty(0)
        self.arrivals: list[str] = []
        self._armed = self._reduces = self._sums = self._own_rows = self._is_open = False
        self._own_mean = torch.ones(())
        self._unscale: Tensor | None = None
        self._complete: Collection[str] | None = None
        self._rounds_of = lru_cache(maxsize=16)(partial(rounds_of, self._chunks))
        self.rounds, self._now = list[Round](), Round((), frozenset(), frozenset())
        self._round = self._turn = self._front = 0  # of the chunks of this round that at `_front` goes next
        self._missing: dict[int, set[str]] = {}
        self._lent: dict[int, Tensor] = {}
        self._views = {
            slot.name: slot.view(chunk.gradient) for chunk in self._chunks if not chunk.borrows for slot in chunk.slots
        }
        arrived = weakly(self._arrived)
        self._hooks = [
            watch(parameters[slot.name], partial(arrived, index, slot))
            for index, chunk in enumerate(self._chunks)
            for slot in chunk.slots
        ]
        pairs = [(chunk, algorithm.partners_of(chunk)) for chunk in self._chunks]
        self._pieces = [chunk.norm_pieces(group.rank, group.size) for chunk, group in pairs]
        self._ends = list(accumulate(map(len, self._pieces)))
        self._device = self._chunks[0].data.device if self._chunks else torch.device("cpu")
        weights_of(self._device)  # a budget's first step is to find them there

    def detach(self) -> None:
        """Stops watching: another reducer takes over."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, step: int, backwards: Sequence[int | None] = (None,), unscale: Tensor | None = None) -> None:
        """Begins `step`: nothing has been touched, and the chunks hold the gradients of the step before.

        - `backwards`: as many as any partner makes at most; of each its stage, where all partners make the same ones in
          that order, else None
        - `unscale`: 0-dim factor of gradients before they are exchanged, where the loss is scaled; else None
        """
        if self._round < len(self.rounds):  # an error cut the step before short: its gradients are still on their way
            self._lane.drain()
        self._unscale, self._is_open = unscale, True
        self._users.begin(len(backwards), self._borrowing.__contains__, unscale)
        if self._gradient_pool is not None:
            self._gradient_pool.forget(self._lent.values())
        for chunk in self._chunks:
            if chunk.sparse:
                clear(chunk.slots[0].view(chunk.gradient), self.rows.get(chunk.slots[0].name))
        self.rows = {chunk.slots[0].name: torch.empty(0, dtype=torch.int64) for chunk in self._chunks if chunk.sparse}
        self.touched = dict.fromkeys(self.touched, False)
        self.norms = torch.zeros(self._ends[-1] if self._ends else 0, dtype=torch.float64, device=self._device)
        holds = self._algorithm.holds(step)
        self._sums, self._own_rows = holds is Holds.SUM, holds in (Holds.INDEPENDENT, Holds.LOCAL_MEAN)
        self._reduces = holds in (Holds.SUM, Holds.MEAN, Holds.LOCAL_MEAN)
        self._round, self.rounds = 0, self._rounds_of(tuple(backwards) if self._gradient_pool is not None else (None,))
        self._begin_round()

    def _begin_round(self) -> None:
        self._now = self.rounds[self._round]
        self._missing = {index: {slot.name for slot in self._chunks[index].slots} for index in self._now.order}
        self._front, self._lent, self.arrivals = 0, {}, []

    @contextmanager
    def backward(self, own_mean: Tensor, last: bool, complete: Collection[str] | None = None) -> Iterator[None]:
        """Surrounds each backward: complete chunks are exchanged during this rank's last one, or each if chunks borrow.

        - `own_mean`: 0-dim factor from this rank's sums so far to their means
        - `last`: whether it is this rank's last backward of the step
        - `complete`: the parameters to which no later backward adds, where that is not all of them in the last one and
          none before
        """
        self._armed, self._own_mean = last or bool(complete) or self._gradient_pool is not None, own_mean
        self._complete = complete if self._gradient_pool is None else None
        _in_backward.add(id(self))
        try:
            yield
        finally:
            self._armed = False
            _in_backward.discard(id(self))
        if self._gradient_pool is not None:
            self._end_round()

    def finish(self) -> None:
        """Hands over what is left (parameters that this step did not touch count as zero) and waits for the lane."""
        self._is_open = False
        while self._round < len(self.rounds):
            self._end_round()
        if self._gradient_pool is not None:
            self._gradient_pool.settle()
        self._lane.wait()
        if not (self._sums or self._own_rows):  # the algorithm brings rows of other ranks, or of other steps
            self.rows = dict.fromkeys(self.rows)

    @torch.no_grad()
    def hand_over(self, aside: Sequence[Tensor], touched: Mapping[str, bool]) -> None:
        """Hands over a step's gradients, laid out as the chunks, in place of backwards. `touched`: which have any."""
        self.touched = dict(touched)
        for chunk, flat in zip(self._chunks, aside, strict=True):
            chunk.gradient.copy_(flat)
        for missing in self._missing.values():
            missing.clear()
        self._advance()
        self._round = len(self.rounds)  # nothing is left to hand over

    @torch.no_grad()
    def _end_round(self) -> None:
        for index, missing in self._missing.items():
            for slot in (chunk := self._chunks[index]).slots:
                if slot.name in missing and chunk.borrows:
                    slot.view(self._flat(index)).zero_()
                elif not (self.touched[slot.name] or chunk.sparse or chunk.borrows):
                    slot.view(chunk.gradient).zero_()
            missing.clear()
            self._advance()  # at once: what is lent of later chunks is not to wait for this one
        self._round += 1
        if self._round < len(self.rounds):
            self._begin_round()

    def _arrived(self, index: int, slot: Slot, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if id(self) not in _in_backward:
            parameter.grad = None
            if not self._is_open or _in_backward:
                return  # of another engine's loss, or of none
            raise UserError(
                f"a backward reached {slot.name} that is not the step's own: add its loss to the one that is returned, "
                "or given to loop.backward(...); torch.autograd.grad leaves the gradients of weights alone"
            )
        gradient, name = parameter.grad.detach(), slot.name  # as of a backward that makes a graph
        if self._chunks[index].borrows:
            if index not in self._missing:
                raise of_another_stage(name)
            put(slot.view(self._flat(index)), gradient, False)
        else:
            keep(self.rows, name, self._views[name], gradient, self.touched[name])
        parameter.grad, self.touched[name] = None, True
        if hooks := self._users.of_sum(parameter):
            self._show(index, slot, parameter, hooks)
        if not self._armed or (self._complete is not None and name not in self._complete):
            return
        self.arrivals.append(name)
        if index in self._missing:
            if name not in self._missing[index]:
                raise UserError(
                    f"the gradient of {name} came twice in one backward, as reentrant checkpointing of shared weights "
                    "does it: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            self._missing[index].discard(name)
            if self._front < len(self._now.order) and index == self._now.order[self._front]:
                self._advance()

    @torch.no_grad()
    def _show(self, index: int, slot: Slot, parameter: Tensor, hooks: Sequence[Hook]) -> None:
        """Lets a user's `hooks` see, and change, the sum of a gradient on this rank."""
        name, rows = slot.name, self.rows.get(slot.name)
        view = slot.view(self._flat(index)) if self._chunks[index].borrows else self._views[name]
        total = view if rows is None else torch.sparse_coo_tensor(rows.unique()[None], view[rows.unique()], view.shape)
        unit = self._own_mean if self._unscale is None else self._own_mean * self._unscale
        result = run_on_sum(hooks, parameter, total, unit)
        if result is total:
            return
        if result is None:  # as torch's optimizers take it
            view.zero_()
            self.touched[name] = False
            return
        if self._group.size > 1 and not only_zeroed(result, view):
            self._users.reshaped = name
        if name in self.rows:
            clear(view, rows)
            self.rows[name] = torch.empty(0, dtype=torch.int64) if result.is_sparse else None
        if result.is_sparse:
            self.rows[name] = add_rows(view, result.coalesce(), self.rows.get(name))
        else:
            view.copy_(result)

    def _flat(self, index: int) -> Tensor:
        """Returns the whole gradient that the chunk has borrowed for this round."""
        if index not in self._lent:
            assert self._gradient_pool is not None
            turn = self._turn + self._now.order.index(index) - self._front
            flat = self._gradient_pool.borrow(turn, self._chunks[index].size)
            self._chunks[index].clear_padding(flat)
            self._lent[index] = flat
        return self._lent[index]

    def _advance(self) -> None:
        while self._front < len(self._now.order) and not self._missing[self._now.order[self._front]]:
            index = self._now.order[self._front]
            chunk = self._chunks[index]
            self._front, self._turn = self._front + 1, self._turn + 1
            if chunk.borrows:
                assert self._gradient_pool is not None
                flat = self._lent.pop(index)
                work = partial(self._exchange_lent, index, self._turn - 1, flat, self._now)
                self._gradient_pool.handed_over(self._lane.submit(work, f"chunk {chunk.index}"), flat)
            elif self._reduces or self._sums or self._unscale is not None or self._beside is not None:
                self._lane.submit(partial(self._exchange, index), f"chunk {chunk.index}")

    @torch.no_grad()
    def _exchange(self, index: int) -> None:
        chunk = self._chunks[index]
        if self._unscale is not None:
            chunk.gradient.mul_(self._unscale)
        self._sum_beside(chunk)
        if chunk.sparse and self._sums:
            slot, group = chunk.slots[0], self._algorithm.partners_of(chunk)
            view, purpose = slot.view(chunk.gradient), f"gradients {chunk.index}"
            self.rows[slot.name] = sum_rows(view, self.rows[slot.name], group, purpose)
        elif self._reduces:
            self._algorithm.reduce(chunk, self._own_mean)
        if self._sums:
            self._note_norms(index, self._pieces[index])

    def _note_norms(self, index: int, pieces: Sequence[Tensor]) -> None:
        """Puts the norms of a chunk's `pieces` at their place among those of all."""
        if pieces:
            self.norms[self._ends[index] - len(pieces) : self._ends[index]].copy_(norms(pieces))

    def _sum_beside(self, chunk: Chunk) -> None:
        """Sums gradients of parameters that ranks of a cut model share, each having those of its tokens only."""
        if self._beside is not None and chunk.spec.tp_copy[1] > 1:
            self._beside.all_reduce(chunk.gradient, purpose=f"gradients {chunk.index} beside")
            if chunk.sparse:
                self.rows[chunk.slots[0].name] = None

    @torch.no_grad()
    def _exchange_lent(self, index: int, turn: int, flat: Tensor, now: Round) -> None:
        assert self._gradient_pool is not None
        chunk = self._chunks[index]
        lent = chunk.with_gradient(self._gradient_pool.to_reduce(turn, flat))
        if self._unscale is not None:
            lent.gradient.mul_(self._unscale)
        self._sum_beside(lent)
        self._algorithm.reduce_part(lent, self._own_mean)
        new, is_last = lent.owned.gradient, index in now.last
        end = partial(self._algorithm.reduce_sum, chunk) if is_last else None
        holds_sum = bring_home(new, chunk.owned.gradient, index not in now.first, end)
        if is_last:
            self._note_norms(index, lent.norm_pieces() if holds_sum else self._pieces[index])
        self._gradient_pool.end(turn, new.nbytes if chunk.passes else 0)
