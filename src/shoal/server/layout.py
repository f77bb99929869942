"""How weights and gradients travel: in chunks, flat tensors that hold several parameters each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.chunks import Chunk
from shoal.chunks.spec import Slot
from shoal.comm.codecs import Codec, codec
from shoal.device import CPU
from shoal.elastic.records import Malformed
from shoal.plan import Option
from shoal.server.sessions import Form


@dataclass(frozen=True)
class Stretch:
    """A chunk: `numel` elements of `dtype`, with parameters in `slots`; its gradient has `grad_dtype`, None if
    it is not trained."""

    numel: int
    dtype: torch.dtype
    grad_dtype: torch.dtype | None
    slots: tuple[Slot, ...]

    @property
    def form(self) -> Form:
        """Describes the weights on their way."""
        return Form(self.dtype, self.numel)

    @property
    def grad_form(self) -> Form:
        """Describes the gradient on its way, where no codec encodes it."""
        assert self.grad_dtype is not None
        return Form(self.grad_dtype, self.numel)


@dataclass(frozen=True)
class Layout:
    """The chunks of a server's weights, and the codec of the gradients that it is sent.

    statistics: how many numbers (fp64) BatchNorm's statistics have, which travel after the chunks, both ways.
    """

    stretches: tuple[Stretch, ...]
    option: Option
    statistics: int = 0

    @property
    def codec(self) -> Codec:
        return codec(self.option)

    @classmethod
    def of(cls, chunks: Sequence[Chunk], option: Option, statistics: int = 0) -> Layout:
        """Describes an engine's chunks."""
        kinds = [each.grad_dtype if each.trainable else None for each in chunks]
        pairs = zip(chunks, kinds, strict=True)
        stretches = tuple(Stretch(each.size, each.data.dtype, kind, each.slots) for each, kind in pairs)
        return cls(stretches, option, statistics)

    @property
    def trained(self) -> list[Stretch]:
        """The chunks that have gradients."""
        return [each for each in self.stretches if each.grad_dtype is not None]

    def pushed(self) -> list[Form]:
        """Describes the raw tensors of a push: gradients as they are, or encoded, and what it adds to statistics."""
        if self.codec.lossless:
            return [each.grad_form for each in self.trained] + self._beside
        return [Form(torch.uint8, self.codec.encoded_bytes(each.numel)) for each in self.trained] + self._beside

    def pulled(self) -> list[Form]:
        """Describes the raw tensors of a pull: weights and statistics."""
        return [each.form for each in self.stretches] + self._beside

    def weights_on(self, device: torch.device) -> list[Tensor]:
        """Returns memory for what a pull brings: weights on `device`, statistics on the CPU."""
        places = [device] * len(self.stretches) + [CPU] * len(self._beside)
        pairs = zip(self.pulled(), places, strict=True)
        return [torch.empty(form.numel, dtype=form.dtype, device=at) for form, at in pairs]

    @property
    def _beside(self) -> list[Form]:
        return [Form(torch.float64, self.statistics)] if self.statistics else []

    def to_json(self) -> dict[str, object]:
        stretches = [
            [
                each.numel,
                _name(each.dtype),
                None if each.grad_dtype is None else _name(each.grad_dtype),
                [[slot.name, list(slot.shape), slot.offset] for slot in each.slots],
            ]
            for each in self.stretches
        ]
        return {"chunks": stretches, "codec": self.option, "statistics": self.statistics}

    @classmethod
    def from_json(cls, table: dict[str, object]) -> Layout:
        """Reads what `to_json` gave. Raises Malformed for anything else."""
        try:
            stretches = tuple(
                Stretch(
                    int(numel),
                    _DTYPES[dtype],
                    None if grad_dtype is None else _DTYPES[grad_dtype],
                    tuple(Slot(str(name), torch.Size(shape), int(offset)) for name, shape, offset in slots),
                )
                for numel, dtype, grad_dtype, slots in table["chunks"]  # type: ignore[attr-defined]
            )
            found = cls(stretches, table["codec"], int(table["statistics"]))  # type: ignore[arg-type, call-overload]
            _ = found.codec
        except (ValueError, TypeError, KeyError) as error:
            raise Malformed(f"no layout of weights: {error}") from None
        for stretch in found.stretches:
            if any(slot.offset < 0 or slot.offset + slot.numel > stretch.numel for slot in stretch.slots):
                raise Malformed("a layout whose parameters lie outside of their chunks")
        return found


def described(table: object) -> Tensor:
    """Returns JSON as a raw tensor."""
    return torch.frombuffer(bytearray(json.dumps(table).encode()), dtype=torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DTYPES = {_name(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
