"""Optimizer over the pieces of chunks that looks like one over their parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.chunks import Buffer
from shoal.errors import UserError
from shoal.optim.fused.pieces import FlatChunk

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

BLOCK = 1 << 18
"""Elements of a piece on the CPU, 1 MiB in fp32.

Of 2^14 to 2^20 it was fastest for AdamW, RMSprop, NAdam and Adadelta, 33.7M parameters, 1 MiB of L2 cache a core, one
thread and two. Smaller pieces pay for the calls; one piece for all is 2 to 4 times slower, for memory.
"""


class FlatOptimizer(torch.optim.Optimizer):
    """Runs the optimizer of `factory` over `chunks`; `param_groups`, `state` and `state_dict` are those of the
    parameters.

    - `groups`: what the factory would be given
    - `parameters[name]`: views of the masters of the chunks' slots; the slots of a chunk are of one group. A gradient
      that is not its slot's view of the chunk is copied there; a parameter without one is left alone
    - `block`: elements of a piece, by default BLOCK on the CPU and whole chunks elsewhere

    Bitwise equal to the optimizer over the parameters if `refusal` has nothing against it; `fuse` asks that, other
    callers must.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        groups: Sequence[Mapping[str, Any]],
        chunks: Sequence[Buffer],
        parameters: Mapping[str, nn.Parameter],
        block: int | None = None,
    ) -> None:
        self._named, self._block = dict(parameters), block
        self._per_element = per_element_keys(factory, groups)  # the chunks add what appears later
        self._group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
        self._lay_out(chunks)
        self._inner = factory([{**group, "params": self._flats(index)} for index, group in enumerate(groups)])
        described = zip(groups, self._inner.param_groups, strict=True)
        super().__init__(
            [{**inner, "params": list(group["params"])} for group, inner in described], self._inner.defaults
        )
        self._adopt()

    def _lay_out(self, chunks: Sequence[Buffer]) -> None:
        self._grads = {slot.name: slot.view(chunk.gradient) for chunk in chunks for slot in chunk.slots}
        self._addresses = {name: grad.data_ptr() for name, grad in self._grads.items()}
        blocks = [self._block or (BLOCK if chunk.master.is_cpu else max(1, chunk.size)) for chunk in chunks]
        self._chunks = [FlatChunk(chunk, size, self._per_element) for chunk, size in zip(chunks, blocks, strict=True)]
        self._group_of_chunk = [self._group_of[id(self._named[chunk.slots[0].name])] for chunk in chunks]
        self._some_left_out = False

    @property
    def inner(self) -> torch.optim.Optimizer:
        """Optimizer that `factory` made, over the pieces."""
        return self._inner

    def follow(self, chunks: Sequence[Buffer]) -> None:
        """Goes on with other `chunks` of the same parameters, which are views of their masters by now; moves the state
        too."""
        saved = self.state_dict()
        self._lay_out(chunks)
        self._inner.state.clear()
        self.load_state_dict(saved)

    def _flats(self, group: int) -> list[nn.Parameter]:
        mine = (chunk for chunk, index in zip(self._chunks, self._group_of_chunk, strict=True) if index == group)
        return [piece.flat for chunk in mine for piece in chunk.pieces]

    def _adopt(self) -> None:
        for flat in self._chunks:
            if flat.adopt(self._inner.state):
                for slot in flat.chunk.slots:
                    if values := flat.views(slot, self._inner.state):
                        self.state[self._named[slot.name]] = values

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have a gradient. Raises UserError for a sparse one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        untouched = self._collect()
        if untouched or self._some_left_out:
            self._leave_out(untouched)
        _copy_options(self.param_groups, self._inner.param_groups)
        self._inner.step()
        _copy_options(self._inner.param_groups, self.param_groups)  # some count their updates there
        for flat in self._chunks:
            if flat.padding:
                torch._foreach_zero_(flat.padding)  # 0 / (0 + eps) is not 0 where eps is 0
        self._adopt()
        return loss

    def _collect(self) -> set[str]:
        """Copies gradients into the chunks; returns the names of parameters that have none."""
        untouched, views, gradients = set(), [], []
        for name, parameter in self._named.items():
            grad = parameter.grad
            if grad is None:
                untouched.add(name)
            elif grad.layout != torch.strided:
                raise UserError(
                    f"parameter {name} has a sparse gradient: flat storage takes dense ones. "
                    "Use nn.Embedding(sparse=False), or the optimizer as it is"
                )
            elif grad.data_ptr() != self._addresses[name]:
                views.append(self._grads[name])
                gradients.append(grad)
        if views:
            torch._foreach_copy_(views, gradients)
        return untouched

    def _leave_out(self, untouched: set[str]) -> None:
        cut = [flat.leave_out(untouched, self._inner.state) for flat in self._chunks]
        if any(cut):
            self._show_pieces()
        self._some_left_out = bool(untouched)

    def _show_pieces(self) -> None:
        for index, group in enumerate(self._inner.param_groups):
            group["params"] = self._flats(index)

    def state_dict(self) -> dict[str, Any]:
        """State dict of the optimizer over the parameters: each has counts of its own, though those of a piece share
        them."""
        saved = super().state_dict()
        return saved | {
            "state": {
                index: {
                    key: value if key in self._per_element else copy.deepcopy(value) for key, value in values.items()
                }
                for index, values in saved["state"].items()
            }
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of this optimizer, or of the same one over the parameters."""
        super().load_state_dict(state_dict)
        for flat in self._chunks:
            flat.put(
                {slot.name: self.state.get(self._named[slot.name], {}) for slot in flat.chunk.slots}, self._inner.state
            )
        self._some_left_out = False
        self._show_pieces()
        self._adopt()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if len(self.param_groups) == len(self._inner.param_groups):
            raise UserError(
                "a flat optimizer takes no further parameters: its storage is laid out. Give it all of them at first"
            )
        super().add_param_group(param_group)


def per_element_keys(factory: OptimizerFactory, groups: Sequence[Mapping[str, Any]]) -> set[str]:
    """Finds the state with one value an element, by two updates of six elements: shapes do not tell it of one
    element."""
    keys: set[str] = set()
    for group in groups:
        if not group["params"]:  # another rank has them
            continue
        like = group["params"][0]
        trial = nn.Parameter(torch.zeros(2, 3, dtype=like.dtype, device=like.device))
        trial.grad = torch.zeros_like(trial)
        optimizer = factory([{**group, "params": [trial]}])
        for _ in range(2):
            optimizer.step()
        values = optimizer.state[trial].items()
        keys |= {key for key, value in values if isinstance(value, Tensor) and value.shape == trial.shape}
    return keys


def _copy_options(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    for one, other in zip(source, target, strict=True):
        other.update({key: value for key, value in one.items() if key != "params"})
