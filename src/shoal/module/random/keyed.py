"""Randomness keyed by (seed, step, sample id, module name and call index, element), never by rank or microbatch.

Philox4x32-10 under the sample's key decides whether element i of a sample is dropped, so any split of the batch, and
any second run of a step, drops the same elements. The mask is made again in backward, not saved. The first dimension of
a tensor counts samples; where it does not (time-major), the whole microbatch is one sample, named by its first id.

Other draws (`torch.rand` in a forward) come from torch's generator, seeded for each microbatch by (seed, step, first
sample id); those from numpy and Python from generators seeded alike (see `host`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from shoal.device import applied, seed_generators, to_device
from shoal.errors import UserError
from shoal.models.moe import Router
from shoal.module.random.functional import keyed_functional, torch_dropout
from shoal.module.random.philox import SIGN, DropByKey, mix, name_key
from shoal.module.repeated import Again
from shoal.module.scripted import drawn_by, scripted_parts

_FEW = 4
"""Stretches up to which each is drawn by itself; where there are more, at even distances, the gaps are drawn too."""


def _whole(x: Tensor, elements: int) -> list[tuple[int, int]]:
    return [(0, elements)]


@dataclass(frozen=True)
class Drawn:
    """The state of the draws when a forward ended.

    samples: keys of its samples, int64 [samples]
    first: seed of its other draws
    calls: draws made by functional calls, by module
    layers: draws made by each dropout layer
    """

    samples: Tensor
    first: int
    calls: dict[str, int]
    layers: list[int]


class Randomness:
    """The draws of one microbatch; `begin` sets which one, and the model's dropout layers read `samples`.

    seed: of the run
    device: of the model
    part: part(x, elements) gives the stretches (first, number) of a whole sample that the `elements` per sample of `x`
        are; None: all of it
    attend: computes F.scaled_dot_product_attention where a rank has a part of each row; None: torch's
    keyed: whether functional calls draw by key
    """

    def __init__(
        self,
        seed: int,
        device: torch.device,
        part: Callable[[Tensor, int], list[tuple[int, int]]] | None = None,
        attend: Callable[..., Tensor] | None = None,
        keyed: bool = True,
    ) -> None:
        self.seed, self.device = seed, device
        self.samples = torch.zeros(1, dtype=torch.int64, device=device)
        self.active = False
        self.part = part or _whole
        self.attend, self.keyed = attend, keyed
        self.module = ""
        self._first = 0  # seed of other draws in this microbatch
        self._layers: list[KeyedDropout] = []
        self._calls: dict[str, int] = {}
        self._forward_calls: dict[str, int] = {}

    def begin(self, step: int | str, ids: Sequence[int]) -> None:
        """Sets the keys for what is drawn until the next call.

        step: number of the step, or the name of something else that draws
        ids: of the samples in the microbatch
        """
        base = name_key(f"{self.seed}/{step}")
        # numpy takes a fifth of torch's time for a few numbers
        samples = torch.from_numpy(mix(mix(np.array(ids, dtype=np.int64)) ^ base))
        self.samples = to_device(samples, self.device)
        self._calls, self._forward_calls = {}, {}
        for layer in self._layers:
            layer.calls, layer.forward_calls = 0, 0
        seed = self._first = (base ^ int(ids[0] if len(ids) else 0)) & (SIGN - 1)
        seed_generators(self.device, seed)

    @property
    def first(self) -> int:
        """The seed of draws that are not keyed."""
        return self._first

    def drawn(self) -> Drawn:
        """Returns the state of the draws of the forward that ends now, for a backward that does not follow
        immediately."""
        return Drawn(self.samples, self._first, self._calls, [layer.calls for layer in self._layers])

    def replay(self, forward: Drawn | None = None) -> None:
        """Begins the backward of `forward`, by default the last one: modules that recompute count their calls from the
        start."""
        forward = forward or self.drawn()
        self.samples, self._first, self._forward_calls, self._calls = forward.samples, forward.first, forward.calls, {}
        for layer, calls in zip(self._layers, forward.layers, strict=True):
            layer.forward_calls, layer.calls = calls, 0

    def again(self, module: nn.Module | None = None) -> Again:
        """Returns a maker of contexts in which `module`, or whatever runs, repeats the draws of the forward that begins
        now."""
        inside = set(self._layers if module is None else module.modules())
        layers = {layer: layer.calls for layer in self._layers if layer in inside}
        return partial(self._again, layers, dict(self._calls), (self.samples, self._first), self.module, self.active)

    @contextmanager
    def _again(
        self,
        layers: Mapping[KeyedDropout, int],
        calls: dict[str, int],
        samples: tuple[Tensor, int],
        module: str,
        active: bool,
    ) -> Iterator[None]:
        before = {layer: (layer.calls, layer.forward_calls) for layer in layers}
        others = self._calls, self._forward_calls, self.samples, self._first, self.module, self.active
        self._calls, self._forward_calls, (self.samples, self._first), self.module = dict(calls), {}, samples, module
        for layer, count in layers.items():
            layer.calls, layer.forward_calls = count, 0
        try:
            with keyed_functional(self) if active else nullcontext():
                yield
        finally:
            self._calls, self._forward_calls, self.samples, self._first, self.module, self.active = others
            for layer, (now, forward) in before.items():
                layer.calls, layer.forward_calls = now, forward

    def stream(self, name: str) -> torch.Generator | None:
        """Returns a generator for the module `name` in this microbatch; None outside of a step, which means torch's
        own."""
        if not self.active:
            return None
        return torch.Generator(self.device).manual_seed((self._first ^ name_key(name)) & (SIGN - 1))

    def drop(self, x: Tensor, p: float, key: Tensor) -> Tensor:
        """Drops elements of `x` at rate `p`, and scales the others by 1 / (1 - p).

        `key`: of the call, int64, 0-dim.
        """
        samples = (
            self.samples if len(self.samples) and x.dim() and x.shape[0] % len(self.samples) == 0 else self.samples[:1]
        )
        if p == 1.0:
            return x * 0.0
        stretches = self.part(x, x.numel() // max(1, len(samples)))
        keys = mix(samples ^ key)
        if len(stretches) == 1:
            return applied(DropByKey, x, p, keys, stretches[0][0], 0, 0)
        (first, run), stride = stretches[0], stretches[1][0] - stretches[0][0]
        if len(stretches) > _FEW and stretches == [(first + at * stride, run) for at in range(len(stretches))]:
            return applied(DropByKey, x, p, keys, first, run, stride)
        parts = x.reshape(len(samples), -1).split([number for _, number in stretches], 1)
        dropped = [
            applied(DropByKey, part, p, keys, first, 0, 0) for part, (first, _) in zip(parts, stretches, strict=True)
        ]
        return torch.cat(dropped, 1).view(x.shape)

    def next_key(self) -> Tensor:
        """Returns the key of the next functional call inside the module that is running."""
        call = self._calls.get(self.module, 0)
        self._calls[self.module] = call + 1
        if self.module in self._forward_calls:
            call %= self._forward_calls[self.module]
        # torch.tensor would wait for the device
        return torch.full((), name_key(f"{self.module}#{call}"), device=self.device)

    def take_over(self, root: nn.Module, blocks: Sequence[nn.Module] = ()) -> None:
        """Replaces the dropout layers of `root`, and tracks which module runs, for direct calls of `F.dropout`.

        Inside `blocks` direct calls are numbered under the block's name, since hooks there would be compiled per block.
        Raises UserError for layers whose draws cannot be keyed.
        """
        inside = {id(part) for block in blocks for part in block.modules() if part is not block}
        scripted = scripted_parts(root)
        inside |= {id(part) for outer in scripted.values() for part in outer.modules()}
        for name, module in list(root.named_modules()):
            if name in scripted and (drawing := drawn_by(module)):
                raise UserError(
                    f"{name} is a module of torch.jit and draws ({drawing}), which cannot be keyed by sample: give the "
                    'module that it was made of, or set dropout = "fused" (depends on the plan)'
                )
            if isinstance(module, Router):
                module.stream = partial(self.stream, name)
            where = name or "the model"
            if isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1:
                raise UserError(
                    f"{type(module).__name__}(dropout={module.dropout}) in {where} draws inside its kernel, which "
                    'cannot be keyed by sample: put nn.Dropout between single-layer modules, or set dropout = "fused" '
                    "(depends on the plan)"
                )
            if isinstance(module, _DropoutNd) and not isinstance(module, nn.Dropout):
                raise UserError(
                    f"{type(module).__name__} in {where} drops whole channels, which is not keyed by sample yet: use "
                    'nn.Dropout, or set dropout = "fused" (depends on the plan)'
                )
            if isinstance(module, nn.Dropout) and not isinstance(module, KeyedDropout):
                of: Any = type(module)
                module.__class__ = _keyed(of)
                assert isinstance(module, KeyedDropout)
                module.key_by(name, self)
                self._layers.append(module)
            elif id(module) not in inside and (
                not type(module).__module__.startswith("torch.nn.modules.") or list(module.children())
            ):
                self._follow(module, name)

    def _follow(self, module: nn.Module, name: str) -> None:
        def enter(*_: Any) -> None:
            self.module = name

        def leave(*_: Any) -> None:
            self.module = name.rpartition(".")[0]

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)


class _Keys(list[Tensor]):
    """The keys of a layer's calls, in a list of its own kind: it is none of those that a model keeps tensors in
    (module/attributes), which are watched and put back."""


class KeyedDropout(nn.Dropout):
    """A dropout layer that uses `Randomness.drop`, keyed by the layer's name and the index of its call in the
    microbatch."""

    def key_by(self, name: str, randomness: Randomness) -> None:
        """Sets the layer's name, and where draws come from."""
        self.calls = self.forward_calls = 0
        self._name, self._randomness = name, randomness
        self._keys = _Keys([torch.tensor(name_key(f"{name}#0"), device=randomness.device)])

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return input
        if not self._randomness.active:  # outside a step: plain dropout
            return torch_dropout(input, self.p, True, self.inplace)
        call = self.calls % self.forward_calls if self.forward_calls else self.calls
        self.calls += 1
        while len(self._keys) <= call:
            self._keys.append(torch.tensor(name_key(f"{self._name}#{len(self._keys)}"), device=self._randomness.device))
        dropped = self._randomness.drop(input, self.p, self._keys[call])
        return input.copy_(dropped) if self.inplace else dropped


@cache
def _keyed(of: Any) -> Any:
    """The class of a dropout layer of class `of`, which may do more: a layer that is cut brings its input, or its
    result, into the region."""
    return KeyedDropout if of is nn.Dropout else type(f"Keyed{of.__name__}", (of, KeyedDropout), {})
