"""What an owner keeps of forwards until their backward: graphs, by client and number."""

from __future__ import annotations

import threading
from typing import NamedTuple

from torch import Tensor

from shoal.errors import UserError
from shoal.server.remote.draws import ForwardDraws
from shoal.server.remote.leaves import Leaves


class Graph(NamedTuple):
    """A forward whose backward may follow.

    outputs: those that need a gradient, in the order in which they were sent.
    inputs: each tensor of the arguments, or None where no gradient is wanted.
    leaves: what stood in for the parameters.
    """

    context: str
    outputs: list[Tensor]
    inputs: list[Tensor | None]
    draws: ForwardDraws
    leaves: Leaves | None


class Graphs:
    """The graphs of one client, `most` at a time. For any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._guard = threading.Lock()
        self._kept: dict[int, Graph | None] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, number: int) -> None:
        """Makes room for the graph of a forward that begins. Raises UserError where there is none."""
        with self._guard:
            if len(self._kept) >= self._most:
                raise UserError(
                    f"{self._most:,} forwards of this client wait for their backward: run those that have none under "
                    "torch.no_grad(), or give the owner more by OwnerOptions(graphs=...)"
                )
            if number in self._kept:
                raise UserError(f"forward {number} is under way already")
            self._kept[number] = None

    def put(self, number: int, graph: Graph) -> None:
        """Keeps a graph, unless the client has released it meanwhile."""
        with self._guard:
            if number in self._kept:
                self._kept[number] = graph

    def get(self, number: int, keep: bool) -> Graph:
        """Returns a graph for a backward. `keep`: another one may follow. Raises UserError where there is none."""
        with self._guard:
            graph = self._kept.get(number)
            if graph is None:
                raise UserError(f"forward {number} has no graph here: it was released, or ran without gradients")
            if not keep:
                del self._kept[number]
            return graph

    def release(self, *numbers: int) -> None:
        """Forgets graphs that are still there."""
        with self._guard:
            for number in numbers:
                self._kept.pop(number, None)
