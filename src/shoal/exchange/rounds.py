"""Rounds: which chunks are exchanged with which backward of a step.

All chunks are exchanged once, with the last backward. Chunks that keep only their stretch of the gradient (ZeRO 2) are
exchanged with every backward that adds to them. Where a rank has several stages of a pipeline a backward is of one
stage, and adds to the chunks of that stage: replicas that make the same backwards in the same order need no more.
Those that do not meet with all such chunks in every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.chunks import Chunk
from shoal.chunks.spec import adds_to
from shoal.errors import UserError


@dataclass(frozen=True)
class Round:
    """The exchange with one backward.

    - `order`: indices of the chunks that go out, in order
    - `first`: those of them of which the step has reduced nothing before
    - `last`: those of them to which no later round of the step adds
    """

    order: tuple[int, ...]
    first: frozenset[int]
    last: frozenset[int]


def rounds_of(chunks: Sequence[Chunk], backwards: Sequence[int | None]) -> list[Round]:
    """Lists the rounds of a step. `backwards`: the stage of each, in order; None where it may be of any."""
    orders = [
        [index for index, chunk in enumerate(chunks) if chunk.borrows and adds_to(stage, chunk.spec.stages)]
        for stage in backwards
    ]
    orders[-1] = sorted([*orders[-1], *(index for index, chunk in enumerate(chunks) if not chunk.borrows)])
    first = {index: place for place, order in reversed(list(enumerate(orders))) for index in order}
    last = {index: place for place, order in enumerate(orders) for index in order}
    return [
        Round(
            tuple(order),
            frozenset(index for index in order if first[index] == place),
            frozenset(index for index in order if last[index] == place),
        )
        for place, order in enumerate(orders)
    ]


def of_another_stage(name: str) -> UserError:
    """Makes the error for a gradient of the parameter `name` in a backward of a stage that does not have it."""
    return UserError(
        f"{name} has a gradient of a stage whose parts do not have it: use it in the forward of a module that has it, "
        "or take a schedule of one stage a rank, such as 1f1b"
    )
