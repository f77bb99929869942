"""Chunks that stay during backward for modules that run again in it, since their weights are read there once more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class UntilGradients:
    """Indices of the chunks that what runs again has asked for, each until the gradients have come of all that was
    asked for of it.

    A gradient may come before its module runs again: that of a bias which is added last needs nothing of what is
    computed again. Such a weight is not waited for, but stays until another node of the graph asks for weights: what
    runs again may save it by a detached view, which is read in its backward, and that asks for nothing in between.
    Unless a part of it is checkpointed again: weights of which it is known where what runs again begins (see `of`)
    stay as long as its backward goes on.

    - `index`: the chunk of each weight, by name
    - `frozen`: weights whose gradients never come; their chunks stay until that backward ends
    """

    def __init__(self, index: Mapping[str, int], frozen: set[str]) -> None:
        self._index, self._frozen = index, frozen
        self._waits: dict[int, set[str]] = {}
        self._came_in: dict[str, int] = {}  # the backward in which the gradient of a weight has come last
        self._late: set[int] = set()  # chunks of weights asked for after that, by the node of the graph below
        self._node: Any = None
        # what parts of the graph have asked for, by the backward and where they begin
        self._parts: dict[tuple[int, int], set[int]] = {}
        self._part: set[int] = set()  # that of the part which runs again now, or nobody's

    def __iter__(self) -> Iterator[int]:
        node = torch._C._current_autograd_node()
        late = self._late if self._node is node else ()
        backward, number = torch._C._current_graph_task_id(), -1 if node is None else node._sequence_nr()
        under_way = (asked for (each, begin), asked in self._parts.items() if each == backward and begin <= number)
        return iter({*self._waits, *late}.union(*under_way))

    @contextmanager
    def of(self, begin: int) -> Iterator[None]:
        """Context of a second forward of a part of the graph whose first node has at least the number `begin`."""
        key = torch._C._current_graph_task_id(), begin
        before, self._part = self._part, self._parts.setdefault(key, set())
        try:
            yield
        finally:
            self._part = before

    def ask(self, names: Iterable[str]) -> None:
        """Notes what a module that runs again in the backward under way asks for."""
        backward, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        if node is not self._node:
            self._node, self._late = node, set()
        for name in names:
            index = self._index[name]
            self._part.add(index)
            if self._came_in.get(name) == backward:
                self._late.add(index)
            else:
                self._waits.setdefault(index, set()).add("" if name in self._frozen else name)

    def came(self, name: str) -> None:
        """Notes that a gradient is whole in the backward under way."""
        self._came_in[name] = torch._C._current_graph_task_id()
        index = self._index.get(name, -1)
        if (waits_for := self._waits.get(index)) is not None:
            waits_for.discard(name)
            if not waits_for:
                del self._waits[index]

    def clear(self) -> None:
        """Ends a backward."""
        self._waits.clear()
        self._came_in.clear()
        self._node, self._late = None, set()
        self._parts.clear()
        self._part = set()
