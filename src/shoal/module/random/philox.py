"""Bits that depend on keys only: hashes of names, the mixing of 64-bit words, and dropout masks by Philox4x32-10.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11. On a CPU the mask is made by native/random.c,
elsewhere by the same arithmetic in torch operations; both give the same bits.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.device import applied
from shoal.native import library

_MASK32 = 0xFFFFFFFF
SIGN = 1 << 63


def _signed(value: int) -> int:
    """Returns the int64 with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= SIGN else value


def name_key(name: str) -> int:
    """Returns a 64-bit hash of a module's name, as int64."""
    return _signed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


Words = TypeVar("Words", Tensor, NDArray[np.int64])


def mix(x: Words) -> Words:
    """Applies SplitMix64's finaliser (Steele et al., OOPSLA'14) to int64: every input bit reaches every output bit."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Words, bits: int) -> Words:
    """Shifts int64 to the right, filling with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def keep_fallback(samples: int, elements: int, keys: Tensor, threshold: int, first: int = 0) -> Tensor:
    """Computes the mask of `shoal_keep` by torch operations: bool [samples, elements], on the device of `keys`.

    keys: int64 [samples]
    threshold: an element is kept if its 32-bit word is at least this
    first: index in its sample of the first element
    """
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
    """Returns the high and low 32 bits of the product of 32-bit values held in int64, without overflow."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & _MASK32


def keyed_dropout_mask(keys: Tensor, elements: int, p: float, first: int = 0) -> Tensor:
    """Returns the mask of the elements that are kept: bool [samples, elements], on the device of `keys`.

    keys: int64 [samples]
    elements: of each sample
    p: rate at which elements are dropped
    first: index in its sample of the first element
    """
    samples, threshold = keys.numel(), min(_MASK32, round(p * (1 << 32)))
    kernels = library() if keys.device.type == "cpu" else None
    if kernels is None:
        return keep_fallback(samples, elements, keys, threshold, first)
    kept, keys = torch.empty(samples, elements, dtype=torch.bool), keys.contiguous()
    where = ctypes.c_void_p(kept.data_ptr()), samples, elements
    kernels.shoal_keep(*where, ctypes.c_void_p(keys.data_ptr()), threshold, first)
    return kept


@torch.library.custom_op("shoal::keyed_drop", mutates_args=())
def _keyed_drop(x: Tensor, p: float, keys: Tensor, first: int, run: int = 0, stride: int = 0) -> Tensor:
    """Returns x / (1 - p) where elements are kept, 0 elsewhere.

    keys: int64 [samples], whose number divides the first dimension of x
    first: index in its sample of the first element of each sample in x
    run, stride: if given, x has runs of so many elements, which begin so far apart in the sample
    """
    x, elements = x.contiguous(), x.numel() // max(1, keys.numel())
    if stride:
        runs = elements // run
        whole = keyed_dropout_mask(keys, runs * stride, p).view(keys.numel(), runs, stride)
        kept = whole[:, :, first : first + run].contiguous()
    else:
        kept = keyed_dropout_mask(keys, elements, p, first)
    return x * kept.view(x.shape) * (1.0 / (1.0 - p))


@_keyed_drop.register_fake
def _(x: Tensor, p: float, keys: Tensor, first: int, run: int = 0, stride: int = 0) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class DropByKey(torch.autograd.Function):
    """Keyed dropout as an autograd function. It is linear in x, so backward and forward mode apply the same mask."""

    @staticmethod
    def forward(x: Tensor, p: float, keys: Tensor, first: int, run: int, stride: int) -> Tensor:
        return _keyed_drop(x, p, keys, first, run, stride)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, Tensor, int, int, int], output: Tensor) -> None:
        _, ctx.p, ctx.keys, *ctx.where = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return applied(DropByKey, grads[0], ctx.p, ctx.keys, *ctx.where), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return applied(DropByKey, tangents[0], ctx.p, ctx.keys, *ctx.where)
