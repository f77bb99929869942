"""The numbers of heads that attention modules keep as attributes: read when a model is cut, and set to those of a
rank."""

from __future__ import annotations

from contextlib import suppress
from copy import copy
from typing import Any

from torch import nn

from shoal.errors import UserError
from shoal.parallel.tensor.layers import Attention, become
from shoal.parallel.tensor.region import Region

_COUNTS = {"heads": "queries", "num_heads": "queries", "num_attention_heads": "queries"}
_COUNTS |= {"kv_heads": "keys", "num_kv_heads": "keys", "num_key_value_heads": "keys"}
"""The attributes under which modules keep numbers of heads, and of which heads."""


class HeadCounts:
    """Finds the numbers of heads that the attention module `name` keeps.

    Attributes: `queries`, the heads; `keys`, the heads of keys and values (0: as many as queries); `size`, the rows of
    a head (0: not known). Raises UserError for a module that keeps no such number, or one that `ranks` does not divide.
    """

    def __init__(self, name: str, module: nn.Module, ranks: int) -> None:
        self._module, self._ranks = module, ranks
        numbers: dict[str, list[str]] = {"queries": [], "keys": []}
        for attribute, what in _COUNTS.items():
            if isinstance(getattr(module, attribute, None), int):
                numbers[what].append(attribute)
        self._names = numbers
        self.size = int(
            next(
                (
                    getattr(module, key)
                    for key in ("head_dim", "head_size")
                    if isinstance(getattr(module, key, None), int)
                ),
                0,
            )
        )
        self.queries = getattr(module, numbers["queries"][0]) if numbers["queries"] else 0
        self.keys = getattr(module, numbers["keys"][0]) if numbers["keys"] else 0
        self._groups = getattr(module, "num_key_value_groups", None)
        config = getattr(module, "config", None)
        if not self.queries:
            self.queries = int(getattr(config, "num_attention_heads", 0))
        if not self.keys and self._groups:
            self.keys = self.queries // self._groups
        if not self.queries:
            raise UserError(f'{name} is "attention" by the rules, and keeps no number of heads ({", ".join(_COUNTS)})')
        if self.queries % ranks:
            fits = [degree for degree in range(1, self.queries + 1) if self.queries % degree == 0]
            raise UserError(
                f"{name} has {self.queries} heads, which do not come out even among tp = {ranks} ranks: take one of "
                f"{fits}"
            )

    @property
    def numbers(self) -> tuple[int, ...]:
        """Heads of the whole module: queries, then keys if their number differs."""
        return (self.queries, self.keys) if self.keys not in (0, self.queries) else (self.queries,)

    @property
    def own(self) -> tuple[int, ...]:
        """Heads of one rank, in the order of `numbers`."""
        return (self.queries // self._ranks, *(max(1, keys // self._ranks) for keys in self.numbers[1:]))

    def set_to(self, region: Region) -> None:
        """Sets the numbers to those of a rank; a rank has one head of keys where these are fewer than the ranks."""
        ranks = region.size
        become(self._module, Attention, _region=region, _heads=self.queries // ranks)
        for attribute in self._names["queries"]:
            setattr(self._module, attribute, self.queries // ranks)
        keys = max(1, self.keys // ranks) if self.keys else 0
        for attribute in self._names["keys"]:
            setattr(self._module, attribute, keys)
        config = getattr(self._module, "config", None)
        if not self._names["queries"] and hasattr(config, "num_attention_heads"):  # its forward may read the config
            own: Any = copy(config)
            self._module.config = own
            own.num_attention_heads = self.queries // ranks
            if keys and not self._names["keys"] and hasattr(own, "num_key_value_heads"):
                own.num_key_value_heads = keys
        if self._groups is not None and keys:
            self._module.num_key_value_groups = self.queries // ranks // keys  # type: ignore[assignment]
        if isinstance(getattr(self._module, "split_size", None), int):
            self._module.split_size = self.queries // ranks * self.size  # type: ignore[assignment]
        with suppress(AttributeError):
            self._module.inner_dim = self._module.inner_dim // ranks  # type: ignore[assignment,operator]
