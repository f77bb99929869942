"""Frames that are sealed: signed for their connection, direction and number.

    length of the body (4 bytes), number of the frame (8 bytes), HMAC (32 bytes), body

So a stranger's frames, repeated ones and those of another connection or direction are refused before anything looks at
their bodies.
"""

from __future__ import annotations

import hmac
import struct

from shoal.comm.signed import derived

HEAD = struct.Struct("!IQ32s")


def sealed(body: bytes, key: bytes, sender: str, number: int) -> bytes:
    """Returns the frame of `body`, the `number`-th that `sender` sends under the connection's `key`."""
    return HEAD.pack(len(body), number, _proof(key, sender, number, body)) + body


class Seal:
    """Counts and signs the frames of one direction. `sender`: the name of the end that sends them."""

    def __init__(self, key: bytes, sender: str) -> None:
        self.key, self._sender, self._count = key, sender, 0

    def put(self, body: bytes) -> bytes:
        """Returns the next frame."""
        self._count += 1
        return sealed(body, self.key, self._sender, self._count - 1)

    def holds(self, number: int, proof: bytes, body: bytes) -> bool:
        """Returns whether this is the next frame; it is counted then."""
        right = number == self._count and hmac.compare_digest(proof, _proof(self.key, self._sender, number, body))
        self._count += right
        return right


def _proof(key: bytes, sender: str, number: int, body: bytes) -> bytes:
    return derived(key, sender, number.to_bytes(8, "big"), body)
