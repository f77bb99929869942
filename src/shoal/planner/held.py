"""Closed forms for the bytes of a rank: what ZeRO, stages and tiers leave of weights, gradients, masters and optimizer
state, and the activations of the microbatches under way. A plan that is chosen is run dry besides, which counts all."""

from __future__ import annotations

import math
from typing import NamedTuple

from shoal.chunks.gradient_pool import BUFFERS as LOANS
from shoal.exchange.algorithm import USUAL_CHUNK
from shoal.optim.tiers.pager import BUFFERS as PAGES
from shoal.planner.costs import Prices
from shoal.planner.degrees import Spread
from shoal.planner.sizes import Sizes
from shoal.planner.task import Choice
from shoal.planner.temporaries import Lives


class Held(NamedTuple):
    """What a rank holds and, with `plan.memory`, what of it moves.

    - `device`: bytes by role; `host`, `disk`: bytes at home there
    - `again`: the share of the weights that comes to the device in each pass but the first; `stays`: the share of the
      state that lies on the device for good
    - `paged`: the share of masters and optimizer state that lies on the disk
    - `rank`: its place along the pipeline
    """

    device: dict[str, float]
    host: float = 0.0
    disk: float = 0.0
    again: float = 1.0
    stays: float = 1.0
    paged: float = 0.0
    rank: int = 0

    @property
    def bytes(self) -> float:
        """Bytes of the device."""
        return math.fsum(self.device.values())

    def times(self, number: int) -> float:
        """How often all of the weights come in a step of `number` microbatches: once since they were updated, and again
        in each later pass, forward or backward, as far as they did not stay."""
        return (1 - self.stays) + (2 * number - 1) * self.again


class Tied(NamedTuple):
    """Elements that parts of a rank share, which are counted once: of its weights, and of those that are trained."""

    weights: float
    trained: float


def elements(own: Sizes, tied: Tied) -> tuple[float, float, float]:
    """Elements of a rank: weights and trained ones outside of experts, and experts."""
    weights, trained = own.weights - tied.weights, own.trained - tied.trained
    return max(0.0, weights - own.experts), max(0.0, trained - own.experts), own.experts


def tied_elements(prices: Prices, spread: Spread) -> Tied:
    """What parts of the model share, which a rank with all of it has once; nothing where there are stages."""
    profile = prices.task.profile
    return Tied(*(each.on(spread) * (spread.stages == 1) for each in (profile.tied, profile.tied_trained)))


