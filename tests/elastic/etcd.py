"""Two clusters of etcd for the tests: one in this process that only pretends, with a clock of its own, and real ones of
Debian's package."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from shoal.elastic.etcd import Etcd, parse
from tests.launch.conftest import free_port
from tests.launch.packages import debian


class Pretended:
    """The part of etcd's gateway that is used: keys with revisions, transactions on one key's revision, leases."""

    def __init__(self, user: str = "", password: str = "") -> None:
        self._lock = threading.Lock()
        self._login = user, password
        self._revision, self._late = 1, 0.0
        self.keys: dict[str, tuple[str, int, str]] = {}
        self.leases: dict[str, tuple[int, float]] = {}
        self.silent = False
        pretended = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                code, found = pretended.answer(self.path, body, self.headers.get("Authorization", ""))
                data = json.dumps(found).encode()
                self.send_response(code)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        login = f"{':'.join(self._login)}@" if self._login[0] else ""
        return f"etcd://{login}127.0.0.1:{self._server.server_address[1]}/jobs/one"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def pass_time(self, seconds: float) -> None:
        self._late += seconds

    def names(self) -> list[str]:
        """The keys that there are."""
        with self._lock:
            self._expire()
            return sorted(base64.b64decode(key).decode() for key in self.keys)

    def answer(self, path: str, body: dict[str, Any], token: str) -> tuple[int, dict[str, Any]]:
        with self._lock:
            if self.silent:
                return 503, {"error": "etcdserver: no leader", "code": 14, "message": "etcdserver: no leader"}
            self._expire()
            if path == "/v3/auth/authenticate":
                right = (body["name"], body["password"]) == self._login
                text = "etcdserver: authentication failed, invalid user ID or password"
                return (200, {"token": "token"}) if right else (400, {"error": text, "code": 3})
            if self._login[0] and not token:
                return 400, {"error": "etcdserver: user name is empty", "code": 3}
            do = {
                "/v3/kv/range": self._range,
                "/v3/kv/txn": self._txn,
                "/v3/lease/grant": self._grant,
                "/v3/lease/keepalive": self._renew,
                "/v3/lease/revoke": self._revoke,
            }[path]
            return 200, {"header": {"revision": str(self._revision)}, **do(body)}

    def _now(self) -> float:
        return time.monotonic() + self._late

    def _expire(self) -> None:
        for lease in [each for each, (_, until) in self.leases.items() if until < self._now()]:
            self._revoke({"ID": lease})

    def _range(self, body: dict[str, Any]) -> dict[str, Any]:
        chosen = sorted((key for key in self.keys if _within(key, body)), key=base64.b64decode)
        return {
            "kvs": [
                {"key": each, "value": self.keys[each][0], "mod_revision": str(self.keys[each][1])} for each in chosen
            ]
        }

    def _txn(self, body: dict[str, Any]) -> dict[str, Any]:
        [condition] = body["compare"]
        assert (condition["target"], condition["result"]) == ("MOD", "EQUAL")
        if int(condition["mod_revision"]) != self.keys.get(condition["key"], ("", 0, ""))[1]:
            return {}
        self._revision += 1
        for change in body["success"]:
            if "request_put" in change:
                put = change["request_put"]
                assert put["lease"] == "0" or put["lease"] in self.leases
                self.keys[put["key"]] = put["value"], self._revision, put["lease"]
            else:
                for key in [key for key in self.keys if _within(key, change["request_delete_range"])]:
                    del self.keys[key]
        return {"succeeded": True, "header": {"revision": str(self._revision)}}

    def _grant(self, body: dict[str, Any]) -> dict[str, Any]:
        lease, seconds = str(len(self.leases) + 7_000_000_000), int(body["TTL"])
        self.leases[lease] = seconds, self._now() + seconds
        return {"ID": lease, "TTL": str(seconds)}

    def _renew(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["ID"] not in self.leases:
            return {"result": {"ID": body["ID"]}}
        seconds, _ = self.leases[body["ID"]]
        self.leases[body["ID"]] = seconds, self._now() + seconds
        return {"result": {"ID": body["ID"], "TTL": str(seconds)}}

    def _revoke(self, body: dict[str, Any]) -> dict[str, Any]:
        self.leases[body["ID"]] = 0, float("inf")
        self.keys = {key: each for key, each in self.keys.items() if each[2] != body["ID"]}
        del self.leases[body["ID"]]
        return {}


def _within(key: str, body: dict[str, Any]) -> bool:
    first, last = base64.b64decode(body["key"]), base64.b64decode(body.get("range_end", ""))
    return first <= base64.b64decode(key) < last if last else key == body["key"]


class Real:
    """A cluster of `members` processes of etcd in `folder`; skips the test where the package cannot be had.

    tls: a certificate and its key, for clients.
    """

    def __init__(self, folder: Path, members: int = 1, tls: tuple[Path, Path] | None = None) -> None:
        self._program = debian("etcd-server") / "usr/bin/etcd"
        self._running = ExitStack()
        self.scheme = "http" if tls is None else "https"
        ports = [(free_port(), free_port()) for _ in range(members)]
        whole = ",".join(f"m{number}=http://127.0.0.1:{peer}" for number, (_, peer) in enumerate(ports))
        secure = [] if tls is None else ["--cert-file", str(tls[0]), "--key-file", str(tls[1])]
        self.hosts = ",".join(f"127.0.0.1:{port}" for port, _ in ports)
        self.members = [
            self._start(folder, f"m{number}", port, peer, ["--initial-cluster", whole, *secure])
            for number, (port, peer) in enumerate(ports)
        ]

    @property
    def url(self) -> str:
        return f"{'etcd' if self.scheme == 'http' else 'etcds'}://{self.hosts}/jobs/one"

    def lose_leader(self) -> None:
        """Kills the member that leads the cluster."""
        for number, host in enumerate(self.hosts.split(",")):
            if self.members[number].poll() is None:
                state = asyncio.run(Etcd(parse(f"etcd://{host}/x"))._ask("maintenance/status", {}))
                if state["leader"] == state["header"]["member_id"]:
                    self.members[number].kill()
                    self.members[number].wait()
                    return
        raise AssertionError("no member leads")

    def close(self) -> None:
        self._running.close()

    def _start(self, folder: Path, name: str, port: str, peer: str, options: list[str]) -> subprocess.Popen[bytes]:
        client, peers = f"{self.scheme}://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
        command = [str(self._program), "--name", name, "--data-dir", str(folder / name), "--log-level", "error"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, *options]
        log = self._running.enter_context((folder / f"{name}.log").open("ab"))
        environ = {**os.environ, "ETCD_UNSUPPORTED_ARCH": {"aarch64": "arm64"}.get(os.uname().machine, "")}
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        self._running.callback(process.wait)
        self._running.callback(process.kill)
        return process
