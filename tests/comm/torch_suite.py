"""The collective tests that torch ships in its wheel (torch.testing._internal.distributed), run by standing ranks on
one backend after the other.

torch itself starts processes anew for each of its 300 tests. Here a rank that the pool keeps calls the test's method,
in a process group of its own.
"""

from __future__ import annotations

import os
import sys
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from importlib.util import find_spec
from itertools import count
from types import ModuleType

import torch.distributed as dist

from shoal.comm import World
from tests.pool import next_number

SECONDS = 6
"""How long a collective of a test waits, on either backend."""

MODEL_BY_NAME = "test_accumulate_gradients_no_sync"
"""How tests begin that make their model for backends that they know by name: told that they run on gloo, they run on
any."""


@cache
def suite(backend: str = "gloo") -> ModuleType:
    """torch's module, imported as for gloo: the tests that it has for gloo alone are those that the other backend shall
    pass too."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=os.environ.get("WORLD_SIZE", "3"))
    if find_spec("expecttest") is None:  # torch's TestCase derives from its; what it adds, no test here uses
        sys.modules["expecttest"] = stand_in = ModuleType("expecttest")
        stand_in.TestCase, stand_in.ACCEPT = unittest.TestCase, False  # type: ignore[attr-defined]
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def names() -> list[str]:
    """The tests of the suite that are not for GPUs."""
    every = unittest.TestLoader().getTestCaseNames(suite().DistributedTest._DistTestBase)  # type: ignore[arg-type]
    return [name for name in every if not any(word in name.lower() for word in ("cuda", "nccl", "gpu"))]


def outcomes(world: World, wanted: list[str], backend: str) -> dict[str, str]:
    """By test: "passed", "skipped" or this rank's error."""
    os.environ.update(WORLD_SIZE=str(world.size), RANK=str(world.rank))
    module = suite()
    os.environ["BACKEND"] = "mpi"  # the one for which torch runs the tests of sub-groups with fewer than 8 ranks
    before = module.BACKEND  # type: ignore[attr-defined]
    found = {}
    try:
        for name in wanted:
            module.BACKEND = "gloo" if name.startswith(MODEL_BY_NAME) else backend  # type: ignore[attr-defined]
            found[name] = _outcome(world, module, name, backend)
    finally:
        module.BACKEND = before  # type: ignore[attr-defined]
    return found


def _outcome(world: World, module: ModuleType, name: str, backend: str) -> str:
    case = type("Case", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})(name)
    case.rank = world.rank
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)  # which torch's tests of debug levels leave as it was last
    dist.set_debug_level(dist.DebugLevel.OFF)
    try:
        with _process_group(world, backend):
            case._barrier = partial(_meet, world, name, count())
            getattr(case, name)()
            case._barrier()
    except (unittest.SkipTest, SystemExit) as reason:
        return f"skipped: {reason}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def _meet(
    world: World, name: str, meetings: Iterator[int], wait_for: int | None = None, timeout: float = 2.0 * SECONDS
) -> None:
    """Returns when all ranks have come: as the suite's own barrier, without the backend."""
    assert world.store is not None
    key = f"{name}/{dist.get_backend() if dist.is_initialized() else ''}/{next(meetings)}"
    if world.store.add(f"{key}/came", 1) == (wait_for or world.size):
        world.store.set(key, "1")
    world.store.wait([key], timedelta(seconds=timeout))


@contextmanager
def _process_group(world: World, backend: str) -> Iterator[None]:
    store = dist.PrefixStore(f"suite{next_number(world)}", world.store)
    # names groups; the ranks' counts differ after a test that failed on some
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=SECONDS)
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def merged(answers: list[dict[str, str]]) -> dict[str, str]:
    """Of all ranks: an error of any of them is that of the test."""
    result = {}
    for name in answers[0]:
        said = [answer[name] for answer in answers]
        errors = [
            f"rank {rank}: {text}"
            for rank, text in enumerate(said)
            if text != "passed" and not text.startswith("skipped")
        ]
        result[name] = "; ".join(errors) or said[0]
    return result
