"""A session: records with declared fields, each followed by raw tensors. Nothing that is read can run code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.elastic.records import Malformed, decode, encode
from shoal.errors import LaunchError
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

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.numel

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        return cls(tensor.dtype, tensor.numel())


class Session:
    """One end of a session, for one thread at a time.

    kinds: the records that may come, by name.
    peer: the name of the other end, for errors.
    """

    def __init__(self, carrier: Carrier, kinds: Mapping[str, type], peer: str) -> None:
        self._carrier, self._kinds, self.peer = carrier, kinds, peer
        self.carrier = carrier.name
        self.forms: list[Form] = []
        """The raw tensors of the message received last that have not been read."""

    def send(self, record: Any, *tensors: Tensor) -> None:
        """Sends a record and contiguous tensors on the CPU. Raises SessionLost."""
        flats = [tensor.detach().view(-1) for tensor in tensors]
        body = encode(record) + b"\n"
        if flats:
            body += _described(flats)
        try:
            self._carrier.send(body, flats)
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
        self.forms = list(_forms(forms))
        return found

    def fill(self, *into: Tensor) -> None:
        """Reads the next raw tensors into these, which are contiguous, on the CPU and of their forms. Raises Malformed
        where they are not."""
        for tensor in into:
            flat = tensor.view(-1)
            if not self.forms or self.forms[0] != (flat.dtype, flat.numel()):
                raise Malformed(f"{self.forms[:1] or 'no more tensors'} instead of {Form.of(flat)}")
            del self.forms[0]
            try:
                self._carrier.fill(flat)
            except (OSError, RuntimeError) as error:
                raise self._lost(error) from error

    def tensors(self, forms: Sequence[Form] | None = None) -> list[Tensor]:
        """Reads all raw tensors into new memory. `forms`: what they must be; who leaves it out has looked."""
        if forms is not None and self.forms != list(forms):
            raise Malformed(f"tensors {self.forms[:4]}, {len(forms)} such as {list(forms)[:4]} were to come")
        found = [torch.empty(form.numel, dtype=form.dtype) for form in self.forms]
        self.fill(*found)
        return found

    def skip(self) -> None:
        """Reads what is left of the message, and forgets it."""
        while self.forms:
            self.fill(torch.empty(self.forms[0].numel, dtype=self.forms[0].dtype))

    def end(self) -> None:
        """Ends the session, from any thread; both ends notice at once."""
        self._carrier.end()

    def close(self) -> None:
        """Ends the session and gives back what it holds, for the thread that uses it."""
        self._carrier.close()

    def _lost(self, error: Exception) -> SessionLost:
        if isinstance(error, TimeoutError):
            return SessionLost(f"{self.peer} has been silent for too long")
        return SessionLost(f"the session with {self.peer} has ended: {error}")


def _described(flats: Sequence[Tensor]) -> bytes:
    """Returns the JSON of tensors' dtypes and sizes."""
    return ("[" + ",".join([f'["{_NAMES[flat.dtype]}",{flat.numel()}]' for flat in flats]) + "]").encode("ascii")


@lru_cache(64)
def _forms(text: bytes) -> tuple[Form, ...]:
    """Reads the description of a message's tensors. Messages of one kind repeat theirs."""
    if not text:
        return ()
    try:
        forms = tuple(Form(_DTYPES[name], numel) for name, numel in json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Malformed(f"no description of tensors: {error}") from None
    if any(type(form.numel) is not int or form.numel < 0 for form in forms):
        raise Malformed("a tensor of a size that is no number")
    if len(forms) > MOST_TENSORS or sum(form.nbytes for form in forms) > MOST_BYTES:
        raise Malformed(f"{len(forms):,} tensors of {sum(form.nbytes for form in forms):,} bytes")
    return forms
