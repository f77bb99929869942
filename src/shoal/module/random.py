"""Randomness keyed by (seed, step, sample id, module name and call index, element): never by rank or microbatch.

`keyed_dropout` stands in for `F.dropout`: element i of a sample is kept or not by Philox4x32-10 under the sample's key, so any
split of the batch, and any re-run of a step, drops the same elements. The mask is made again in backward, not saved. The first
dimension of a tensor counts samples; where it does not (time-major), the whole microbatch is one sample, named by its first id.

Other draws (`torch.rand` in a forward) come from torch's generator, seeded for each microbatch by (seed, step, first sample id).
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from shoal.errors import UserError
from shoal.models.moe import Router
from shoal.native import library

_MASK32 = 0xFFFFFFFF
_SIGN = 1 << 63


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= _SIGN else value


def name_key(name: str) -> int:
    """64 bits of a module's name, as int64."""
    return _signed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


Words = TypeVar("Words", Tensor, NDArray[np.int64])


def mix(x: Words) -> Words:
    """SplitMix64's finaliser (Steele et al., OOPSLA'14) on int64: every input bit reaches every output bit."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Words, bits: int) -> Words:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def keep_fallback(samples: int, elements: int, keys: Tensor, threshold: int, first: int = 0) -> Tensor:
    """The mask of `shoal_keep` in torch operations: [samples, elements] bool, on the device of `keys` (int64 [samples])."""
    counter = torch.arange(first // 4, -(-(first + elements) // 4), device=keys.device)
    c0 = (counter & _MASK32).expand(samples, -1)
    c1 = (counter >> 32).expand(samples, -1)
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = (keys & _MASK32).unsqueeze(1), _shift(keys, 32).unsqueeze(1)
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    words = torch.stack((c0, c1, c2, c3), dim=2).flatten(1)[:, first % 4 :][:, :elements]
    return words >= threshold


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of 32-bit values held in int64, without overflow."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & _MASK32


def keyed_dropout_mask(keys: Tensor, elements: int, p: float, first: int = 0) -> Tensor:
    """Which of the `elements` from `first` on each sample keeps: [samples, elements] bool on the device of `keys` (int64 [samples])."""
    samples, threshold = keys.numel(), min(_MASK32, round(p * (1 << 32)))
    kernels = library() if keys.device.type == "cpu" else None
    if kernels is None:
        return keep_fallback(samples, elements, keys, threshold, first)
    kept, keys = torch.empty(samples, elements, dtype=torch.bool), keys.contiguous()
    where = ctypes.c_void_p(kept.data_ptr()), samples, elements
    kernels.shoal_keep(*where, ctypes.c_void_p(keys.data_ptr()), threshold, first)
    return kept


@torch.library.custom_op("shoal::keyed_drop", mutates_args=())
def _keyed_drop(x: Tensor, p: float, keys: Tensor, first: int) -> Tensor:
    """x / (1 - p) where kept, 0 elsewhere; `keys` int64 [samples], samples dividing the first dimension of x; of each sample here are the elements from
    `first` on."""
    x = x.contiguous()
    kept = keyed_dropout_mask(keys, x.numel() // max(1, keys.numel()), p, first)
    return x * kept.view(x.shape) * (1.0 / (1.0 - p))


@_keyed_drop.register_fake
def _(x: Tensor, p: float, keys: Tensor, first: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class _KeyedDropout(torch.autograd.Function):
    """Linear in x, so backward and forward mode apply the same mask."""

    @staticmethod
    def forward(x: Tensor, p: float, keys: Tensor, first: int) -> Tensor:
        return _keyed_drop(x, p, keys, first)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, Tensor, int], output: Tensor) -> None:
        _, ctx.p, ctx.keys, ctx.first = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _KeyedDropout.apply(grads[0], ctx.p, ctx.keys, ctx.first), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _KeyedDropout.apply(tangents[0], ctx.p, ctx.keys, ctx.first)


def _whole(x: Tensor, elements: int) -> list[tuple[int, int]]:
    return [(0, elements)]


@dataclass(frozen=True)
class Drawn:
    """What a forward has drawn: for the samples `samples`, so many `calls` in each module that runs, and of each dropout layer; `first`: the seed of its other draws."""

    samples: Tensor
    first: int
    calls: dict[str, int]
    layers: list[int]


class Randomness:
    """What is drawn in one microbatch. `begin` names it; the model's dropout layers read `samples`.

    `part(x, elements)` says which stretches (first, number) of a sample the `elements` of each in `x` are, where a rank has a part of them. `keyed`: whether functional
    calls draw by key. `attend`: what computes F.scaled_dot_product_attention where a rank has a part of each row.
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
        self._first = 0  # the seed of other draws in this microbatch
        self._layers: list[KeyedDropout] = []
        self._calls: dict[str, int] = {}
        self._forward_calls: dict[str, int] = {}

    def begin(self, step: int | str, ids: Sequence[int]) -> None:
        """Everything drawn until the next call belongs to the samples `ids` of `step`, or of what else is named."""
        base = name_key(f"{self.seed}/{step}")
        samples = torch.from_numpy(
            mix(mix(np.array(ids, dtype=np.int64)) ^ base)
        )  # a fifth of the time that torch takes for a few
        self.samples = samples.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else samples
        self._calls, self._forward_calls = {}, {}
        for layer in self._layers:
            layer.calls, layer.forward_calls = 0, 0
        seed = self._first = (base ^ int(ids[0] if len(ids) else 0)) & (_SIGN - 1)
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed: without CUDA that keeps a stack trace for each call
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seed)

    def drawn(self) -> Drawn:
        """Where the draws of the forward that ends now stand, for a backward that does not come next."""
        return Drawn(self.samples, self._first, self._calls, [layer.calls for layer in self._layers])

    def replay(self, forward: Drawn | None = None) -> None:
        """Backward begins, of `forward` or of the last one: a module that recomputes its forward counts its calls from the start again."""
        forward = forward or self.drawn()
        self.samples, self._first, self._forward_calls, self._calls = forward.samples, forward.first, forward.calls, {}
        for layer, calls in zip(self._layers, forward.layers, strict=True):
            layer.forward_calls, layer.calls = calls, 0

    def again(self, module: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Makes contexts in which `module` draws once more what it draws in the forward that begins now."""
        inside = set(module.modules())
        layers = {layer: layer.calls for layer in self._layers if layer in inside}
        return partial(self._again, layers, dict(self._calls), (self.samples, self._first), self.module, self.active)

    @contextmanager
    def _again(
        self, layers: Mapping[KeyedDropout, int], calls: dict[str, int], samples: tuple[Tensor, int], module: str, active: bool
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
        """What the module `name` draws from in this microbatch, whatever others draw; None outside of a step: torch's own generator."""
        if not self.active:
            return None
        return torch.Generator(self.device).manual_seed((self._first ^ name_key(name)) & (_SIGN - 1))

    def drop(self, x: Tensor, p: float, key: Tensor) -> Tensor:
        """`x` with elements dropped at rate `p` under the site's `key` (int64, 0-dim)."""
        samples = self.samples if len(self.samples) and x.dim() and x.shape[0] % len(self.samples) == 0 else self.samples[:1]
        if p == 1.0:
            return x * 0.0
        stretches = self.part(x, x.numel() // max(1, len(samples)))
        keys = mix(samples ^ key)
        if len(stretches) == 1:
            return _KeyedDropout.apply(x, p, keys, stretches[0][0])
        parts = x.reshape(len(samples), -1).split([number for _, number in stretches], 1)
        dropped = [_KeyedDropout.apply(part, p, keys, first) for part, (first, _) in zip(parts, stretches, strict=True)]
        return torch.cat(dropped, 1).view(x.shape)

    def next_key(self) -> Tensor:
        """The key of the next functional call inside the module that runs now."""
        call = self._calls.get(self.module, 0)
        self._calls[self.module] = call + 1
        if self.module in self._forward_calls:
            call %= self._forward_calls[self.module]
        return torch.full((), name_key(f"{self.module}#{call}"), device=self.device)  # torch.tensor would wait for the device

    def take_over(self, root: nn.Module, blocks: Sequence[nn.Module] = ()) -> None:
        """Replaces the dropout layers of `root`, and follows which module runs for `F.dropout` called directly.

        Inside `blocks` direct calls are numbered under the block's name: hooks there would be compiled, anew for each block.
        """
        inside = {id(part) for block in blocks for part in block.modules() if part is not block}
        for name, module in list(root.named_modules()):
            if isinstance(module, Router):
                module.stream = partial(self.stream, name)
            if isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1:
                raise UserError(
                    f"{type(module).__name__}(dropout={module.dropout}) in {name or 'the model'} draws inside its kernel, which cannot be "
                    'keyed by sample: put nn.Dropout between single-layer modules, or set dropout = "fused" (depends on the plan)'
                )
            if isinstance(module, _DropoutNd) and not isinstance(module, nn.Dropout):
                raise UserError(
                    f"{type(module).__name__} in {name or 'the model'} drops whole channels, which is not keyed by sample yet: use "
                    'nn.Dropout, or set dropout = "fused" (depends on the plan)'
                )
            if isinstance(module, nn.Dropout) and not isinstance(module, KeyedDropout):
                layer = KeyedDropout(module.p, name, self)
                layer.train(module.training)
                self._layers.append(layer)
                owner, _, attribute = name.rpartition(".")
                setattr(root.get_submodule(owner), attribute, layer)
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


class KeyedDropout(nn.Dropout):
    """nn.Dropout by `Randomness.drop`, under the layer's name and the index of its call in the microbatch."""

    def __init__(self, p: float, name: str, randomness: Randomness) -> None:
        super().__init__(p)
        self.calls = self.forward_calls = 0
        self._name, self._randomness = name, randomness
        self._keys = [torch.tensor(name_key(f"{name}#0"), device=randomness.device)]

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return input
        if not self._randomness.active:  # the module is used outside a step: plain dropout
            return _torch_dropout(input, self.p)
        call = self.calls % self.forward_calls if self.forward_calls else self.calls
        self.calls += 1
        while len(self._keys) <= call:
            self._keys.append(torch.tensor(name_key(f"{self._name}#{len(self._keys)}"), device=self._randomness.device))
        key = self._keys[call]
        return self._randomness.drop(input, self.p, key)


_torch_dropout = F.dropout
_torch_attention = F.scaled_dot_product_attention


class _Open:
    """Whose draws `F.dropout` makes, by thread; a thread that opened none, as those of backward on a GPU, makes those of the only one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_thread: dict[int, list[Randomness]] = {}

    def enter(self, randomness: Randomness) -> None:
        with self._lock:
            if not self._by_thread:
                F.dropout, F.scaled_dot_product_attention = _stand_ins
            self._by_thread.setdefault(threading.get_ident(), []).append(randomness)

    def leave(self) -> None:
        with self._lock:
            mine = self._by_thread[threading.get_ident()]
            mine.pop()
            if not mine:
                del self._by_thread[threading.get_ident()]
            if not self._by_thread:
                F.dropout, F.scaled_dot_product_attention = _torch_dropout, _torch_attention

    def here(self) -> Randomness | None:
        """Whose draws this thread makes; None: torch's own."""
        with self._lock:
            mine = self._by_thread.get(threading.get_ident())
            if mine:
                return mine[-1]
            return next(iter(self._by_thread.values()))[-1] if len(self._by_thread) == 1 else None


_open = _Open()


@contextmanager
def keyed_functional(randomness: Randomness) -> Iterator[None]:
    """While open in this thread, `F.dropout` and the dropout of `F.scaled_dot_product_attention` are keyed, also inside torch's own
    modules, and attention is what `randomness.attend` makes of it."""
    before = randomness.active
    _open.enter(randomness)
    randomness.active = True
    try:
        yield
    finally:
        randomness.active = before
        _open.leave()


@torch.compiler.disable
def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Stands in for `F.dropout`."""
    randomness = _open.here()
    if randomness is None or not randomness.keyed:
        return _torch_dropout(input, p, training, inplace)
    if not training or p == 0.0:
        return input
    dropped = randomness.drop(input, p, randomness.next_key())
    return input.copy_(dropped) if inplace else dropped


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """Stands in for `F.scaled_dot_product_attention`."""
    randomness = _open.here()
    attend = attention if randomness is None or randomness.attend is None else randomness.attend
    return attend(*args, **kwargs)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **rest: Any,
) -> Tensor:
    """`F.scaled_dot_product_attention`, whose kernels draw inside: with dropout that is keyed it is computed explicitly."""
    randomness = _open.here()
    if dropout_p == 0.0 or randomness is None or not randomness.keyed:
        return _torch_attention(query, key, value, attn_mask, dropout_p, is_causal, **rest)
    weights = attention_weights(query, key, attn_mask, is_causal, **rest)
    groups = query.shape[-3] // value.shape[-3] if rest.get("enable_gqa") else 1
    return _dropout(weights, dropout_p) @ value.repeat_interleave(groups, -3)


_stand_ins: tuple[Any, Any] = (_dropout, _attention)


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:
    """softmax(q k^T scale + mask), [..., heads, T, S]: the reference in the documentation of scaled_dot_product_attention."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (scale if scale is not None else 1.0 / math.sqrt(query.shape[-1]))
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)
