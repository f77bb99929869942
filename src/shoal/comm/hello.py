"""Mutual authentication of two ranks that connect: each proves its knowledge of the group's key.

    caller   -> answerer   16 random bytes, the caller's rank, the channel
    answerer -> caller     16 random bytes, HMAC over both challenges, the ranks, the channel
    caller   -> answerer   the same from its side

A recorded hello is useless, since every challenge is new; so is one that was meant for another rank.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time

from shoal.comm.signed import derived

_CALL = struct.Struct("!16sII")
_ANSWER = struct.Struct("!16s32s")
_PROOF = struct.Struct("!32s")


class Stranger(Exception):
    """The other end does not know the group's key."""


def call(connection: socket.socket, key: bytes, rank: int, peer: int, channel: int, seconds: float) -> None:
    """Authenticates with `peer` over a connection that this rank has opened.

    Raises Stranger if the peer cannot prove itself, OSError if it hangs up or takes longer than `seconds`.
    """
    until, mine = time.monotonic() + seconds, secrets.token_bytes(16)
    connection.sendall(_CALL.pack(mine, rank, channel))
    theirs, proof = _ANSWER.unpack(receive(connection, _ANSWER.size, until))
    _check(proof, key, "answer", mine, theirs, rank, peer, channel)
    connection.sendall(_PROOF.pack(_proof(key, "call", mine, theirs, rank, peer, channel)))


def answer(connection: socket.socket, key: bytes, rank: int, seconds: float) -> tuple[int, int]:
    """Authenticates who has connected to `rank`; returns its rank and channel.

    Raises Stranger if it cannot prove itself, OSError if it says too little within `seconds`.
    """
    until, mine = time.monotonic() + seconds, secrets.token_bytes(16)
    theirs, peer, channel = _CALL.unpack(receive(connection, _CALL.size, until))
    connection.sendall(_ANSWER.pack(mine, _proof(key, "answer", theirs, mine, peer, rank, channel)))
    (proof,) = _PROOF.unpack(receive(connection, _PROOF.size, until))
    _check(proof, key, "call", theirs, mine, peer, rank, channel)
    return peer, channel


def _check(proof: bytes, key: bytes, side: str, callers: bytes, answerers: bytes, *numbers: int) -> None:
    if not hmac.compare_digest(proof, _proof(key, side, callers, answerers, *numbers)):
        raise Stranger


def _proof(key: bytes, side: str, callers: bytes, answerers: bytes, *numbers: int) -> bytes:
    return derived(key, side, callers, answerers, struct.pack("!III", *numbers))


def receive(connection: socket.socket, size: int, until: float) -> bytes:
    """Reads `size` bytes before the time `until`, which bounds the whole: single bytes cannot hold up a rank."""
    data = bytearray(size)
    fill(connection, memoryview(data), until)
    return bytes(data)


def fill(connection: socket.socket, view: memoryview, until: float) -> None:
    """Reads as many bytes as `view` has into it, before the time `until`."""
    while view:
        connection.settimeout(max(0.001, until - time.monotonic()))
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the other side hung up")
        view = view[count:]
