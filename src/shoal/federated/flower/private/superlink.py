"""A SuperLink within this process: Flower's Fleet API over HTTPS, for clients whose keys are known, and its state.

Of Flower's `flower-superlink` it serves nothing else: no API that takes programs or runs. No process is started.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import ssl
import threading
import time
from base64 import b64decode
from collections.abc import Collection
from pathlib import Path
from typing import Any

from shoal.errors import LaunchError
from shoal.federated.flower.private import SERVER, TaskIdentity

import uvicorn  # isort: skip
from fastapi import FastAPI  # isort: skip
from flwr.app import Message  # isort: skip
from flwr.app.message import remove_content_from_message  # isort: skip
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, TIMESTAMP_HEADER, Status  # isort: skip
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState  # isort: skip
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER  # isort: skip
from flwr.supercore.constant import NOOP_FEDERATION_ID, NodeStatus, TaskType  # isort: skip
from flwr.supercore.date import now  # isort: skip
from flwr.supercore.error import http_error_translator  # isort: skip
from flwr.supercore.inflatable import inflatable_object, inflatable_utils  # isort: skip
from flwr.supercore.object_store import NoObjectInStoreError  # isort: skip
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore  # isort: skip
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature  # isort: skip
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware  # isort: skip
from flwr.supercore.run import Run  # isort: skip
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager  # isort: skip
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware  # isort: skip
from flwr.superlink.routers.fleet.router import router as fleet  # isort: skip
from starlette.middleware import Middleware  # isort: skip
from starlette.middleware.base import BaseHTTPMiddleware  # isort: skip

LARGEST = 64 * 2**20
"""Bytes of a request; Flower sends arrays in pieces of 5 MiB."""
START_SECONDS = 30.0


class Members(InMemoryLinkState):
    """The clients, and the messages on their way. A client has the number that its key says, whenever a server begins;
    one that has not been heard of for `patience` seconds is gone, and one that begins anew has lost what it was sent.
    """

    def __init__(self, patience: float) -> None:
        super().__init__(NoOpFederationManager(), InMemoryObjectStore())
        self._patience = patience

    def create_node(self, owner_aid: str, owner_name: str, public_key: bytes, *rest: Any, **named: Any) -> int:
        with self.lock:
            drawn = super().create_node(owner_aid, owner_name, public_key, *rest, **named)
            node = self.nodes.pop(drawn)
            node.node_id = number_of(public_key)
            self.nodes[node.node_id] = node
            self.node_public_key_to_node_id[public_key] = node.node_id
            self.owner_to_node_ids[owner_aid] ^= {drawn, node.node_id}
            return node.node_id

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        with self.lock:
            sent = [key for key, each in self.message_ins_store.items() if _has(each, node_id)]
            self.delete_messages({key for key in sent if not self.whole(key)})
            return self.acknowledge_node_heartbeat(node_id, heartbeat_interval)

    def acknowledge_node_heartbeat(self, node_id: int, heartbeat_interval: float) -> bool:
        with self.lock:
            known = super().acknowledge_node_heartbeat(node_id, heartbeat_interval)
            if known:
                self.nodes[node_id].online_until = now().timestamp() + self._patience
            return known

    def forgive(self, seconds: float) -> None:
        """Discounts `seconds` in which this process itself stood still, and may have heard nobody."""
        with self.lock:
            for node in self.nodes.values():
                if node.online_until is not None and node.status == NodeStatus.ONLINE:
                    node.online_until += seconds

    def whole(self, message_id: str) -> bool:
        """Returns whether the reply to a message has come, with all that belongs to it."""
        with self.lock, self.object_store.lock_store:
            reply = self.message_ins_id_to_message_res_id.get(message_id)
            return reply is not None and self._is_there(reply)

    def reply_to(self, message_id: str) -> Message:
        """Returns the reply that has come to a message. Flower's `get_message_res` withholds those of nodes that have
        left since."""
        return self.message_res_store[self.message_ins_id_to_message_res_id[message_id]]

    def _is_there(self, object_id: str) -> bool:
        entry = self.object_store.store.get(object_id)
        return entry is not None and entry.is_available and all(map(self._is_there, entry.child_object_ids))

    def online(self, node_id: int) -> bool:
        """Returns whether a client has been heard of."""
        return bool(self.get_node_info(node_ids=[node_id], statuses=[NodeStatus.ONLINE]))


def _has(message: Message, node_id: int) -> bool:
    return message.metadata.dst_node_id == node_id and message.metadata.delivered_at != ""


def number_of(public_key: bytes) -> int:
    """Returns the id of the node that has this key (PEM)."""
    return int.from_bytes(hashlib.sha256(public_key).digest()[:7], "big") + SERVER + 1


class SuperLink:
    """Serves the Fleet API at `host`:`port` (0: any; `port` says which) from `begin` to `end`.

    keys: the public keys (PEM) of the clients that are let in; None: whoever comes, each with a key of its own.
    tls: files of the certificate and of its key; None: no TLS.
    """

    def __init__(
        self, host: str, port: int, keys: Collection[bytes] | None, tls: tuple[Path, Path] | None, patience: float
    ) -> None:
        self.members = Members(patience)
        for key in keys or ():
            self.members.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0)
        self.run = self._run()
        self.host, self.port = host, port
        self._socket = _bound(host, port)
        self.port = int(self._socket.getsockname()[1])
        files: dict[str, Any] = {} if tls is None else {"ssl_certfile": str(tls[0]), "ssl_keyfile": str(tls[1])}
        app = _Door(self._app(keys is not None), None if keys is None else self.members)
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", **files)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = uvicorn.Server(config)
        config.load()
        if config.ssl is not None:
            config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
        self._thread = threading.Thread(target=self._serve, name="superlink", daemon=True)

    def _run(self) -> Run:
        members = self.members
        run_id = members.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        (run,) = members.get_run_info(run_ids=[run_id])
        assert run.primary_task_id is not None
        members.task_store[run.primary_task_id].status.status = Status.RUNNING
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, SERVER, run.primary_task_id
        return run

    def _app(self, signed_in: bool) -> FastAPI:
        layers = [
            Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
            Middleware(ProtobufTranslationMiddleware),
            Middleware(NodeAuthMiddleware),
        ]
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, middleware=layers)
        app.state.linkstate_factory = self
        app.state.enable_supernode_auth = signed_in
        app.include_router(fleet)
        return app

    def state(self) -> Members:
        """Returns what Flower's handlers work on."""
        return self.members

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])

    def begin(self) -> None:
        """Starts to serve. Raises LaunchError where it cannot."""
        self._thread.start()
        until = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                raise LaunchError(f"the server at {self.host}:{self.port} could not be started")
            time.sleep(0.01)

    def end(self) -> None:
        """Ends: nobody is answered any more."""
        self._server.should_exit = self._server.force_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._socket.close()

    def push(self, message: Message) -> str | None:
        """Sends a message to its node; returns its id, None where the node is not known."""
        members, run_id = self.members, self.run.run_id
        with inflatable_object.no_object_id_recompute():
            identity = message.metadata.__dict__["_message_id"] = message.object_id
            parts = inflatable_object.get_all_nested_objects(message)
            tree = inflatable_object.get_object_tree(message)
            session = members.start_session(run_id)
            stored, missing = members.store_message_and_object_tree(remove_content_from_message(message), tree, session)
            for part in missing if stored else ():
                members.store_object(run_id, session, part, parts[part].deflate())
        return identity if stored else None

    def pull(self, asked: Collection[str]) -> list[Message]:
        """Returns the replies that have come to the messages `asked`, errors for nodes that are gone among them."""
        members, found = self.members, []
        with members.lock:
            ready = {key for key in asked if members.whole(key)}
            gone = {
                key
                for key in set(asked) - ready
                if (each := members.message_ins_store.get(key)) is None or not members.online(each.metadata.dst_node_id)
            }
            replies = [members.reply_to(key) for key in ready]  # also of those who left as soon as they had replied
            replies += members.get_message_res(gone, self.run.run_id) if gone else []
        members.delete_messages({each.metadata.reply_to_message_id for each in replies})
        for reply in replies:
            found.append(self._inflated(reply))
        return found

    def _inflated(self, reply: Message) -> Message:
        store, identity = self.members.object_store, reply.metadata.message_id
        try:
            parts = [each.object_id for each in inflatable_object.iterate_object_tree(store.get_object_tree(identity))]
        except NoObjectInStoreError:
            return reply
        contents = {part: store.get(part) or b"" for part in parts}
        message = inflatable_utils.inflate_object_from_contents(identity, contents)
        assert isinstance(message, Message)
        message.metadata.__dict__["_message_id"] = identity
        store.delete(identity)
        return message

    def forget(self, asked: Collection[str]) -> None:
        """Takes messages back: replies that come later are refused."""
        for identity in asked:
            self.members.object_store.delete(identity)
        self.members.delete_messages(set(asked))


class _Door:
    """Looks at a request before its body is read: where to it goes, how long it is, and who has signed it."""

    def __init__(self, app: Any, members: Members | None) -> None:
        self._app, self._members = app, members

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (status := self._refuses(scope)):
            await send({"type": "http.response.start", "status": status, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, send)

    def _refuses(self, scope: Any) -> int:
        headers = {key.decode("latin-1").lower(): value for key, value in scope["headers"]}
        if not scope["path"].startswith("/v1/fleet/"):
            return 404
        length = headers.get("content-length", b"")
        if not length.isdigit() or int(length) > LARGEST:
            return 413
        if self._members is None:
            return 0
        try:
            key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER.lower()], validate=True)
            signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.lower()], validate=True)
            if self._members.get_node_id_by_public_key(key) is None:
                return 401
            stamp = headers[TIMESTAMP_HEADER.lower()]
            return 0 if verify_signature(bytes_to_public_key(key), stamp, signature) else 401
        except (KeyError, ValueError):
            return 401


def _bound(host: str, port: int) -> socket.socket:
    """Returns a socket at an address of this machine. Raises LaunchError where it cannot be had."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, number)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        raise LaunchError(f"{host}:{port} cannot be listened at ({error}): give another --address") from error
    return made
