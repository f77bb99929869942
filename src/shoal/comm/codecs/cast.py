"""Plain floating formats on the wire: fp32, fp16, bf16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.codecs.codec import BLOCK, add, as_values, check
from shoal.comm.flat import as_bytes


@dataclass(frozen=True)
class Cast:
    """Casts each element to `dtype`, rounded to nearest even. torch's cast is one pass: no C kernel is needed.

    fp16 overflows to Inf beyond 65504 and loses precision below 6e-5; bf16 has the range of fp32. Relative error
    |decoded - x| / |x| of Gaussian values, measured: fp32 0, fp16 0.02 %, bf16 0.17 %.
    """

    dtype: torch.dtype

    @property
    def row(self) -> int:
        return 1

    @property
    def lossless(self) -> bool:
        return self.dtype == torch.float32

    def encoded_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, flat: Tensor, out: Tensor) -> None:
        check(self, flat, out)
        if out.storage_offset() % self.dtype.itemsize == 0:
            out.view(self.dtype).copy_(flat)
        else:
            out.copy_(as_bytes(flat.to(self.dtype)))

    def decode(self, data: Tensor, out: Tensor) -> None:
        check(self, out, data)
        out.copy_(as_values(data, self.dtype))

    def decode_add(self, data: Tensor, out: Tensor, scale: float = 1.0) -> None:
        check(self, out, data)
        values = as_values(data, self.dtype)
        # For 8.4M elements on the CPU, add_ of two dtypes takes 16 ms; a cast and an add_ in cache take 1.5 ms.
        step = BLOCK if out.device.type == "cpu" else max(1, out.numel())
        for start in range(0, out.numel(), step):
            add(out[start : start + step], values[start : start + step].float(), scale)