def copies(choice: Choice) -> tuple[int, int]:
    """Among how many ranks ZeRO cuts the state, and that of experts."""
    together = (choice.shard or choice.spread.copies) * choice.spread.tokens
    return together, max(1, together // choice.spread.experts)


def is_cut(choice: Choice, role: str) -> bool:
    """Whether ranks share one copy of it. What is at home on the host is cut as under ZeRO 3, whatever the stage."""
    return choice.zero >= (1 if choice.offload else CUT_FROM[role])


def in_common(prices: Prices, choice: Choice) -> bool:
    """Whether ranks that share the state have one copy of the weights in memory that is common to them, as ranks on the
    cores of a host do: then nothing of them is sent."""
    on_cores = prices.slowest.on_host and choice.zero > 0 and choice.offload is None
    return on_cores and on_one_host(prices, choice)


def on_one_host(prices: Prices, choice: Choice) -> bool:
    """Whether ranks that share the state are all on one host."""
    span = choice.spread.stride("copies") // choice.spread.tokens * copies(choice)[0]
    return prices.task.cluster.per_host % span == 0


CUT_FROM = {"optimizer state": 1, "masters": 1, "gradients": 2, "weights": 3}
"""The ZeRO stage from which a role is cut among ranks."""
ROUNDING = 1e-12
"""The share of a budget that is left free, so that the sum of all that fills it is not above it."""
USES = 3
"""Gradients of a weight that parts share, at most: one of each of two uses, and their sum."""


def resting(prices: Prices, choice: Choice, own: Sizes, tied: Tied) -> dict[str, float]:
    """Bytes by role that a rank keeps all the time, wherever it does."""
    numbers, (among, with_experts) = prices.task.numbers, copies(choice)
    weights, trained, experts = elements(own, tied)

    def kept(role: str, plain: float) -> float:
        whole = role == "weights" and in_common(prices, choice)
        return plain / among + experts / with_experts if is_cut(choice, role) and not whole else plain + experts

    return {
        "weights": numbers.weight * kept("weights", weights),
        "gradients": numbers.gradient * kept("gradients", trained),
        "masters": numbers.master * kept("masters", trained),
        "optimizer state": numbers.state * kept("optimizer state", trained),
    }


def standing(
    prices: Prices, choice: Choice, whole: Sizes, last: bool, tied: Tied, lives: Lives[float]
) -> dict[str, float]:
    """Bytes by role that a rank with the stages `whole` needs of its device at least, beside activations, which
    wait on it, all of them or none. `last`: it has the last stage; `lives`: bytes of one row beside them."""
    rows, numbers = choice.microbatch, prices.task.numbers
    roles = resting(prices, choice, whole, tied)
    if choice.offload:
        roles = dict.fromkeys(roles, 0.0)
    gathers = choice.zero == 3 and not in_common(prices, choice)
    largest = min(whole.tensor, whole.trained)  # of the parameters that have gradients, or more
    weights, trained, experts = elements(whole, tied)
    if choice.offload or is_cut(choice, "gradients"):  # those of earlier stages may wait for later ones
        loans = LOANS + (whole.experts > 0)  # chunks of experts are filled beside others
        chunk = numbers.gradient * largest
        if not choice.offload and not gathers:  # of weights that are gathered chunks are as small as can be
            chunk = max(chunk, min(USUAL_CHUNK, numbers.gradient * (trained + experts)))
        at_once = numbers.gradient * whole.waiting + loans * chunk
        most = numbers.gradient * (trained + experts) if gathers else math.inf  # else it is buffers that stay
        roles["gradients on loan"] = min(at_once, most)
    above, beside, passing = (rows * each for each in lives)
    if not last:  # no loss, whose tensors are largest
        above = beside = min(passing, rows * whole.largest)
    elif not choice.on_device:  # nothing is hidden by what backward keeps elsewhere
        above = beside = passing
    at_work = 0.0
    if choice.offload or gathers:  # a block that is computed again is whole; without a tier a chunk is ahead
        at_work = whole.in_use + (0.0 if choice.offload else whole.tensor)
    roles["weights in use"] = numbers.weight * min(at_work, weights + experts)
    gradients = max(largest, USES * tied.trained)
    roles["temporaries"] = max(above, beside + numbers.weight * gradients)
    return roles


def held(prices: Prices, choice: Choice, whole: Sizes, tied: Tied, device: dict[str, float], beside: float) -> Held:
    """What a rank holds that needs `device` bytes at least, with activations; `beside`: bytes of them that wait on the
    host.

    The room that is left of a budget keeps weights from one use to the next; a forward and a backward go through them
    in opposite order, so what has stayed is what comes first (chunks/movement). Beside all weights it takes gradients,
    masters and optimizer state of as many chunks as fit, which move no more (optim/tiers/placement); what the host may
    not keep goes to the disk, page by page.
    """
    away = choice.offload
    if away is None:
        return Held(device)
    numbers, home = prices.task.numbers, resting(prices, choice, whole, tied)
    weights, _, experts = elements(whole, tied)
    all_weights, pages = numbers.weight * (weights + experts), home["masters"] + home["optimizer state"]
    paged = in_turn = 0.0
    if away.disk is not None and pages:
        in_turn = min(pages, PAGES * (numbers.master + numbers.state) * whole.tensor)
        over = sum(home.values()) + beside + in_turn - (away.host or 0.0)
        paged = 1.0 if away.host is None or away.activations else min(1.0, max(0.0, over / pages))
    state = sum(nbytes for role, nbytes in home.items() if role != "weights")
    stays = 0.0
    kept = all_weights
    if away.device is not None:
        room = away.device * (1 - ROUNDING) - sum(device.values()) + device["weights in use"]
        kept = min(all_weights, max(device["weights in use"], room))
        stays = min(1.0 - paged, max(0.0, room - all_weights) / state) if state else 0.0
    on_device = {role: (all_weights if role == "weights" else nbytes) * stays for role, nbytes in home.items()}
    roles = {role: nbytes + on_device.get(role, 0.0) for role, nbytes in device.items()}
    roles["weights in use"] = kept - on_device["weights"]
    host = (1 - stays) * sum(home.values()) - paged * pages + beside + in_turn * (paged > 0)
    if away.host is not None and 0 < paged < 1:
        host = min(host, away.host)  # but for rounding they are equal
    again = 1 - kept / all_weights if all_weights else 0.0
    generations = 2 if paged == 1.0 else 1
    return Held(roles, host, generations * paged * pages, max(0.0, again), stays, paged)
