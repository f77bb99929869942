"""Sees, before the first step, that a model brings tokens together in attention alone: with attention left out, results
of tokens stay as they are where other tokens change."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.comm import Group
from shoal.errors import UserError
from shoal.parallel.context.asked import JOINED

Run = Callable[[Mapping[str, Tensor]], object]
"""Runs the loss on a microbatch; nothing is left of it."""


class Apart:
    """Runs a model on this rank's tokens with attention left out. `group`: the ranks along cp."""

    def __init__(self, group: Group) -> None:
        self._group, self._name = group, ""
        self.is_on, self._tokens = False, 0
        self._results: list[Tensor] = []
        self._joined: list[Tensor] = []

    def watch(self, module: nn.Module) -> None:
        """Notes the results of `module`, and of what is under the head of a model of transformers."""
        self._name = type(module).__name__
        for part in {module, getattr(module, "base_model", module)}:
            part.register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.is_on:
            found = [
                each for each in tree_leaves([getattr(output, "logits", None), output]) if isinstance(each, Tensor)
            ]
            self._results += [each for each in found if each.is_floating_point() and each.dim() > 1]

    def attend(self, query: Tensor, value: Tensor) -> Tensor:
        """Stands in for attention: each token has its own value, or nothing where there is not one for each query.

        Notes values that are not one for each token of this rank.
        """
        if value.shape[-2] != self._tokens:
            self._joined.append(value)
        if value.shape[1] and not query.shape[1] % value.shape[1]:
            value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        if value.shape[:-1] == query.shape[:-1]:
            return value
        return query.new_zeros(*query.shape[:-1], value.shape[-1])

    def check(self, run: Run, microbatch: Mapping[str, Tensor]) -> None:
        """Raises UserError, on all ranks of the group alike, where `microbatch`, this rank's part of one, shows that
        other layers bring tokens together."""
        ids = microbatch["input_ids"]
        if isinstance(ids, FakeTensor):  # in a dry run nothing has values
            return
        changed = [0, ids.shape[1] - 2] if ids.shape[1] > 3 else [0]  # not both ends, which a flip would swap
        self._tokens = ids.shape[1]
        before, joined = self._run(run, microbatch)
        after, joined_after = self._run(run, {**microbatch, "input_ids": _other(ids, changed)})
        kept = [place for place in range(ids.shape[1]) if place not in changed]
        pairs = [pair for pair in zip(before, after, strict=False) if pair[0].shape[:2] == ids.shape]
        mixes = any(_differ(one[:, kept], other[:, kept]) for one, other in pairs)
        joins = any(map(_differ, joined, joined_after))
        answers = self._group.all_gather_object((mixes, joins))
        if any(joins for _, joins in answers):
            raise UserError(f"plan.cp = {self._group.size}: attention of {self._name} {JOINED}")
        if any(mixes for mixes, _ in answers):
            raise UserError(
                f"plan.cp = {self._group.size}: in {self._name} the result of a token depends on other tokens of its "
                "row or microbatch also where attention (F.scaled_dot_product_attention) is left out: by a mean, a "
                "shift, a convolution, a scan over tokens? A rank has a part of them, and only attention brings them "
                "together: take plan.cp = 1"
            )

    def _run(self, run: Run, microbatch: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        with self._on(), _Stirred():
            run({key: value.clone() for key, value in microbatch.items()})
            return self._results, self._joined

    @contextmanager
    def _on(self) -> Iterator[None]:
        self.is_on, self._results, self._joined = True, [], []
        try:
            yield
        finally:
            self.is_on = False


class _Stirred(TorchDispatchMode):
    """Gives operations other numbers for trained weights that are all one: what begins as nothing (a gate of zeros, a
    mix of one) would not show what it lets through once it is trained."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(nn.Parameter, _stirred, (args, kwargs or {}))
        return func(*args, **kwargs)


def _stirred(weight: Tensor) -> Tensor:
    """Returns a weight, or one like it where it is a single number: the same each time."""
    if not (weight.requires_grad and weight.is_floating_point() and weight.numel()):
        return weight
    least, most = torch.aminmax(weight.detach())
    if least != most:
        return weight
    draw = torch.Generator().manual_seed(zlib.crc32(repr(weight.shape).encode()))
    if weight.dim() > 1:
        noise = torch.randn(weight.shape, generator=draw) / weight.shape[1:].numel() ** 0.5
    else:
        noise = 0.5 + torch.rand(weight.shape, generator=draw)  # there may be a root or a logarithm of it
    return weight.detach() + noise.to(weight)


def _other(ids: Tensor, places: list[int]) -> Tensor:
    """Returns `ids` [B, T] with another token of them at `places`."""
    if not ids.numel():
        return ids
    least, most = ids.min(), ids.max()
    found = ids.clone()
    found[:, places] = torch.where(ids[:, places] == least, most, least)
    return found


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two results are different by more than sums in another order make it."""
    if not one.numel() or one.shape != other.shape:
        return one.shape != other.shape
    bound = one.abs().amax() * torch.finfo(one.dtype).eps ** 0.5
    return bool(((one - other).abs() > bound).any())
