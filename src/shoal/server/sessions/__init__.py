"""Sessions: two members, a server and one client, that exchange typed records and raw tensors.

A client opens a session at a server's address by a token that both know; it ends with the client, and no other session
notices. On one host it goes through shared memory, else over TCP.
"""

from shoal.server.sessions.address import Address, key_of_token
from shoal.server.sessions.beside import accelerator
from shoal.server.sessions.listener import Listener
from shoal.server.sessions.opening import call
from shoal.server.sessions.session import Form, Session, SessionLost, memory, same_kind

__all__ = [
    "Address",
    "Form",
    "Listener",
    "Session",
    "SessionLost",
    "accelerator",
    "call",
    "key_of_token",
    "memory",
    "same_kind",
]
