"""Weights that forwards leave as they are, or may change: those that are in memory between passes (of others see
chunks.written)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from shoal.chunks import Chunk
from shoal.chunks.written import one_of, written, written_aside
from shoal.errors import UserError
from shoal.module.attributes import number_of


class Intact:
    """Watches forwards, and finds those that write to weights.

    - `parameters`: views of `chunks`, which may be cut anew (see `follow`)
    - `lost`: why that goes wrong in a step; "" where each forward is one of one process
    - `again`: why it goes wrong in a backward
    - `counted`: whether what autograd counts of writes comes from forwards alone, and parameters show one version
    """

    def __init__(
        self,
        chunks: Sequence[Chunk] = (),
        parameters: Mapping[str, nn.Parameter] = MappingProxyType({}),
        lost: str = "",
        again: str = "",
        counted: bool = True,
    ) -> None:
        self._chunks, self._parameters, self._lost, self._counted = chunks, parameters, lost, counted
        self._again, self._forwards = again, 0
        self._last: list[int] | None = None  # versions after the forward before, in a step
        self._places: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self.follow()

    def follow(self) -> None:
        """Goes on with the chunks that there are now."""
        self._places = {
            slot.name: (self._parameters[slot.name], slot.view(chunk.data))
            for chunk in self._chunks
            if not chunk.passes
            for slot in chunk.slots
        }
        self._last = None

    @contextmanager
    def forward(self, trains: bool = True) -> Iterator[None]:
        """Wraps a forward, which ends as it should or in pipeline.split.Left. Raises UserError where it has changed
        weights, and that goes wrong. `trains`: it is one of a step.

        Autograd counts most writes; those to `parameter.data` are seen by the values, of the first forward and of ever
        fewer.
        """
        self._check_backward()
        self._forwards += 1
        refusal = partial(written, lost=self._lost) if trains else written_aside
        versions, values = self._versions(), None
        if self._lost and not self._forwards & (self._forwards - 1):
            values = self._values()
        try:
            yield
        except Exception as error:
            if moved := self._bound_anew():
                error.add_note(f"the forward had given the weight {moved[0]} another memory, and maybe another form")
            raise
        except BaseException:
            self._check(versions, values, refusal)
            raise
        self._check(versions, values, refusal)

    @contextmanager
    def aside(self, always: bool = True) -> Iterator[None]:
        """Wraps an evaluation, at the values of whose weights it looks. Raises UserError where it has changed any; not
        `always` only where that goes wrong in a step too."""
        if not always and not self._lost:
            yield
            return
        values = self._values()
        yield
        if changed := self._changed(values):
            raise written_aside(changed[0])

    def take_in(self) -> None:
        """Ends the forwards and backwards of a step: brings weights that were bound to memory of their own, where that
        goes well, into the chunks, in which an update is made. Raises UserError where a backward has changed weights,
        and that goes wrong."""
        self._check_backward()
        self._last = None
        for name in self._bound_anew():
            parameter, view = self._places[name]
            with torch.no_grad():
                view.copy_(parameter)
            parameter.data = view

    def forget(self) -> None:
        """Begins a step."""
        self._last = None

    def _check_backward(self) -> None:
        if self._again and self._last is not None and (found := self._moved(self._last)):
            raise written(one_of(found), self._again)

    def _check(self, versions: list[int], values: Tensor | None, refusal: Callable[[str], UserError]) -> None:
        moved = self._bound_anew()
        if (name := next((name for name in moved if not _like(*self._places[name])), None)) is not None:
            parameter, view = self._places[name]
            raise UserError(
                f"a forward gives the weight {name} another form: {tuple(parameter.shape)} of {parameter.dtype}, where "
                f"it was {tuple(view.shape)} of {view.dtype}. Convert what the layer is given, or what it returns, or "
                "the model before it is trained"
            )
        self._last = self._versions()
        if self._lost:
            if found := moved or ([] if values is None else self._changed(values)):
                raise refusal(found[0])
            if found := self._moved(versions):
                raise refusal(one_of(found))

    def _moved(self, versions: Sequence[int]) -> list[str]:
        """Names the parameters with other versions now: those that share the counter of a chunk in which one is."""
        now = zip(self._places, versions, self._versions(), strict=True)
        return [name for name, before, after in now if before != after]

    def _versions(self) -> list[int]:
        return [parameter._version if self._counted else 0 for parameter, _ in self._places.values()]

    def _bound_anew(self) -> list[str]:
        """Names the parameters that lie elsewhere than in their chunks."""
        if not self._counted:
            return []
        places = self._places.items()
        return [name for name, (parameter, view) in places if parameter.data_ptr() != view.data_ptr()]

    @torch.no_grad()
    def _values(self) -> Tensor:
        """Two numbers for the values of each parameter."""
        numbers = [number_of(parameter) for parameter, _ in self._places.values()]
        return torch.stack(numbers) if numbers else torch.empty(0, 2)

    def _changed(self, values: Tensor) -> list[str]:
        changed = (self._values() != values).any(1).tolist()
        return [name for name, each in zip(self._places, changed, strict=True) if each]


def _like(parameter: Tensor, view: Tensor) -> bool:
    return (parameter.shape, parameter.dtype, parameter.device) == (view.shape, view.dtype, view.device)
