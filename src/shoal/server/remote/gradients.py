"""Gradients of a module's parameters, by context."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from shoal.errors import UserError
from shoal.server.remote.contexts import Below, Context, Passing

MOST_CONTEXTS = 4096
"""Contexts in which a module may have gradients at once."""

Named = dict[str, Tensor]


@dataclass
class _Kept:
    """The gradients of a context by the parameters' names, and the clients that have used it.

    open: what the newest backward pass of each thread has given so far, which is not in `gradients` yet.
    """

    context: Context
    gradients: Named = field(default_factory=dict)
    open: dict[str, tuple[int, Named]] = field(default_factory=dict)
    clients: set[object] = field(default_factory=set)

    def add(self, passing: Passing, found: Mapping[str, Tensor | None]) -> None:
        """Adds what a part of a backward pass has given."""
        number, sums = self.open.get(passing.thread, (passing.number, {}))
        if number != passing.number:
            self._close(passing.thread)
            sums = {}
        _add(sums, found)
        self.open[passing.thread] = passing.number, sums

    def total(self) -> Named:
        """Returns the gradients of all passes, which have ended."""
        for thread in list(self.open):
            self._close(thread)
        return dict(self.gradients)

    def _close(self, thread: str) -> None:
        _, sums = self.open.pop(thread)
        _add(self.gradients, sums)


def _add(total: Named, found: Mapping[str, Tensor | None]) -> None:
    for name, gradient in found.items():
        if gradient is not None:  # not in place: backward may give one tensor for two parameters, or a view
            before = total.get(name)
            total[name] = gradient if before is None else before + gradient


class Gradients:
    """What contexts hold, and for which clients. For any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._kept: dict[str, _Kept] = {}

    @property
    def contexts(self) -> list[str]:
        """The contexts in which gradients may be kept."""
        with self._guard:
            return list(self._kept)

    def context(self, client: object, name: str) -> Context:
        """Returns a context, which has a client from now on."""
        with self._guard:
            return self._of(client, name).context

    def add(self, client: object, context: str, passing: Passing, found: Mapping[str, Tensor | None]) -> None:
        """Adds what a part of a backward pass has given, by the parameters' names."""
        with self._guard:
            self._of(client, context).add(passing, found)

    def total(self, context: str) -> Named:
        """Returns the gradients of a context by the parameters' names."""
        with self._guard:
            kept = self._kept.get(context)
            return kept.total() if kept else {}

    def drop(self, context: str) -> list[Below]:
        """Forgets a context; returns the remote modules that were called in it."""
        with self._guard:
            kept = self._kept.pop(context, None)
        return list(kept.context.used) if kept else []

    def leave(self, client: object) -> list[str]:
        """Takes a client from all contexts; returns those that have none any more."""
        with self._guard:
            for kept in self._kept.values():
                kept.clients.discard(client)
            return [name for name, kept in self._kept.items() if not kept.clients]

    def _of(self, client: object, name: str) -> _Kept:
        kept = self._kept.get(name)
        if kept is None:
            if len(self._kept) >= MOST_CONTEXTS:
                raise UserError(
                    f"the module has gradients in {MOST_CONTEXTS:,} contexts: end each shoal.context() that is done"
                )
            kept = self._kept[name] = _Kept(Context(name))
        kept.clients.add(client)
        return kept
