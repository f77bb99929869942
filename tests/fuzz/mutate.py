"""Broken inputs made of sound ones: by structure (other types, huge numbers, keys that are gone or new, deep lists) and
by bytes. Seeded."""

from __future__ import annotations

import copy
import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = 5.0
"""That one try may take."""

MEMORY = 1 << 30
"""Bytes that all tries may add to what the process has at most."""

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, 2**64, -(2**70), 10**400,
    0.0, -0.5, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"),
    "", "auto", "x", "../../x", "/etc/passwd", "\x00", "\u00e9" * 50, "9" * 5000,
    [], [0.9], [None], [[]], ["x"], {}, {"name": "x"}, {"a": {"b": {"c": 1}}}, {"name": 3},
)  # fmt: skip


def deep(levels: int) -> Any:
    """A list in a list in a list."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def mutated(tree: Any, draw: random.Random, odd: tuple[Any, ...] = ODD) -> Any:
    """A copy of a tree of dicts and lists in which one to three things are other than they were."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.randint(1, 3)):
        holders = list(_holders(tree))
        if not holders:
            return draw.choice(odd)
        holder = draw.choice(holders)
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key, what = draw.choice(keys), draw.randrange(10)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, dict):
            holder[draw.choice(["", "x", f"{key}s", str(key).upper(), "__class__"])] = holder.pop(key)
        elif what == 2:
            holder[key] = [holder[key]]
        elif what == 3:
            holder[key] = copy.deepcopy(draw.choice(holders))
        elif what == 4:
            holder[key] = deep(draw.choice([2, 50]))
        else:
            holder[key] = copy.deepcopy(draw.choice(odd))
    return tree


def _holders(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (dict, list)):
        if tree:
            yield tree
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from _holders(child)


def damaged(data: bytes, draw: random.Random) -> bytes:
    """`data` with some bytes changed, taken out, said twice, or cut off."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 6)):
        at, what = draw.randrange(len(found) + 1), draw.randrange(6)
        if what == 0:
            del found[at : at + draw.randint(1, 20)]
        elif what == 1:
            found[at:at] = found[at : at + draw.randint(1, 40)]
        elif what == 2:
            found[at:at] = bytes(draw.randrange(256) for _ in range(draw.randint(1, 8)))
        elif what == 3:
            found[at:at] = draw.choice(
                [b"\xff\xfe", b"[" * 3000, b"9" * 5000, b"\x00", b"-", b"1e999", b'"', b"{", b"\n"]
            )
        elif what == 4 and draw.randrange(4) == 0:
            del found[at:]
        elif at < len(found):
            found[at] = draw.randrange(256)
    return bytes(found)


@contextmanager
def bounded(what: Any) -> Iterator[None]:
    """One try: the time it may take, and what was tried where something goes wrong."""
    started = time.monotonic()
    try:
        yield
    except Exception as error:
        error.add_note(f"this was tried: {what!r:.2000}")
        raise
    assert time.monotonic() - started < SECONDS, f"took {time.monotonic() - started:.1f} s: {what!r:.2000}"


def tries(number: int, seed: int, attempt: Callable[[random.Random], None]) -> None:
    """Runs `attempt` so often, each with a generator of its own, in bounded memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index in range(number):
        try:
            attempt(random.Random(f"{seed}/{index}"))
        except BaseException as error:
            error.add_note(f"try {index} of seed {seed}")
            raise
    added = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert added < MEMORY, f"{added} bytes more than before"
