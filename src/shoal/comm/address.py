"""Hosts and ports as text and for sockets, of IPv4 and IPv6."""

from __future__ import annotations

import socket


def family_of(host: str) -> socket.AddressFamily:
    """Returns the family of an address; a name counts as one of IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def host_port(host: str, port: int | str) -> str:
    """Returns host:port, with an address of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
