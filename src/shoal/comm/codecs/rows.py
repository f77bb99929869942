"""Codecs that encode rows of a fixed number of elements independently: a header, then the codes of the row.

    | header | codes of row 0 | header | codes of row 1 | ... | header | codes of the last row, which may be shorter |

A C kernel (native/codecs.c) does it on the CPU; torch elsewhere, or without a compiler: the same bytes and values, bit
by bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoal.comm.codecs.codec import BLOCK, add, check
from shoal.errors import UserError
from shoal.native import library

MAX_ROW = 65536


@dataclass(frozen=True)
class Rows(ABC):
    """The common part of u8, u4 and sign. `row`: elements that one header serves, a multiple of 8 up to 65536.

    A format gives its name among the kernels, its sizes, and the torch form of a whole matrix of rows.
    """

    row: int

    kernels: ClassVar[str]
    header_bytes: ClassVar[int]
    elements_per_byte: ClassVar[int]

    def __post_init__(self) -> None:
        if not isinstance(self.row, int) or not 8 <= self.row <= MAX_ROW or self.row % 8:
            raise UserError(f"codec {self.kernels}: row = {self.row!r} is not a multiple of 8 between 8 and {MAX_ROW}")

    @property
    def lossless(self) -> bool:
        return False

    def encoded_bytes(self, numel: int) -> int:
        full, tail = divmod(numel, self.row)
        return full * self._row_bytes(self.row) + (self._row_bytes(tail) if tail else 0)

    def encode(self, flat: Tensor, out: Tensor) -> None:
        check(self, flat, out)
        kernel = self._kernel("encode", flat)
        for piece, data in self._pieces(flat, out, kernel):
            values = piece.float()
            if kernel is not None:
                kernel(values.data_ptr(), values.numel(), self.row, data.data_ptr())
            else:
                for rows, encoded in self._matrices(values, data):
                    self.encode_rows(rows, encoded)

    def decode(self, data: Tensor, out: Tensor) -> None:
        self._decode(data, out, None)

    def decode_add(self, data: Tensor, out: Tensor, scale: float = 1.0) -> None:
        self._decode(data, out, scale)

    def _decode(self, data: Tensor, out: Tensor, scale: float | None) -> None:
        """Decodes to `out`; or, with a `scale`, adds the values times it."""
        check(self, out, data)
        kernel = self._kernel("decode", out)
        for piece, encoded in self._pieces(out, data, kernel):
            if kernel is not None and piece.dtype == torch.float32:
                kernel(encoded.data_ptr(), piece.numel(), self.row, piece.data_ptr(), scale or 0.0, scale is not None)
            elif scale is None:
                piece.copy_(self._decoded(encoded, piece.numel(), kernel))
            else:
                add(piece, self._decoded(encoded, piece.numel(), kernel), scale)

    @abstractmethod
    def encode_rows(self, values: Tensor, out: Tensor) -> None:
        """Encodes the fp32 `values` [rows, n] into `out` (uint8 [rows, row bytes], strided)."""

    @abstractmethod
    def decode_rows(self, data: Tensor, numel: int) -> Tensor:
        """Returns the fp32 values [rows, numel] of `data` (uint8 [rows, row bytes], strided)."""

    def _row_bytes(self, numel: int) -> int:
        return self.header_bytes - numel // -self.elements_per_byte

    def _kernel(self, operation: str, flat: Tensor) -> Callable[..., Any] | None:
        kernels = library() if flat.device.type == "cpu" else None
        return None if kernels is None else getattr(kernels, f"shoal_{self.kernels}_{operation}")

    def _pieces(self, flat: Tensor, data: Tensor, kernel: object) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields whole rows and their bytes: all at once for a kernel or a GPU, else as many as stay in cache."""
        numel = flat.numel()
        at_once = flat.device.type != "cpu" or (kernel is not None and flat.dtype == torch.float32)
        step = max(1, numel) if at_once else max(self.row, BLOCK // self.row * self.row)
        for start in range(0, numel, step):
            stop = min(start + step, numel)
            yield flat[start:stop], data[self.encoded_bytes(start) : self.encoded_bytes(stop)]

    def _matrices(self, flat: Tensor, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the full rows, and the short last one, each as a matrix with the matrix of its bytes."""
        full = flat.numel() // self.row * self.row
        border = self.encoded_bytes(full)
        if full:
            yield flat[:full].view(-1, self.row), data[:border].view(-1, self._row_bytes(self.row))
        if full < flat.numel():
            yield flat[full:].view(1, -1), data[border:].view(1, -1)

    def _decoded(self, data: Tensor, numel: int, kernel: Callable[..., Any] | None) -> Tensor:
        decoded = torch.empty(numel, device=data.device)
        if kernel is not None:
            kernel(data.data_ptr(), numel, self.row, decoded.data_ptr(), 0.0, False)
            return decoded
        for rows, encoded in self._matrices(decoded, data):
            rows.copy_(self.decode_rows(encoded, rows.shape[1]))
        return decoded


def get_header(data: Tensor, numbers: int) -> Tensor:
    """Returns the fp32 header [rows, numbers] of rows of bytes at any address."""
    return data[:, : 4 * numbers].clone(memory_format=torch.contiguous_format).view(torch.float32)


def put_header(data: Tensor, *numbers: Tensor) -> None:
    """Writes fp32 [rows, 1] `numbers` as the header of rows of bytes."""
    data[:, : 4 * len(numbers)] = torch.cat(numbers, 1).view(torch.uint8)
