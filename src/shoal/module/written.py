"""Whether forwards have written their buffers as often as a rule says.

A part that runs compiled writes as often as its graph does, which may be once where the code as it is written writes
several times, or the other way round. Forwards that were observed ran as they are written (compiling.as_written).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class Written:
    """How often forwards write the buffers of modules; `graphs` run compiled."""

    def __init__(self, graphs: Iterable[nn.Module]) -> None:
        self._inside = {id(inner) for part in graphs for inner in part.modules()}
        self._of_graph: dict[str, int] = {}

    def follow(self, name: str, owner: nn.Module, rule: int, made: int, observed: int, others: int) -> bool:
        """Whether forwards that write the buffer `name` of `owner`, of which `observed` ran as they are written with
        `rule` writes each, and `others` as they may be compiled, make `made` writes together."""
        if made == rule * (observed + others):
            return True
        made -= rule * observed
        if id(owner) not in self._inside or not 0 < others <= made:
            return False
        by_graph = self._of_graph.setdefault(name, made // others)
        if by_graph == rule:
            return False
        compiled, odd = divmod(made - rule * others, by_graph - rule)  # past its limit torch compiles no more
        return not odd and 0 <= compiled <= others
