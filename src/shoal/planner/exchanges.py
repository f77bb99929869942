"""What copies of the model exchange in a step, what moves between tiers, and the update: seconds, closed forms."""

from __future__ import annotations

import math

from shoal.exchange.algorithm import USUAL_CHUNK
from shoal.exchange.tuning import LARGEST, SMALLEST, best_size
from shoal.planner.cluster import Link
from shoal.planner.costs import REDUCED_AT_ONCE, Prices, Sizes
from shoal.planner.held import copies, elements
from shoal.planner.task import Choice


def exchanged(
    prices: Prices, choice: Choice, own: Sizes, number: int, window: tuple[float, float], tied: float
) -> tuple[float, dict[str, float]]:
    """Seconds in which a rank waits for the exchange of gradients and weights of `number` microbatches, and the bytes
    handed to collectives. `window`: seconds of one backward, and of all that a rank computes in a step."""
    spread, numbers, cluster = choice.spread, prices.task.numbers, prices.task.cluster
    ranks = spread.replicas
    weights, trained, experts = elements(own, tied)
    if ranks == 1:
        return 0.0, {}
    reduced = numbers.gradient * trained
    link = cluster.link(spread.stride("copies") // spread.tokens, ranks)
    with_experts = max(1, ranks // spread.experts)
    total = wire = 0.0
    again = number if choice.zero >= 2 or choice.offload else 1
    operation = "reduce_scatter" if choice.zero >= 1 else "all_reduce"
    parts = (reduced, ranks), (numbers.gradient * experts, with_experts)
    calls = [chunks(nbytes, link, among) for nbytes, among in parts]
    for (nbytes, among), times in zip(parts, calls, strict=True):
        total += link.seconds(operation, again * nbytes, among, again * times)
        wire += again * nbytes * (among > 1)
    together = copies(choice)[0]
    if choice.zero in (1, 2):
        nbytes = numbers.weight * (trained + experts)
        total += link.seconds("all_gather", nbytes, together, sum(calls))
        wire += nbytes
    if together < ranks and choice.zero:  # copies of the state agree on their parts
        total += link.seconds("all_reduce", reduced / together, ranks // together, calls[0])
        wire += reduced / together
    gathered = 0.0
    if choice.zero == 3:
        inner = cluster.link(spread.stride("copies") // spread.tokens, together)
        nbytes = 2 * number * numbers.weight * (weights + experts)
        gathered = inner.seconds("all_gather", nbytes, together, 2 * number * sum(calls))
        wire += nbytes
    hidden = cluster.overlap * (window[1] if choice.zero >= 2 else window[0])
    early = total * (1 - REDUCED_AT_ONCE) + gathered
    waits = cluster.contention * min(early, hidden)
    waits += total * REDUCED_AT_ONCE + gathered * GATHERED_FIRST
    if choice.zero == 3 and prices.slowest.on_host:
        waits += 2 * number * sum(calls) * HOOKS * prices.slowest.launch
    return max(0.0, early - hidden) + waits, {"copies": wire}


GATHERED_FIRST = 0.1
"""The share of gathers that nothing hides: of the first chunk of a forward, and of a backward."""
HOOKS = 20
"""Launches that the hooks of one gather take of a host's cores."""
MOST_CHUNKS = 24
"""Chunks of a rank's gradients that are counted at most: of more, calls take little beside what they carry."""


def chunks(gradients: float, link: Link, ranks: int) -> int:
    """The chunks of so many bytes of gradients, each of which is a call: those of matrices, of the size that the engine
    chooses for the link, and one of biases and norms."""
    if not gradients or ranks == 1:
        return 0
    shortest = link.seconds("all_reduce", 0, ranks)
    bandwidth = LARGEST / (link.seconds("all_reduce", LARGEST, ranks) - shortest)
    size = best_size(shortest, bandwidth, gradients) if gradients > SMALLEST else USUAL_CHUNK
    return min(MOST_CHUNKS, 1 + math.ceil(gradients / size))


def moved(prices: Prices, choice: Choice, own: Sizes, number: int, window: float) -> float:
    """Seconds in which a rank waits for weights and gradients that travel between its device and the host."""
    if not choice.offload:
        return 0.0
    numbers, cluster = prices.task.numbers, prices.task.cluster
    weights = own.weights
    trained = own.trained / (copies(choice)[0] if choice.zero >= 2 else 1)
    nbytes = numbers.weight * weights * 2 * number + numbers.gradient * trained * number
    seconds = nbytes / cluster.to_host
    return max(0.05 * seconds, seconds - cluster.overlap * window)


def updated(prices: Prices, choice: Choice, own: Sizes, tied: float) -> float:
    """Seconds of the update: the bytes that it reads and writes."""
    numbers, (together, with_experts) = prices.task.numbers, copies(choice)
    _, trained, experts = elements(own, tied)
    if choice.zero:
        trained, experts = trained / together, experts / with_experts
    each = numbers.gradient + 2 * (numbers.master or numbers.weight) + 2 * numbers.state + numbers.weight
    nbytes = each * (trained + experts)
    device = prices.slowest
    rate = prices.task.cluster.update if choice.offload else device.bandwidth * device.streams
    return device.updating * nbytes / rate
