"""Tensors in place of others, wherever code has those from: a module, a list, a closure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.module.compiling import as_written
from shoal.module.random.by_thread import OpenByThread
from shoal.module.repeated import Again, forget, note

Pairs = Iterable[tuple[Tensor, Tensor]]


class _InPlace(TorchFunctionMode):
    """Gives operations the second tensor of each pair where they are called with the first."""

    def __init__(self, pairs: Pairs) -> None:
        super().__init__()
        self._pairs = {id(own): (own, given) for own, given in pairs}  # which keeps them: an id stays one tensor's

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*map(self._given, args), **{key: self._given(each) for key, each in (kwargs or {}).items()})

    def _given(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(self._given, value))
        return self._pairs[id(value)][1] if id(value) in self._pairs else value


class _Open(OpenByThread[_InPlace]):
    """What is in place, for forwards of torch.utils.checkpoint, which backward runs again once it is no more."""

    def _give_way(self) -> None:
        note(_here)

    def _put_back(self) -> None:
        forget(_here)


def _here() -> Again | None:
    return None if (mode := _open.here()) is None else partial(_inside, mode)


_open = _Open()


@contextmanager
def in_place(pairs: Pairs) -> Iterator[None]:
    """Inside, and where backward runs again what ran inside, torch's operations take the second tensor of each pair
    where they are called with the first. What is compiled runs as it is written: graphs are made for the first."""
    with _inside(_InPlace(pairs)):
        yield


@contextmanager
def _inside(mode: _InPlace) -> Iterator[None]:
    _open.enter(mode)
    try:
        with as_written(), mode:
            yield
    finally:
        _open.leave()
