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
from collections import Counter
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from shoal.elastic.etcd import Etcd, parse
from tests.launch.conftest import free_port
from tests.launch.packages import debian


class Pretended:
    """The part of etcd's gateway that is used: keys with revisions, transactions on one key's revision, leases, and a
    watch of one key. asked: how often each path was. watches: whether it can."""

    def __init__(self, user: str = "", password: str = "") -> None:
        self._lock = threading.Lock()
        self._login = user, password
        self._revision, self._late = 1, 0.0
        self.keys: dict[str, tuple[str, int, str]] = {}
        self.leases: dict[str, tuple[int, float]] = {}
        self.silent, self.watches = False, True
        self.asked: Counter[str] = Counter()
        self._changes: list[tuple[str, int, str]] = []  # of which key, at which revision, what
        self._closed = threading.Event()
        pretended = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                pretended.asked[self.path] += 1
                code, found = pretended.answer(self.path, body, self.headers.get("Authorization", ""))
                self.send_response(code)
                self.end_headers()
                with suppress(OSError):  # who watched may have gone
                    self.tell(found)
                    if "created" in found.get("result", {}):
                        self.tell({"result": {"events": pretended.wait_for_changes(**body["create_request"])}})

            def tell(self, line: Any) -> None:
                self.wfile.write(json.dumps(line).encode() + b"\n")

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
        self._closed.set()
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
                **({"/v3/watch": self._watch} if self.watches else {}),
            }.get(path)
            if do is None:
                return 404, {"error": "Not Found", "code": 5}
            return 200, {"header": {"revision": str(self._revision)}, **do(body)}

    def wait_for_changes(self, key: str, start_revision: str) -> list[dict[str, Any]]:
        """Returns the changes of a key from a revision on, once there are any or the cluster is closed."""
        while True:
            with self._lock:
                self._expire()
                after = [each for each in self._changes if each[1] >= int(start_revision)]
                found = [{"type": kind} for changed, _, kind in after if changed == key]
            if found or self._closed.wait(0.005):
                return found

    def _watch(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"result": {"created": True}}

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
                self._changes.append((put["key"], self._revision, "PUT"))
            else:
                for key in [key for key in self.keys if _within(key, change["request_delete_range"])]:
                    self._remove(key)
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
        for key in [key for key, each in self.keys.items() if each[2] == body["ID"]]:
            self._revision += 1
            self._remove(key)
        del self.leases[body["ID"]]
        return {}

    def _remove(self, key: str) -> None:
        del self.keys[key]
        self._changes.append((key, self._revision, "DELETE"))


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
