"""Global batches of an iterable dataset: one rank reads them in order and dispatches them to the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from torch import Tensor

from ..errors import UserError
from .loader import Batch, Collate, stacked

Dispatch = Callable[[list[Any] | None], list[Any]]

REMEMBERED = 1024
"""How many batches may be taken ahead of the step that is saved."""


@dataclass(frozen=True)
class Place:
    """The position of a source: the step, epoch and id to come, and the samples of this epoch returned so far."""

    step: int = 0
    epoch: int = 0
    next_id: int = 0
    samples_in_epoch: int = 0


class IterableSource:
    """An iterable of samples with a position that can be saved.

    iterable: gives further epochs if it can be iterated again; its `set_epoch(epoch)`, if any, is called before each.
    reads: whether this rank reads `iterable`; one rank does.
    """

    def __init__(self, iterable: Iterable[Any], *, reads: bool = True) -> None:
        self.iterable = iterable
        self._reads = reads
        self._place = Place()
        self._reader: Iterator[Any] | None = None  # of the current epoch; None between epochs and after loading a state
        self._saved: Any = None  # the iterable's state, loaded and not yet used
        self._begun: deque[Place] = deque(maxlen=REMEMBERED)  # where the last batches began
        self._last: list[Any] = []  # the samples of the last of them
        self._again: list[Any] = []  # those of a batch that comes again

    def batches(
        self,
        global_batch: int,
        *,
        dispatch: Dispatch | None = None,
        epochs: int | None = None,
        collate: Collate | None = None,
    ) -> Iterator[Batch]:
        """Yields batches from the current position on; the last one of an epoch may be short.

        global_batch: samples in a batch.
        dispatch: broadcasts the samples of a batch. Called on every rank for each batch and once at the end of an
            epoch, with the samples on the reading rank and with None elsewhere; returns the samples.
        epochs: number of epochs; None for no limit. Iteration also ends with an epoch that has no samples.
        collate: stacks samples; by default `stack_samples`.

        Ids are running numbers over all epochs.
        """
        if global_batch < 1:
            raise UserError(f"global_batch is {global_batch}: give the number of samples in one step, at least 1")
        while epochs is None or self._place.epoch < epochs:
            while samples := self._again or self._next(global_batch, dispatch):
                place, self._last, self._again = self._place, samples, []
                self._begun.append(place)
                self._place = Place(
                    place.step + 1, place.epoch, place.next_id + len(samples), place.samples_in_epoch + len(samples)
                )
                ids = tuple(range(place.next_id, self._place.next_id))
                yield Batch(place.step, place.epoch, ids, _loader(samples, place.next_id, collate))
            if self._place.samples_in_epoch == 0:
                return
            self._place = replace(self._place, epoch=self._place.epoch + 1, samples_in_epoch=0)
            self._reader = None

    def go_to(self, step: int) -> None:
        """Makes `step` the next one: the last batch comes again if it was of that step, and so was not trained.

        Raises UserError where more than that one were not trained.
        """
        if self._begun and self._begun[-1].step == step:
            self._place, self._again = self._begun.pop(), self._last
        elif self._place.step > step:
            raise UserError(
                f"batches up to step {self._place.step - 1} were taken from this iterable, and the engine is at step "
                f"{step}: only the last one can be had again. Train each before the next is taken, or load a checkpoint"
            )
        else:
            self._place = replace(self._place, step=step)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Returns the position after the last batch yielded, or before that of `step`.

        On the reading rank it includes the iterable's own `state_dict()`, if it has one, which must be JSON data; not
        before a batch that was yielded: then samples are skipped.
        """
        begun = None if step is None else next((each for each in reversed(self._begun) if each.step <= step), None)
        if begun is not None and begun.step == step:
            return {**asdict(begun), "iterable": None}
        state = None if self._again else self._saved
        if self._reader is not None and not self._again and hasattr(self.iterable, "state_dict"):
            state = self.iterable.state_dict()
        return {**asdict(self._place), "iterable": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a saved position. Where the iterable has no state, the next batch skips samples from its start."""
        self._place = Place(**{name: value for name, value in state.items() if name != "iterable"})
        self._saved = state["iterable"]
        self._reader, self._again = None, []
        self._begun.clear()

    def _next(self, samples: int, dispatch: Dispatch | None) -> list[Any]:
        read = None
        if self._reads:
            if self._reader is None:
                self._reader = self._open_epoch()
            read = list(islice(self._reader, samples))
        if dispatch is not None:
            return dispatch(read)
        assert read is not None, "a rank that does not read needs a dispatch"
        return read

    def _open_epoch(self) -> Iterator[Any]:
        saved, self._saved = self._saved, None
        done = self._place.samples_in_epoch
        if hasattr(self.iterable, "set_epoch"):
            self.iterable.set_epoch(self._place.epoch)
        if done and saved is not None:
            self.iterable.load_state_dict(saved)  # type: ignore[attr-defined]  # it gave the state
            return iter(self.iterable)
        reader = iter(self.iterable)
        for _ in islice(reader, done):
            continue
        return reader


def _loader(samples: list[Any], first: int, collate: Collate | None) -> Callable[[Sequence[int]], dict[str, Tensor]]:
    return lambda ids: stacked([samples[i - first] for i in ids], collate)
