"""Seconds that a device computes for a part of a model.

Products reach a share of the peak that the device is said to reach, beside which what they read and write passes its
memory once; all other operations reach a share of its bandwidth, and each operation takes at least a launch: beside its
work on a host's cores, at most as long as its work on a device that is fed from a queue. Backward takes twice the
products of forward, two and a half times its attention, and twice its other traffic; and each gradient of a microbatch
is added to those before it, by a hook of its parameter (exchange/reducer). On an accelerator the additions are part of
what products reach, which was fitted to whole steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shoal.module.selective import SAVE
from shoal.planner.cluster import Device
from shoal.planner.degrees import Spread
from shoal.planner.profile import PartProfile
from shoal.planner.task import Numbers

ATTENTION_BACKWARD = 2.5
"""Operations of attention's backward over those of its forward: the scores are computed again."""
ATTENTION_REACHES = 0.75
"""The share of the products' rate that attention reaches."""
CALLED = 20
"""Launches that a call of a compiled block takes beside its kernels, for guards and torch around it. Assumed."""
ADDED = 6
"""Times that memory has a gradient pass as it is added to a sum, at the rate that it has for one core while others do
nothing. Measured, of a GPT and a Mixtral on four ranks of two cores."""


@dataclass(frozen=True)
class Asked:
    """Launches that Python takes beside an operation's own: those of a parameter's hook; of a block that runs again;
    and of each tensor that it keeps for backward, by hooks that save it: where torch asks of each operation whether to
    keep what it gives, and where all of the block runs again."""

    hook: float
    block: float
    selecting: float
    recalling: float


@dataclass(frozen=True)
class Longer:
    """How many times longer than counted what is computed and moved takes, and launches."""

    work: float = 1.0
    launches: float = 1.0


HALVED, HALVED_TENSOR = 1.5, 4
"""Launches that Python takes of a host's cores for a backward in halves (pipeline/split_backward): for each operation,
to find where the ways to inputs and to weights part, and for each parameter, to begin there. Measured, of a GPT, a
Llama, a Qwen 3 and a Mixtral of next to no width."""
ON_CORES, ON_ACCELERATOR = Asked(1.5, 50, 9, 1), Asked(6, 0, 1.8, 1.4)
"""Measured: on cores of a GPT, a Llama, a Qwen 3, a Mixtral and a ResNet; on an accelerator, each launch of which is
longer, on one H200 of GPTs with 124M and 350M parameters."""
CROWDED = 1.15
"""How many times longer that takes, and the engine's own Python, of ranks that share a core, which find other data in
its caches. Measured, of a GPT, a Mixtral and a ResNet on four ranks of two cores."""


def python_of(device: Device) -> float:
    """Seconds of Python for each launch that it is counted in, where it comes often: for each parameter, say."""
    return device.launch * (CROWDED if device.crowd > 1 else 1)


def python_once(device: Device) -> float:
    """And where it comes once in a microbatch or a step, and finds nothing of its own in the caches, whoever's core it
    is."""
    return max(python_of(device), device.launch * device.cold)


def asked_of(device: Device) -> Asked:
    return ON_CORES if device.on_host else ON_ACCELERATOR


@dataclass(frozen=True)
class Times:
    """How many times the products, the attention and all else of a forward; and whether gradients come of it."""

    products: float
    attention: float
    rest: float
    gradients: bool = False


AS_COUNTED = Longer()
FORWARD, BACKWARD = Times(1, 1, 1), Times(2, ATTENTION_BACKWARD, 2, gradients=True)
UNADDED = Times(2, ATTENTION_BACKWARD, 2)
"""A backward whose gradients nobody adds up: what a loop of one microbatch has."""


def seconds_of(
    part: PartProfile,
    spread: Spread,
    rows: float,
    times: Times,
    device: Device,
    numbers: Numbers,
    compiled: bool,
    longer: Longer = AS_COUNTED,
) -> float:
    """Seconds of `rows` rows on one rank of `spread`, with blocks as they are written, or `compiled`."""
    work, launched = work_and_launches(part, spread, rows, times, device, numbers, compiled)
    work, launched = longer.work * work, longer.launches * launched
    return work + launched if device.on_host else max(work, launched)


