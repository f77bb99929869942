"""A SuperNode's link to a SuperLink: Flower's Fleet API over HTTPS, signed by the client's key. No process is
started."""

from __future__ import annotations

import threading
from pathlib import Path

from shoal.errors import UserError
from shoal.federated.flower.private import TaskIdentity

import httpx  # isort: skip
from flwr.app import Message  # isort: skip
from flwr.app.message import remove_content_from_message  # isort: skip
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL  # isort: skip
from flwr.common.serde import message_from_proto, message_to_proto  # isort: skip
from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2, node_pb2  # isort: skip
from flwr.supercore.inflatable import inflatable_object, inflatable_utils  # isort: skip
from flwr.supercore.inflatable import inflatable_protobuf_utils as objects  # isort: skip
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor  # isort: skip
from flwr.supercore.primitives import asymmetric  # isort: skip
from flwr.supernode.fleet_http_client import FleetHttpClient  # isort: skip
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor  # isort: skip

BEAT = 1.0
"""Seconds between two signs of life."""


class Away(Exception):
    """The server does not answer, or not as it should: it may be starting again."""


class Node:
    """This client at the server `address` ("host:port"), over TLS with a certificate that `root` has signed; None for
    no TLS. key: its private key (PEM); None: a new one, with which it signs in where anyone may."""

    def __init__(self, address: str, key: bytes | None, root: Path | None) -> None:
        private = asymmetric.bytes_to_private_key(key) if key is not None else asymmetric.generate_key_pairs()[0]
        self._public, self._registers = asymmetric.public_key_to_bytes(private.public_key()), key is None
        self.address, self._plain = address, root is None
        signing = [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(private, private.public_key()),
        ]
        try:
            self._client = FleetHttpClient.from_server_address(
                address, root is None, None if root is None else root.read_bytes(), signing
            )
        except (OSError, ValueError) as error:
            raise UserError(f"{root} is no certificate: {error}") from error
        self.id = 0
        self._over, self._beats = threading.Event(), threading.Thread(target=self._beat, name="beats", daemon=True)

    def sign_in(self) -> None:
        """Tells the server that this client is there. Raises UserError where it is refused, Away where nobody
        answers."""
        try:
            if self._registers:
                try:
                    self._client.RegisterNode(fleet_pb2.RegisterNodeFleetRequest(public_key=self._public))
                except httpx.HTTPStatusError as error:  # it has been there before
                    if error.response.status_code != httpx.codes.CONFLICT:
                        raise
            told = fleet_pb2.ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_MIN_INTERVAL)
            self.id = self._client.ActivateNode(told).node_id
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                raise UserError(
                    f"the server at {self.address} does not know this client's key: have its public key put into the "
                    "server's --certificates, and the server started again"
                ) from error
            raise Away(str(error)) from error
        except httpx.TransportError as error:
            raise self._unreached(error) from error
        if not self._beats.is_alive():
            self._beats.start()

    def _unreached(self, error: httpx.TransportError) -> UserError | Away:
        """Returns what a connection that could not be had means."""
        said = str(error)
        if "certificate" in said.lower():
            return UserError(
                f"the server at {self.address} has no certificate that this client trusts ({said}): give the "
                "--certificates that it was started with, and an address that its certificate names"
            )
        if "ssl" in said.lower():
            return UserError(
                f"the server at {self.address} does not speak TLS with this client ({said}): if it was started with "
                "--insecure, start it with --certificates"
            )
        if self._plain and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
            return Away(f"{said.rstrip('.')}: one that was started with --certificates hangs up on --insecure")
        return Away(said)

    def _beat(self) -> None:
        told = heartbeat_pb2.SendNodeHeartbeatRequest(
            node=node_pb2.Node(node_id=self.id), heartbeat_interval=HEARTBEAT_MIN_INTERVAL
        )
        while not self._over.wait(BEAT):
            try:
                self._client.SendNodeHeartbeat(told)
            except (httpx.HTTPError, ValueError):
                continue  # the loop over messages notices

    def receive(self) -> Message | None:
        """Returns the next message, None where there is none. Raises Away."""
        node = node_pb2.Node(node_id=self.id)
        try:
            found = self._client.PullMessages(fleet_pb2.PullMessagesRequest(node=node))
            if not found.messages_list:
                return None
            bare, (tree, *_) = message_from_proto(found.messages_list[0]), found.message_object_trees
            run = bare.metadata.run_id
            parts = [each.object_id for each in inflatable_object.iterate_object_tree(tree)]
            pull = objects.make_pull_object_fn_protobuf(self._client.PullObject, node, run)
            contents = inflatable_utils.pull_objects(parts, pull)
            identity = bare.metadata.message_id
            self._client.ConfirmMessageReceived(
                message_pb2.ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=identity)
            )
        except (httpx.HTTPError, inflatable_utils.ObjectPullError, ValueError) as error:
            raise Away(str(error)) from error
        message = inflatable_utils.inflate_object_from_contents(identity, contents)
        assert isinstance(message, Message)
        message.metadata.__dict__["_message_id"] = identity
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, self.id, 0
        return message

    def send(self, reply: Message, seconds: float) -> bool:
        """Sends a reply that took `seconds`; returns whether the server took it, which it does not where it comes too
        late. Raises Away."""
        node, run = node_pb2.Node(node_id=self.id), reply.metadata.run_id
        with inflatable_object.no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            parts = inflatable_object.get_all_nested_objects(reply)
            told = fleet_pb2.PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[inflatable_object.get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
            try:
                answer = self._client.PushMessages(told)
                push = objects.make_push_object_fn_protobuf(self._client.PushObject, node, run, answer.session_id)
                missing = set(answer.objects_to_push)
                inflatable_utils.push_objects(parts, push, object_ids_to_push=missing)
            except httpx.HTTPStatusError:
                return False  # of another run: the server was started again
            except (httpx.HTTPError, inflatable_utils.ObjectPushError) as error:
                raise Away(str(error)) from error
        return bool(missing)

    def leave(self) -> None:
        """Tells the server that this client goes, where it answers."""
        self._over.set()
        if self._beats.is_alive():
            self._beats.join()
        try:
            if self.id:
                self._client.DeactivateNode(fleet_pb2.DeactivateNodeRequest(node_id=self.id))
        except (httpx.HTTPError, ValueError):
            self.id = 0
        self._client.close()
