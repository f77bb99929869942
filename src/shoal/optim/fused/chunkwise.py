"""Any torch optimizer, run over one chunk after the other, so that no other chunk's state need be in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def own(value: Any) -> Any:
    """An option's value as it is now: torch's schedules write into a tensor."""
    return value.clone() if isinstance(value, Tensor) else value


class ChunkwiseOptimizer(torch.optim.Optimizer):
    """One optimizer for each chunk, which looks like one over all parameters: groups, state and `state_dict` are that
    one's.

    For optimizers that update each parameter by itself. What they keep by group, such as a count of updates, all of
    them keep alike.

    - `make`: makes an optimizer from a list of groups
    - `groups`: what the one over all parameters would be given
    - `chunks[i]`: the parameters of chunk i, all of one group
    """

    def __init__(
        self, make: Make, groups: Sequence[Mapping[str, Any]], chunks: Sequence[Sequence[nn.Parameter]]
    ) -> None:
        group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
        self._group_of_chunk = [group_of[id(parameters[0])] for parameters in chunks]
        self._inner = [
            make([{**groups[index], "params": list(parameters)}])
            for index, parameters in zip(self._group_of_chunk, chunks, strict=True)
        ]
        stand_in = [{**groups[0], "params": [nn.Parameter(torch.zeros(2, 2))]}]  # a rank may own nothing
        self._first = self._inner[0] if self._inner else make(stand_in)
        whole = {index: inner.param_groups[0] for index, inner in zip(self._group_of_chunk, self._inner, strict=True)}
        super().__init__(
            [{**whole.get(index, {}), **group} for index, group in enumerate(groups)], dict(self._first.defaults)
        )
        for inner in self._inner:
            self.state.update(inner.state)
        self._share_state()

    def _share_state(self) -> None:
        for inner in self._inner:
            inner.state = self.state

    @property
    def first(self) -> torch.optim.Optimizer:
        """Optimizer of the first chunk, which is like all of them but for its group's options."""
        return self._first

    @property
    def every(self) -> Sequence[torch.optim.Optimizer]:
        """Optimizers of all chunks; `first` where there are none."""
        return self._inner or [self._first]

    def begin(self) -> None:
        """Begins a step with the options of now, whatever a schedule makes of them, or writes into them, before its
        last chunk is updated."""
        self._options = [
            {key: own(value) for key, value in group.items() if key != "params"} for group in self.param_groups
        ]

    def step_chunk(self, chunk: int) -> None:
        """Updates the parameters of the chunk with that index; each chunk once a step."""
        index = self._group_of_chunk[chunk]
        inner, given = self._inner[chunk], self._options[index]
        options = inner.param_groups[0]
        options.update(given)
        for scaling in ("grad_scale", "found_inf"):  # read by fused kernels: a factor, and whether to skip the update
            if hasattr(self, scaling):
                setattr(inner, scaling, getattr(self, scaling))
        inner.step()
        counts = {key: value for key, value in options.items() if key != "params" and value is not given.get(key)}
        self.param_groups[index].update(counts)  # some count their updates there

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all chunks in order."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin()
        for chunk in range(len(self._inner)):
            self.step_chunk(chunk)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of this optimizer, or of the same one over all parameters."""
        super().load_state_dict(state_dict)
        self._share_state()