def there_and_back(
    parts: Sequence[PartProfile], spread: Spread, rows: float, device: Device, numbers: Numbers, compiled: bool
) -> float:
    """Seconds of `rows` rows of these parts on one rank of `spread`, with blocks as they are written, or `compiled`."""
    times = (FORWARD, 1.0), (BACKWARD, device.backward)
    return math.fsum(
        factor * seconds_of(part, spread, rows, each, device, numbers, compiled and part.is_block)
        for part in parts
        for each, factor in times
    )


def counted_again(
    blocks: Sequence[PartProfile],
    spread: Spread,
    rows: float,
    device: Device,
    numbers: Numbers,
    compiled: bool,
    saved: Collection[str] = SAVE,
) -> tuple[float, float]:
    """Seconds that a backward of `rows` rows takes longer where it computes some operations of `blocks` again, all but
    those `saved`, and all: what `Times` there are, and hooks of each tensor that is kept. On an accelerator what the
    device does and what the host launches are each summed with the backward's own, of which the longer counts."""

    def again(part: PartProfile, times: Times, asked: float) -> float:
        more, called = work_and_launches(part, spread, rows, times, device, numbers, compiled)
        hooks = asked_of(device).block * python_once(device) + asked * part.packed.on(spread) * python_of(device)
        if device.on_host:
            return more + called + hooks
        work, launched = work_and_launches(part, spread, rows, BACKWARD, device, numbers, compiled)
        return max(work + more, launched + called + hooks) - max(work, launched)

    some = math.fsum(again(part, _but(part, saved), asked_of(device).selecting) for part in blocks)
    full = math.fsum(again(part, Times(1 - part.spared, 1, 1), asked_of(device).recalling) for part in blocks)
    return some, full


def _but(part: PartProfile, saved: Collection[str]) -> Times:
    """What of a part's forward is computed again where results of the operations `saved` are kept."""
    convolutions = part.convolutions.value / part.products.value if part.products.value else 0.0
    kept = ("matmul" in saved) * (1 - convolutions) + ("convolution" in saved) * convolutions
    return Times(min(1 - part.spared, 1 - kept), float("attention" not in saved), 1)


def _peaks(part: PartProfile, device: Device, numbers: Numbers) -> tuple[float, float]:
    """Operations a second of a part's products, and of its attention: fp8 is of linear layers alone."""
    plain, rounded = device.peak(numbers.dtype), device.peak(numbers.dtype, numbers.rounded)
    if numbers.rounded != "fp8":
        return rounded, rounded
    convolutions = part.convolutions.value / part.products.value if part.products.value else 0.0
    experts = part.experts.value / part.weights.value if part.weights.value else 0.0
    share = (1 - convolutions) * (1 - experts)
    return 1 / (share / rounded + (1 - share) / plain), plain


def work_and_launches(
    part: PartProfile, spread: Spread, rows: float, times: Times, device: Device, numbers: Numbers, compiled: bool
) -> tuple[float, float]:
    """Seconds of what is computed and moved, and of the launches."""
    peak, own = _peaks(part, device, numbers)
    operations = rows * part.products.on(spread)
    work = times.products * operations / (peak * device.share(operations / max(1, part.multiplied)))
    work += rows * times.attention * part.attention.on(spread) / (own * device.reaches * ATTENTION_REACHES)
    touched, calls = (part.fused, part.kernels) if compiled else (part.touched, part.calls)
    moved = rows * (times.products * part.operands.on(spread) + times.rest * touched.on(spread))
    if device.on_host:
        moved += times.gradients * ADDED * numbers.gradient * part.trained.on(spread)
    work += moved / (device.bandwidth * device.streams)
    launches = max(times.products, times.rest) * calls.on(spread) + CALLED * compiled
    launches += times.gradients * asked_of(device).hook * part.tensors
    return work, launches * device.launch
