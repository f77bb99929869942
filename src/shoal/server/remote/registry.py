"""The modules of an owner: which may be built, which are there, and for whom."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn

from shoal.comm.digest import combined
from shoal.errors import UserError, check_names
from shoal.server.remote.draws import creation
from shoal.server.remote.exposed import Client, Exposed
from shoal.server.remote.messages import Build
from shoal.server.remote.payload import Payload

Factory = Callable[..., Any] | nn.Module


class Holdings(NamedTuple):
    """What an owner holds: modules, remote modules that use them, graphs that wait for a backward, contexts."""

    modules: int
    clients: int
    graphs: int
    contexts: int


class _Entry(NamedTuple):
    """A module, its name ("" for a client's own), what it was made by (factory, arguments), and the clients by their
    names."""

    exposed: Exposed
    name: str
    made_by: tuple[str, str]
    clients: dict[str, Client]


class Registry:
    """Modules by keys that are drawn at random. For any thread.

    factories: by the names under which clients may ask for them.
    most: modules at once.
    most_graphs: of each client.
    """

    def __init__(self, factories: Mapping[str, Factory], most: int, most_graphs: int) -> None:
        self._factories, self._most, self._most_graphs = factories, most, most_graphs
        self._guard = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._naming: dict[str, threading.Lock] = {}

    def holdings(self) -> Holdings:
        """Returns how much there is of what clients have left here."""
        with self._guard:
            entries = list(self._entries.values())
            clients = [client for entry in entries for client in entry.clients.values()]
        contexts = sum(len(entry.exposed.gradients.contexts) for entry in entries)
        return Holdings(len(entries), len(clients), sum(len(client.graphs) for client in clients), contexts)

    def build(self, asked: Build, given: Payload) -> str:
        """Returns the key of a new module, or of the one that has the name already. Raises UserError for what the owner
        does not expose, and what the factory raises."""
        check_names("shoal.remote asks for", [asked.factory], self._factories, "The owner exposes")
        factory = self._factories[asked.factory]
        shared = isinstance(factory, nn.Module)
        name = asked.factory if shared else asked.name
        made_by = (asked.factory, "" if shared else _told_apart(given))
        with self._guard:
            naming = self._naming.setdefault(name, threading.Lock()) if name else nullcontext()
        with naming:  # two clients must not build one name at once
            if name and (there := self._named(name)):
                key, before, seed = there
                if before != made_by:
                    raise UserError(
                        f'the module "{name}" is there already, of {before[0]} with other arguments: give all clients '
                        "the same ones, or another name"
                    )
                if asked.seed not in (-1, seed):
                    has = "without a seed" if seed < 0 else f"with seed = {seed}"
                    raise UserError(
                        f'the module "{name}" is there already, {has}: leave the seed {asked.seed} out, or give all '
                        "clients the same one"
                    )
                return key
            made = factory if isinstance(factory, nn.Module) else _made(factory, asked, given)
            return self._add(_Entry(Exposed(made, asked.seed, bool(name)), name, made_by, {}))

    def enter(self, key: str, client: str, *, first: bool) -> tuple[Exposed, Client]:
        """Counts a session of a client, the first of which has had the module built. Raises UserError for a module that
        is not there for it."""
        with self._guard:
            entry = self._entries.get(key)
            if entry is None or not (first or client in entry.clients):
                raise UserError(
                    "the module is not there any more: its owner was started again, or had lost this client. Call "
                    "shoal.remote again"
                )
            found = entry.clients.setdefault(client, Client(self._most_graphs))
            found.sessions += 1
            return entry.exposed, found

    def leave(self, key: str, client: str) -> None:
        """Counts a session less. With its last one a client's graphs and gradients go, and its own module."""
        with self._guard:
            entry = self._entries[key]
            left = entry.clients[client]
            left.sessions -= 1
            if left.sessions:
                return
            del entry.clients[client]
            if not entry.name and not entry.clients:
                del self._entries[key]
        entry.exposed.leave(left)

    def _named(self, name: str) -> tuple[str, tuple[str, str], int] | None:
        with self._guard:
            named = ((key, entry) for key, entry in self._entries.items() if entry.name == name)
            return next(((key, entry.made_by, entry.exposed.seed) for key, entry in named), None)

    def _add(self, entry: _Entry) -> str:
        with self._guard:
            if len(self._entries) >= self._most:
                raise UserError(f"the owner has {self._most:,} modules, the most it may have")
            key = secrets.token_hex(8)
            self._entries[key] = entry
            return key


def exposed_factories(given: Mapping[str, Factory] | Iterable[Factory | str]) -> dict[str, Factory]:
    """Returns what clients may ask for, by name: see `Owner`. Raises UserError for what is no factory."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UserError(f"Owner: {given!r} is no list of what clients may ask for, and no dict: put it into one")
    pairs = list(given.items() if isinstance(given, Mapping) else ((_name(each), _imported(each)) for each in given))
    named = dict(pairs)
    if not named:
        raise UserError("Owner: there is nothing that clients may ask for: give the classes or functions of modules")
    for name, factory in named.items():
        if not callable(factory) or not isinstance(name, str) or not name:
            raise UserError(f"Owner: {name!r}: {factory!r} is nothing that builds a module: give a class or a function")
    for name, factory in pairs:
        if factory is not named[name]:
            raise UserError(
                f'Owner: {factory!r} and {named[name]!r} are both named "{name}": give a dict, with a name for each'
            )
    return named


def _name(factory: Factory | str) -> str:
    found = factory if isinstance(factory, str) else getattr(factory, "__name__", "")
    if not found:
        raise UserError(f"Owner: {factory!r} has no __name__: give a dict, with a name for it")
    return found


def _told_apart(given: Payload) -> str:
    """Returns what arguments are told apart by: plain values as they are, tensors by a hash of their bits."""
    forms = [(tensor.dtype, tuple(tensor.shape)) for tensor in given.tensors]
    return f"{given.structure!r}, {forms}, {combined(given.tensors)}"


def _imported(factory: Factory | str) -> Factory:
    if not isinstance(factory, str):
        return factory
    module, _, name = factory.partition(":")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f'Owner: "{factory}" is no "package.module:name" that can be imported: {error}') from error
    return found


def _made(factory: Callable[..., Any], asked: Build, given: Payload) -> nn.Module:
    value = given.value(given.tensors)
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)):
        raise UserError("no arguments of a factory")
    with creation(asked.seed):
        made = factory(*value[0], **value[1])
    if not isinstance(made, nn.Module):
        raise UserError(f"{asked.factory} has made a {type(made).__name__}, which is no torch module")
    return made
