"""Contexts: under which name the owners of remote modules keep the gradients of parameters."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import get_ident
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch


class Below(Protocol):
    """What a context may have gradients at."""

    def forget(self, context: str) -> None:
        """Has the gradients of `context` dropped, some time soon."""

    def drop(self, context: str) -> None:
        """Has the gradients of `context` dropped."""


class Passing(NamedTuple):
    """A backward pass: the thread that has begun it, by a name that no other process has, and its number there."""

    thread: str
    number: int


class Context:
    """Gradients that belong together, by name; `used` are the remote modules that have run in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.used: WeakSet[Below] = WeakSet()


_current: ContextVar[Context | None] = ContextVar("shoal-remote-context", default=None)
_passing: ContextVar[Passing | None] = ContextVar("shoal-remote-pass", default=None)
_of_process: dict[int, Context] = {}


def current() -> Context:
    """Returns the context of this thread, which is the process's own unless it has entered another one."""
    return _current.get() or process()


def process() -> Context:
    """Returns the context of this process."""
    pid = os.getpid()
    found = _of_process.get(pid)  # a process that is forked has one of its own
    return found or _of_process.setdefault(pid, Context(f"{pid}-{secrets.token_hex(8)}"))


def passing() -> Passing:
    """Returns the backward pass that runs in this thread, or of which this one is a part."""
    return _passing.get() or Passing(f"{process().name}-{get_ident()}", torch._C._current_graph_task_id())


@contextmanager
def entered(context: Context, passing: Passing | None = None) -> Iterator[None]:
    """Makes `context` the one of this thread, and what backward runs in it a part of `passing`."""
    before, outer = _current.set(context), _passing.set(passing)
    try:
        yield
    finally:
        _current.reset(before)
        _passing.reset(outer)


@contextmanager
def context() -> Iterator[Context]:
    """Keeps the gradients of forwards inside it apart from all others at the owners of remote modules:

        with shoal.context() as mine:
            loss(model, batch).backward()
            optimizer.step(mine)

    They are dropped at its end. Without one, all threads of a process share a context, as they share `.grad`. A thread
    that is started inside enters it by `contextvars.copy_context().run`.
    """
    made = Context(secrets.token_hex(8))
    try:
        with entered(made):
            yield made
    finally:
        for each in list(made.used):
            each.forget(made.name)
