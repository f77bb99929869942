"""How often the state that another rank keeps, `plan.buddy`, is sent to it whole (see checkpoint.buddy)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.optim.groups import OptimizerFactory, state_keys
from shoal.plan import AUTO
from shoal.precision import Precision

FOR_BUDDY = "kept for a buddy"
"""Role of what a rank keeps of another one."""


def steps_between(
    asked: int | str, factory: OptimizerFactory, options: Sequence[Mapping[str, Any]], precision: Precision
) -> int:
    """Returns after how many steps a snapshot is taken, as `plan.buddy` asks.

    A rank sends s / k + g bytes a step and its buddy keeps 2 s + k g, where s are the bytes of a snapshot, g those of
    the gradients, and k the steps between two snapshots: a larger k sends less, and keeps and replays more. "auto"
    takes the k at which the log needs as much memory as the snapshots, 2 s / g: half a gradient is sent a step beside
    the gradient itself, and at most k updates are replayed. That is 6 for Adam in fp32.

    factory, options: the optimizer and its groups; options decide nothing that ranks do not share
    """
    if asked != AUTO:
        return int(asked)
    kept = 1 + max(len(state_keys(factory, [each], precision.master)) for each in options)
    return max(1, round(2 * kept * precision.master.itemsize / precision.grad.itemsize))
