"""Where a server listens, and the key that guards it."""

from __future__ import annotations

import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from shoal.comm.address import family_of, host_port
from shoal.comm.secret import LEAST, find_secret
from shoal.comm.signed import derived
from shoal.errors import UserError


class Address(NamedTuple):
    """A host, as a name or number, and a port."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Address:
        """Reads "host:port", "[::1]:port" or "tcp://host:port". Raises UserError for anything else."""
        try:
            parts = urlsplit(text if "://" in text else f"tcp://{text}")
            if parts.scheme == "tcp" and parts.hostname and parts.port is not None and not parts.path:
                return cls(parts.hostname, parts.port)
        except ValueError:
            pass
        raise UserError(f"the address of a server, {text!r}, is not host:port, e.g. 10.0.0.1:29600")

    @property
    def family(self) -> socket.AddressFamily:
        return family_of(self.host)

    def __str__(self) -> str:
        return host_port(*self)


def key_of_token(token: str | None) -> bytes:
    """Returns the key by which sessions are authenticated; without a token that of the user's secret (comm/secret.py).
    Raises UserError for a token that is too short."""
    if token is None:
        return derived(find_secret(), "server")
    if len(token) < LEAST:
        raise UserError(f"a token of {len(token)} characters guards nothing: give at least {LEAST}, or leave it out")
    return derived(token.encode(), "server")
