"""A rank under `shoal chaos`: what it tells of its samples, and the faults that only the rank itself can have. Without
the variable it does nothing; every other fault comes from outside.

    FOLDER/pace            seconds to wait before each step, so that there is time for faults, and up to which step;
                           those beyond it wait for another pace, so that a run is not over before its faults have
                           happened: the first ones LONG at most, later ones up to LONGEST, which is no hang yet
    FOLDER/samples-PID-N   a line of JSON for each step that the process PID begins: which samples it trains
    FOLDER/flip-PID        which bit the process PID flips before its next step
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.data import Batch
from shoal.engine import Engine

VARIABLE = "SHOAL_DRILL"
"""Names the folder."""
LONG, MORE, LONGEST = 1.0, 20, 5.0
"""Seconds to wait at most before a step which the next fault has not released: the first one; once more for so many
steps; whatever it is."""
_LOOK = 0.1
STEPS_IN_A_FILE = 16
"""Files stay small, since a process whose disk is "full" can write only small ones."""
WHERE = ("weight", "optimizer", "gradient")
_BITS = {
    torch.float32: (torch.int32, 16, 22),
    torch.float64: (torch.int64, 40, 51),
    torch.bfloat16: (torch.int16, 2, 6),
}
"""The integers that a format is seen as, and the bits of its mantissa that change a value by 1/100 to 1/2."""


@dataclass(frozen=True)
class Dealt:
    """The samples of a step that a replica begins, and those of the whole batch; `begun`: Unix time."""

    generation: int
    step: int
    replica: int
    begun: float
    ids: list[int]
    batch: list[int]


def drilled(engine: Engine, batches: Iterator[Batch], environ: Mapping[str, str] = os.environ) -> Iterator[Batch]:
    """Yields `batches`, and does before each what `shoal chaos` wants of this rank."""
    if VARIABLE not in environ:
        yield from batches
        return
    folder = Path(environ[VARIABLE])
    for batch in batches:
        _wait(folder / "pace", batch.step)
        _tell(engine, batch, folder)
        with suppress(FileNotFoundError):
            asked = folder / f"flip-{os.getpid()}"
            where, seed = asked.read_text().split()
            asked.unlink()
            flip(engine, where, random.Random(int(seed)))
        yield batch


def _wait(path: Path, step: int) -> None:
    """Waits before a step as long as the file says, which may change meanwhile."""
    began = time.monotonic()
    with suppress(FileNotFoundError):
        while True:
            pace, last = map(float, path.read_text().split())
            seconds = pace if step < last else max(pace, min(LONGEST, LONG * (1 + (step - last) / MORE)))
            if (left := began + seconds - time.monotonic()) <= 0:
                return
            time.sleep(min(left, _LOOK))


def _tell(engine: Engine, batch: Batch, folder: Path) -> None:
    dealing = engine.parts.runner.dealing
    ids = [int(each) for part in dealing.cut(batch.ids).microbatches for each in part]
    line = Dealt(engine.world.generation, batch.step, dealing.rank, time.time(), ids, list(map(int, batch.ids)))
    with (folder / f"samples-{os.getpid()}-{batch.step // STEPS_IN_A_FILE}").open("a") as file:
        file.write(json.dumps(asdict(line)) + "\n")


def flip(engine: Engine, where: str, chosen: random.Random) -> None:
    """Flips a bit of a value that this rank alone holds: of a weight, of the optimizer's state, or of the reduced
    gradient that the next update reads."""
    if where == "weight":
        owned = chosen.choice([chunk.owned for chunk in engine.parts.chunks if chunk.trainable and chunk.owned.slots])
        _flip(chosen.choice(owned.slots).view(owned.master), chosen)
        owned.rest()
    elif where == "optimizer":
        states = [
            each for each in engine.optimizer.state_tensors().values() if each.dtype in _BITS and each.numel() > 1
        ]
        _flip(chosen.choice(states), chosen)
    else:
        _flip_in_next_update(engine, chosen)


def _flip_in_next_update(engine: Engine, chosen: random.Random) -> None:
    optimizer = engine.optimizer
    apply = optimizer.apply

    def with_a_flip(*args: Any) -> None:
        del optimizer.apply  # the class's own again
        _flip(optimizer.grad(chosen.choice(list(optimizer.known))), chosen)
        apply(*args)

    optimizer.apply = with_a_flip  # type: ignore[method-assign, assignment]


def _flip(values: Tensor, chosen: random.Random) -> None:
    """Flips a bit of the mantissa of a value that is not zero, where there is one."""
    flat = values.detach().view(-1)
    some = flat.nonzero().view(-1)
    index = int(some[chosen.randrange(len(some))]) if len(some) else chosen.randrange(flat.numel())
    integer, low, high = _BITS[values.dtype]
    flat[index : index + 1].view(integer).bitwise_xor_(1 << chosen.randint(low, high))
