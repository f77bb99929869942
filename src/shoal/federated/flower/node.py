"""A client that answers a server's messages over a Flower link, until that is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from shoal.errors import LaunchError, ShoalError
from shoal.federated.flower import private
from shoal.federated.flower.link import is_over
from shoal.federated.flower.private.supernode import Away, Node

from flwr.app import Context, Message, RecordDict  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip

FIRST_REST, LONGEST_REST = 0.05, 1.0
"""Seconds between two questions for a message, the longer the longer none has come."""


def serve(
    node: Node, app: ClientApp, number: int, stopped: Callable[[], bool], patience: float, say: Callable[[str], None]
) -> bool:
    """Answers messages until the server says that all is over (True), or `stopped` does (False).

    number: `partition-id` of the app's context. patience: seconds after which a server that does not answer is given
    up, with LaunchError; one that answers again finds this client as it was. say: told what changes.

    What the app raises is this client's error, and the server hears of it; a LaunchError, which says that the client's
    own ranks are lost, is raised afterwards. Raises UserError where the server refuses this client.
    """
    contexts: dict[int, Context] = {}
    signed_in, told, heard, rest, failed = False, False, time.monotonic(), FIRST_REST, ""
    while not stopped():
        try:
            if not signed_in:
                node.sign_in()
                signed_in, told = True, False
                say(f"signed in at {node.address}")
            message, heard = node.receive(), time.monotonic()
            if message is None:
                time.sleep(rest)
                rest = min(LONGEST_REST, rest * 1.2)
                continue
            rest = FIRST_REST
            if is_over(message):
                with suppress(Away):  # the server ends as soon as it has the reply, maybe before it has said so
                    node.send(Message(RecordDict({}), reply_to=message), 0.0)
                return True
            run = message.metadata.run_id
            context = contexts.setdefault(run, private.node_context(node.id, {"partition-id": number}))
            contexts = {run: context}
            began = time.monotonic()
            reply, lost = _answer(app, message, context)
            why = reply.error.reason if reply.has_error() else ""
            if why not in ("", failed):
                say(f"this client has failed, and tells the server: {why}")
            failed = why or failed
            if not node.send(reply, time.monotonic() - began):
                say("an answer came too late for its round")
            if lost is not None:
                raise lost
        except Away as error:
            if not told:
                say(f"the server at {node.address} does not answer ({error}), and is asked again")
            if time.monotonic() - heard > patience:
                raise LaunchError(
                    f"the server at {node.address} has not answered for {patience:.0f} s ({error}): start it, or wait "
                    "longer with --wait"
                ) from error
            signed_in, told = False, True
            time.sleep(rest)
            rest = min(LONGEST_REST, rest * 1.2)
    return False


def _answer(app: ClientApp, message: Message, context: Context) -> tuple[Message, LaunchError | None]:
    """Returns the reply, and what ends the client after it."""
    try:
        return app(message, context), None
    except Exception as error:  # a client's failure is the client's
        said = str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
        reply = private.error_reply(message, private.FAILED, said)
        return reply, error if isinstance(error, LaunchError) else None
