"""A client of an etcd cluster: keys, transactions and leases over its gateway, which takes JSON over HTTP.

    POST /v3/kv/txn {"compare": [...], "success": [...]}     keys and values in base64, 64-bit numbers as texts

Each request goes to the endpoint that answered last, else to the others in turn. One that comes to nobody raises
Unreachable, and may nevertheless have been carried out: callers send only what may be sent again.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from shoal.comm.address import host_port
from shoal.errors import LaunchError, UserError

SECONDS = 1.0
"""Seconds for which an endpoint is waited for, to connect and to answer, before the next one is asked."""
MOST_BYTES = 1 << 28
SCHEMES = ("etcd", "etcds")
USER, PASSWORD = "ETCDCTL_USER", "ETCDCTL_PASSWORD"
CERTIFICATES = ("ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY")
_TRY_ANOTHER = (1, 2, 4, 14)  # codes of gRPC: canceled, unknown, deadline exceeded, unavailable
_DENIED, _UNAUTHENTICATED = 7, 16


class Unreachable(ConnectionError):
    """No endpoint of the cluster answers, or none that has a leader."""


@dataclass(frozen=True)
class Address:
    """An etcd cluster, and the keys in it that are a job's own: those that begin with `prefix`, which ends in "/".

    endpoints: host and port of each member. tls: whether they speak HTTPS.
    """

    endpoints: tuple[tuple[str, int], ...]
    prefix: str
    tls: bool = False
    user: str = ""
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        hosts = ",".join(host_port(*each) for each in self.endpoints)
        return f"{SCHEMES[self.tls]}://{hosts}{self.prefix.removesuffix('/')}"


def parse(url: str, environ: Mapping[str, str] = os.environ) -> Address:
    """Reads etcd://[USER:PASSWORD@]HOST[:2379][,HOST:PORT...]/PREFIX, and the user from etcdctl's variables where the
    URL names none. Raises UserError for anything else."""
    scheme, _, rest = url.partition("://")
    place, _, prefix = rest.partition("/")
    login, _, hosts = place.rpartition("@")
    try:
        parts = [urlsplit(f"//{each}") for each in hosts.split(",")]
        endpoints = tuple((part.hostname or "", 2379 if part.port is None else part.port) for part in parts)
    except ValueError:
        endpoints = ()
    if scheme not in SCHEMES or not endpoints or not all(host and port for host, port in endpoints):
        raise UserError(
            f"{_without_password(url)} is no address of an etcd cluster. Write it like etcd://host:2379/prefix, with "
            "etcds:// for TLS, several members as host:2379,host2:2379"
        )
    if not prefix.strip("/"):
        raise UserError(
            f"{_without_password(url)} names no prefix: give the job keys of its own, like {scheme}://{hosts}/my-job"
        )
    if not login:
        login = environ.get(USER, "")
        login += f":{environ[PASSWORD]}" if PASSWORD in environ and ":" not in login else ""
        user, _, password = login.partition(":")
    else:
        user, _, password = (unquote(part) for part in login.partition(":"))
    return Address(endpoints, f"/{prefix.strip('/')}/", scheme == SCHEMES[1], user, password)


class Etcd:
    """A client of the cluster at `address`. TLS goes by etcdctl's variables for certificates. Raises UserError where
    they cannot be read."""

    def __init__(self, address: Address, environ: Mapping[str, str] = os.environ) -> None:
        self.address = address
        self._context = _context(environ) if address.tls else None
        self._endpoints = list(address.endpoints)
        self._token = ""
        self._lock = threading.Lock()
        self.revision = 0
        """That of the cluster in the newest answer: how many changes of any keys it had seen."""

    def own_host(self) -> str:
        """Returns the address of this host from which the cluster is reached; nothing is sent. Raises LaunchError."""
        for host, port in self.address.endpoints:
            try:
                family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
                with socket.socket(family, kind) as probe:
                    probe.connect(place)
                    return str(probe.getsockname()[0])
            except OSError as error:
                why = error
        raise LaunchError(f"{self.address} is not to be reached from this host: {why}")

    async def get(self, key: str) -> tuple[bytes | None, int]:
        """Returns the value of a key and the revision at which it was written; None and 0 where there is none."""
        found = (await self._ask("kv/range", {"key": _text(key)})).get("kvs", [])
        return (_bytes(found[0].get("value", "")), int(found[0]["mod_revision"])) if found else (None, 0)

    async def below(self, prefix: str) -> list[tuple[str, bytes]]:
        """Returns the keys that begin with `prefix`, and their values, in order."""
        found = (await self._ask("kv/range", _range(prefix) | {"sort_order": "ASCEND"})).get("kvs", [])
        return [(_bytes(each["key"]).decode(), _bytes(each.get("value", ""))) for each in found]

    async def change(self, key: str, revision: int, changes: Sequence[Mapping[str, Any]]) -> int:
        """Makes all changes (`put`, `remove`) if `key` was last written at `revision` (0: if it is not there), else
        none. Returns the revision at which they were made, 0 where they were not."""
        same = {"key": _text(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
        done = await self._ask("kv/txn", {"compare": [same], "success": list(changes)})
        return int(done["header"]["revision"]) if done.get("succeeded") else 0

    async def changed(self, key: str, since: int, seconds: float) -> bool:
        """Waits until a key is written or removed after the revision `since`. False where nothing is known of that: not
        within `seconds`, or because the endpoint does not answer or refuses to watch it.

        The gateway answers with a stream of lines. HTTP/1.0 has them without chunks.
        """
        host, port = self._endpoints[0]
        body = json.dumps({"create_request": {"key": _text(key), "start_revision": str(since + 1)}})
        headers = {"Host": host_port(host, port), "Content-Type": "application/json", "Content-Length": str(len(body))}
        headers |= {"Authorization": self._token} if self._token else {}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        with suppress(OSError, asyncio.IncompleteReadError, ValueError):
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_connection(host, port, ssl=self._context)
                try:
                    writer.write(f"POST /v3/watch HTTP/1.0\r\n{head}\r\n{body}".encode())
                    await reader.readuntil(b"\r\n\r\n")
                    while found := json.loads(await reader.readline()).get("result"):
                        if found.get("events"):
                            return True
                        if found.get("canceled"):
                            return False
                finally:
                    writer.transport.abort()
        return False

    async def grant(self, seconds: int) -> tuple[str, float]:
        """Makes a lease; returns its id and for how many seconds it is granted, which may be more."""
        done = await self._ask("lease/grant", {"TTL": str(seconds)})
        return str(done["ID"]), float(done["TTL"])

    async def renew(self, lease: str) -> float:
        """Renews a lease; returns its seconds, 0 where it has run out."""
        return float((await self._ask("lease/keepalive", {"ID": lease})).get("result", {}).get("TTL", 0))

    async def revoke(self, lease: str) -> None:
        """Ends a lease, and with it its keys."""
        await self._ask("lease/revoke", {"ID": lease})

    async def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request. Raises Unreachable, or UserError where the cluster refuses it."""
        found = await asyncio.to_thread(self._ask_all, path, body)
        self.revision = int(found.get("header", {}).get("revision", self.revision))
        return found

    def _ask_all(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        causes = []
        for endpoint in list(self._endpoints):
            try:
                found = self._ask_as_user(endpoint, path, body)
            except (OSError, http.client.HTTPException) as error:
                causes.append(f"{endpoint[0]}:{endpoint[1]}: {str(error) or type(error).__name__}")
                continue
            with self._lock:
                self._endpoints.sort(key=lambda each: each != endpoint)
            return found
        raise Unreachable(f"no etcd answers: {'; '.join(causes)}")

    def _ask_as_user(self, endpoint: tuple[str, int], path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        user = self.address.user
        login = {"name": user, "password": self.address.password}
        for last in (False, True):
            if user and not self._token:
                self._token = str(self._post(endpoint, "auth/authenticate", login).get("token", ""))
            found = self._post(endpoint, path, body)
            code, text = int(found.get("code", 0)), str(found.get("message", found.get("error", "")))
            old = user and (code == _UNAUTHENTICATED or "auth store is old" in text)
            if not old or last:
                break
            self._token = ""  # it has run out, or the endpoint has begun anew
        if not code and "error" not in found:
            return found
        raise self._refusal(code, text)

    def _refusal(self, code: int, text: str) -> Exception:
        """Returns the error for a refused request. One that another endpoint may carry out is an OSError."""
        if code in _TRY_ANOTHER:
            return ConnectionError(text)
        if code == _DENIED:
            return UserError(f"{self.address}: user {self.address.user!r} may not read and write these keys ({text})")
        if "user name is empty" in text or "authentication" in text or code == _UNAUTHENTICATED:
            return UserError(
                f"{self.address} refuses user {self.address.user!r}: {text}. Give the user and password in the URL, "
                f"or as {USER} and {PASSWORD}"
            )
        return LaunchError(f"{self.address} refuses a request: {text}")

    def _post(self, endpoint: tuple[str, int], path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what an endpoint answers. Raises OSError or HTTPException where it does not, UserError where that is
        no answer of etcd, or the login is refused."""
        host, port = endpoint
        context = self._context
        connection = (
            http.client.HTTPSConnection(host, port, timeout=SECONDS, context=context)
            if context is not None
            else http.client.HTTPConnection(host, port, timeout=SECONDS)
        )
        headers = {"Content-Type": "application/json"} | ({"Authorization": self._token} if self._token else {})
        try:
            connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
            answer = connection.getresponse()
            data = answer.read(MOST_BYTES)
        except (ConnectionResetError, BrokenPipeError) as error:  # at the end of the line, or with bytes on the way
            hint = "" if self.address.tls else "; if it speaks TLS, write etcds://"
            raise ConnectionResetError(f"it hung up{hint}") from error
        except ssl.SSLError as error:
            raise UserError(
                f"{self.address}: no TLS with {host}:{port}: {error}. Look at {', '.join(CERTIFICATES)}; a cluster "
                "without TLS has a URL with etcd://"
            ) from error
        finally:
            connection.close()
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or (answer.status != 200 and "error" not in found):
            raise UserError(
                f"{self.address}: what answers at {host}:{port} is no etcd of version 3.4 or newer (HTTP "
                f"{answer.status} {data[:80]!r}). A cluster with TLS has a URL with etcds://"
            )
        if isinstance(said := found.get("error"), dict):  # that of a stream
            found = {"error": said.get("message", ""), "code": said.get("grpc_code", 0)}
        if path.startswith("auth/") and "error" in found:
            raise self._refusal(int(found.get("code", 0)), str(found["error"]))
        return found


def put(key: str, value: bytes, lease: str = "0") -> dict[str, Any]:
    """Returns the change that writes a key, which ends with `lease` where that is given."""
    return {"request_put": {"key": _text(key), "value": base64.b64encode(value).decode(), "lease": lease}}


def remove(prefix: str) -> dict[str, Any]:
    """Returns the change that removes all keys that begin with `prefix`."""
    return {"request_delete_range": _range(prefix)}


def _range(prefix: str) -> dict[str, str]:
    return {"key": _text(prefix), "range_end": _text(prefix[:-1] + chr(ord(prefix[-1]) + 1))}


def _text(key: str) -> str:
    return base64.b64encode(key.encode()).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _context(environ: Mapping[str, str]) -> ssl.SSLContext:
    authority, certificate, key = (environ.get(name) for name in CERTIFICATES)
    try:
        context = ssl.create_default_context(cafile=authority)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"the certificates that {', '.join(CERTIFICATES)} name cannot be read: {error}") from error
    return context


def _without_password(url: str) -> str:
    scheme, found, rest = url.partition("://")
    return f"{scheme}{found}{rest.rpartition('@')[2]}"
