"""A session: records with declared fields, each followed by raw tensors. Nothing that is read can run code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.device import CPU
from shoal.elastic.records import Malformed, decode, encode
from shoal.errors import LaunchError
from shoal.server.sessions.beside import Beside
from shoal.server.sessions.carriers import Carrier

MOST_TENSORS, MOST_BYTES = 4096, 1 << 38
"""The most tensors of a message, and the bytes of all of them."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class SessionLost(LaunchError):
    """The other end of a session is gone, or has been silent for too long."""


class Form(NamedTuple):
    """Describes a raw tensor before it is read: 1-D, of `numel` elements."""

    dtype: torch.dtype
    numel: int
    beside: bool = False  # it comes from accelerator to accelerator

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.numel

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        return cls(tensor.dtype, tensor.numel(), not tensor.is_cpu)


def same_kind(forms: Sequence[Form], others: Sequence[Form]) -> bool:
    """Returns whether tensors are of the same dtypes and sizes, whichever way they come."""
    return [form[:2] for form in forms] == [form[:2] for form in others]


def memory(forms: Sequence[Form], device: torch.device | None) -> list[Tensor]:
    """Returns memory for tensors that come beside, on the accelerator `device`, and for others, on the CPU."""
    return [torch.empty(form.numel, dtype=form.dtype, device=device if form.beside else CPU) for form in forms]


class Session:
    """One end of a session, for one thread at a time. Tensors on the accelerator of `beside` go from there; all others
    go by the host's memory, and those on an accelerator are copied.

    kinds: the records that may come, by name.
    peer: the name of the other end, for errors.
    """

    def __init__(self, carrier: Carrier, kinds: Mapping[str, type], peer: str, beside: Beside | None = None) -> None:
        self._carrier, self._kinds, self.peer, self._beside = carrier, kinds, peer, beside
        self.device = None if beside is None else beside.device
        self.carrier = carrier.name
        self.forms: list[Form] = []
        """The raw tensors of the message received last that have not been read."""

    def send(self, record: Any, *tensors: Tensor) -> None:
        """Sends a record and contiguous tensors. Raises SessionLost."""
        flats = [self._on_way(tensor.detach().view(-1)) for tensor in tensors]
        body = encode(record) + b"\n"
        if flats:
            body += _described(flats)
        try:
            self._carrier.send(body, [flat for flat in flats if flat.is_cpu])
            for flat in flats:
                if not flat.is_cpu:
                    self._end_beside().send(flat)
        except (OSError, RuntimeError) as error:
            raise self._lost(error) from error

    def receive(self, seconds: float | None = None) -> Any:
        """Returns the next record, waiting `seconds` at most; its tensors are described by `forms`, and are to be read
        (`fill`, `tensors`, `skip`) before the next one. Raises Malformed or SessionLost."""
        assert not self.forms, "tensors of the last message have not been read"
        try:
            body = self._carrier.receive(seconds)
        except (OSError, RuntimeError) as error:
            raise self._lost(error) from error
        record, _, forms = body.partition(b"\n")
        found = decode(record, self._kinds)
        described = list(_forms(forms))
        if self._beside is None and any(form.beside for form in described):
            raise Malformed("a tensor for an accelerator, which this session has not")
        self.forms = described
        return found

    def fill(self, *into: Tensor) -> None:
        """Reads the next raw tensors into these, which are contiguous, of their dtypes and sizes, and on any device.
        Raises Malformed where they are not."""
        flats = [tensor.view(-1) for tensor in into]
        rooms = []
        for flat in flats:
            if not self.forms or self.forms[0][:2] != (flat.dtype, flat.numel()):
                raise Malformed(f"{self.forms[:1] or 'no more tensors'} instead of {Form.of(flat)}")
            form = self.forms.pop(0)
            there = self.device if form.beside else CPU
            rooms.append(flat if flat.device == there else memory([form], self.device)[0])
        self._fill(rooms)
        for flat, room in zip(flats, rooms, strict=True):
            if flat is not room:
                flat.copy_(room)

    def _fill(self, rooms: list[Tensor]) -> None:
        try:
            for room in rooms:
                if room.is_cpu:
                    self._carrier.fill(room)
            for room in rooms:  # they come behind those on the CPU, as they are sent
                if not room.is_cpu:
                    self._end_beside().fill(room)
        except (OSError, RuntimeError) as error:
            raise self._lost(error) from error

    def tensors(self, forms: Sequence[Form] | None = None) -> list[Tensor]:
        """Reads all raw tensors into new memory. `forms`: what they must be; who leaves it out has looked."""
        if forms is not None and self.forms != list(forms):
            raise Malformed(f"tensors {self.forms[:4]}, {len(forms)} such as {list(forms)[:4]} were to come")
        found = memory(self.forms, self.device)
        self.fill(*found)
        return found

    def skip(self) -> None:
        """Reads what is left of the message, and forgets it."""
        left, self.forms = sorted(self.forms, key=lambda form: form.beside), []
        for form in left:  # one by one: each may be large
            self._fill(memory([form], self.device))

    def end(self) -> None:
        """Ends the session, from any thread; both ends notice at once."""
        self._carrier.end()
        if self._beside is not None:
            self._beside.end()

    def close(self) -> None:
        """Ends the session and gives back what it holds, for the thread that uses it."""
        self._carrier.close()
        if self._beside is not None:
            self._beside.end()

    def _on_way(self, flat: Tensor) -> Tensor:
        return flat if flat.is_cpu or flat.device == self.device else flat.cpu()

    def _end_beside(self) -> Beside:
        assert self._beside is not None, "a tensor on an accelerator, which this session has not"
        return self._beside

    def _lost(self, error: Exception) -> SessionLost:
        if isinstance(error, TimeoutError):
            return SessionLost(f"{self.peer} has been silent for too long")
        return SessionLost(f"the session with {self.peer} has ended: {error}")


def _described(flats: Sequence[Tensor]) -> bytes:
    """Returns the JSON of tensors' dtypes and sizes, and whether they come beside the carrier."""
    each = [f'["{_NAMES[flat.dtype]}",{flat.numel()}{"" if flat.is_cpu else ",true"}]' for flat in flats]
    return f"[{','.join(each)}]".encode("ascii")


@lru_cache(64)
def _forms(text: bytes) -> tuple[Form, ...]:
    """Reads the description of a message's tensors. Messages of one kind repeat theirs."""
    if not text:
        return ()
    try:
        forms = tuple(Form(_DTYPES[name], *rest) for name, *rest in json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Malformed(f"no description of tensors: {error}") from None
    if any(type(form.numel) is not int or form.numel < 0 or type(form.beside) is not bool for form in forms):
        raise Malformed("a tensor of a size that is no number")
    if len(forms) > MOST_TENSORS or sum(form.nbytes for form in forms) > MOST_BYTES:
        raise Malformed(f"{len(forms):,} tensors of {sum(form.nbytes for form in forms):,} bytes")
    return forms
