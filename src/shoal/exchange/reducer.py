"""Collects gradients into their chunks and hands full chunks to the algorithm during the last backward, strictly in order.

Autograd's own gradient of a parameter is copied (the first time in a step) or added to its view of the chunk as soon as it is there, and
let go: one pass over memory, with the cast to the chunk's dtype in it, and nothing to zero beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from shoal.chunks import sum_of_squares
from shoal.errors import UserError
from shoal.exchange.algorithm import Algorithm, Holds
from shoal.exchange.rows import add_rows, clear, sum_rows


class Reducer:
    """Watches each parameter's gradient; a chunk is handed over when all its parameters are in and it is at the front.

    `touched[name]` says whether any backward of this step reached the parameter here. Where the chunks then hold the group's sum, `squares`
    are the sums of squares of this rank's part of each, taken on the lane while the chunk is still in the cache: the ranks share that work.
    `rows[name]` are the rows of a sparse chunk's gradient that are not zero, None for all. `arrivals` are the parameters in the order in
    which the last backward completed them.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], algorithm: Algorithm) -> None:
        replica = algorithm.replica
        self._chunks, self._group, self._algorithm, self._lane = replica.chunks, algorithm.partners, algorithm, replica.lane
        self.touched: dict[str, bool] = {}
        self.rows: dict[str, Tensor | None] = {}
        self.squares: list[Tensor] = []
        self.arrivals: list[str] = []
        self._armed = self._reduces = self._sums = False
        self._missing: list[set[str]] = []
        self._front = 0
        self._own_mean = torch.ones(())
        self._hooks = []
        for place, chunk in enumerate(self._chunks):
            for slot in chunk.slots:
                self.touched[slot.name] = False
                hook = self._hook(place, slot.name, slot.view(chunk.gradient))
                self._hooks.append(parameters[slot.name].register_post_accumulate_grad_hook(hook))
        self._pieces = [chunk.norm_pieces(self._group.rank, self._group.size) for chunk in self._chunks]

    def detach(self) -> None:
        """Watches no more: another reducer takes over."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, step: int) -> None:
        """A new step: nothing has been touched, whatever the chunks hold is of the step before."""
        for chunk in self._chunks:
            if chunk.sparse:
                clear(chunk.slots[0].view(chunk.gradient), self.rows.get(chunk.slots[0].name))
        self.rows = {chunk.slots[0].name: torch.empty(0, dtype=torch.int64) for chunk in self._chunks if chunk.sparse}
        self.touched = dict.fromkeys(self.touched, False)
        self._missing = [{slot.name for slot in chunk.slots} for chunk in self._chunks]
        self.squares = [sum_of_squares([], chunk.gradient.device) for chunk in self._chunks]
        self.arrivals = []
        holds = self._algorithm.holds(step)
        self._sums, self._reduces = holds is Holds.SUM, holds in (Holds.SUM, Holds.MEAN)
        self._front = 0

    @contextmanager
    def last_backward(self, own_mean: Tensor) -> Iterator[None]:
        """Inside, a chunk that is complete is exchanged while backward goes on. `own_mean` turns this rank's sums into its means."""
        self._armed, self._own_mean = True, own_mean
        try:
            yield
        finally:
            self._armed = False

    def finish(self) -> None:
        """Hands over what is left (parameters that this step did not touch count as zero) and waits for the lane."""
        for chunk, missing in zip(self._chunks, self._missing, strict=True):
            missing.clear()
            for slot in chunk.slots:
                if not self.touched[slot.name] and not chunk.sparse:
                    slot.view(chunk.gradient).zero_()
        self._advance()
        self._lane.wait()

    def _hook(self, place: int, name: str, view: Tensor) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def arrived(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if parameter.grad.is_sparse:
                self.rows[name] = add_rows(view, parameter.grad, self.rows[name])
                self.touched[name] = True
            elif name in self.rows:  # tied to something dense: rows are no shorter way to say it
                self.rows[name], self.touched[name] = None, True
                view.add_(parameter.grad)
            elif self.touched[name]:
                view.add_(parameter.grad)
            else:
                view.copy_(parameter.grad)
                self.touched[name] = True
            parameter.grad = None
            if self._armed:
                self.arrivals.append(name)
                if name not in self._missing[place]:
                    raise UserError(
                        f"the gradient of {name} came twice in one backward, as reentrant checkpointing of shared weights does it: "
                        "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                    )
                self._missing[place].discard(name)
                if place == self._front:
                    self._advance()

        return arrived

    def _advance(self) -> None:
        while self._front < len(self._chunks) and not self._missing[self._front]:
            place = self._front
            self._front += 1
            self._lane.submit(partial(self._exchange, place), f"chunk {self._chunks[place].index}")

    def _exchange(self, place: int) -> None:
        chunk = self._chunks[place]
        if chunk.sparse and self._sums:
            slot = chunk.slots[0]
            self.rows[slot.name] = sum_rows(
                slot.view(chunk.gradient), self.rows[slot.name], self._group, f"gradients {chunk.index}"
            )
        elif self._reduces:
            self._algorithm.reduce(chunk, self._own_mean)
        if self._sums:
            self.squares[place] = sum_of_squares(self._pieces[place], chunk.gradient.device)
