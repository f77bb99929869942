"""What copies of the model exchange in a step, what moves between tiers, and the update: seconds, closed forms."""

from __future__ import annotations

import math

from shoal.exchange.algorithm import USUAL_CHUNK
from shoal.exchange.named import algorithm
from shoal.exchange.sends import Sends
from shoal.exchange.tuning import LARGEST, SMALLEST, best_size
from shoal.planner.cluster import Device, Link
from shoal.planner.computing import python_of
from shoal.planner.costs import REDUCED_AT_ONCE, Prices, Sizes
from shoal.planner.held import Held, Tied, copies, elements, in_common, is_cut, on_one_host, resting
from shoal.planner.pipes import THERE_AND_BACK
from shoal.planner.task import EXACT, Choice


def exchanged(
    prices: Prices, choice: Choice, own: Sizes, number: int, window: tuple[float, float], tied: Tied, has: Held
) -> tuple[float, dict[str, float]]:
    """Seconds in which a rank waits for the exchange of gradients and weights of `number` microbatches, and the bytes
    handed to collectives. `window`: seconds of one backward, and of all that a rank computes in a step; `has`: what
    it holds."""
    spread, numbers, cluster = choice.spread, prices.task.numbers, prices.task.cluster
    ranks = spread.replicas
    weights, trained, experts = elements(own, tied)
    if ranks == 1:
        return 0.0, {}
    sends = sends_of(prices, choice)
    reduced = numbers.gradient * trained
    stride = spread.stride("copies") // spread.tokens
    link = cluster.link(stride, ranks)
    with_experts = max(1, ranks // spread.experts)
    total = wire = 0.0
    again = number if choice.zero >= 2 or (choice.zero and choice.offload) else 1  # copies add up once
    operation = "reduce_scatter" if choice.zero >= 1 and sends.in_parts else "all_reduce"
    parts = (reduced, ranks), (numbers.gradient * experts, with_experts)
    calls = [chunks(nbytes, link, among) for nbytes, among in parts]
    for (nbytes, among), times in zip(parts, calls, strict=True):
        total += link.seconds(operation, sends.share * again * nbytes, among, again * times if sends.share else 0)
        inside = min(among, cluster.per_host)
        wire += sends.payload(inside) * again * nbytes * (among > 1)
        if sends.inside_hosts and among > 1:  # all of it travels inside of a host before
            total += cluster.inside.seconds(operation, again * nbytes, inside)
    device = prices.slowest
    coding = again * sends.passes * (reduced + numbers.gradient * experts) / cluster.streams
    together = copies(choice)[0]
    common = in_common(prices, choice)
    passes = is_cut(choice, "weights") and not common  # they are gathered to be used
    if common:
        total += link.seconds("all_gather", 0, together, sum(calls))  # ranks meet when all are updated
    elif choice.zero and not passes:
        nbytes = numbers.weight * (trained + experts)
        total += link.seconds("all_gather", nbytes, together, sum(calls))
        wire += nbytes
    if together < ranks and choice.zero and sends.in_parts:  # copies of the state agree on their parts
        total += link.seconds("all_reduce", reduced / together, ranks // together, calls[0])
        wire += reduced / together
    gathered = paused = 0.0
    often = has.times(number) + has.stays  # what lies on the device is gathered once, when it was updated
    gathers = often * sum(calls)
    if passes:
        inner = cluster.link(stride, together)
        nbytes = often * numbers.weight * (weights + experts)
        gathered = inner.seconds("all_gather", nbytes, together, gathers)
        paused = inner.seconds("all_gather", 0, together, _asked(prices, choice, gathers, number))
        wire += nbytes
    hidden = cluster.overlap * (window[1] if choice.zero >= 2 or passes or sends.beside else window[0])
    of_matrices = max(1, sum(calls) - 1)
    last = 0.0 if sends.beside else max(REDUCED_AT_ONCE, 1 / (again * of_matrices))
    early = total * (1 - last) + gathered + (0.0 if device.on_host else coding)
    waits = cluster.contention * min(early, hidden)
    waits += total * last + gathered * GATHERED_FIRST + paused + (coding if device.on_host else 0.0)
    if passes and device.on_host:
        waits += gathers * HOOKS * python_of(device)
    at_once = 0.0 if sends.beside else _at_once(prices, own, total / again, cluster.overlap * window[0]) - total * last
    return max(0.0, early - hidden, at_once) + waits, {"copies": wire}


def _asked(prices: Prices, choice: Choice, gathers: float, number: int) -> float:
    """How often in a step of `number` microbatches ranks on cores ask whether the others gather the same weights
    (chunks/shard): before each backward, at the end, and, where memory that all share does not tell them (comm/alike),
    for each of the `gathers`."""
    if not prices.slowest.on_host:
        return 0.0
    return number + 1 + (0 if on_one_host(prices, choice) else gathers)


def _at_once(prices: Prices, own: Sizes, seconds: float, hidden: float) -> float:
    """Seconds of the exchange of a microbatch's gradients, which takes `seconds`, that follow its backward, which can
    hide so many, where a block has all of its gradients at once, as stacked experts do: those of the last block, and
    what is left of the others. 0 for other models."""
    if not own.trained or not prices.has_experts:
        return 0.0
    block = min(1.0, own.in_use / own.trained)
    return max(block * seconds, seconds - (1 - block) * hidden)


def sends_of(prices: Prices, choice: Choice) -> Sends:
    """What the exchange of a choice sends, or that which is pinned."""
    option = prices.task.pins.get("exchange", choice.exchange)
    if option == EXACT:
        return Sends(in_parts=True)
    return algorithm(option).sends(choice.spread.replicas, prices.task.numbers.gradient, prices.side)


GATHERED_FIRST = 0.1
"""The share of gathers that nothing hides: of the first chunk of a forward, and of a backward."""
HOOKS = 4
"""Launches that the hooks of one gather take of a host's cores (chunks/gather)."""
WATCHED, WATCHED_EACH, WATCHED_TENSOR = 50, 1.4, 9
"""Launches that Python takes of a host's cores where weights are at home elsewhere: those of a microbatch, and of it
for each operation, which saves something for backward, and for each parameter (chunks/gather, chunks/saved). Measured,
on GPTs of 1 to 8 layers of next to no width, Mixtrals of 1 to 4, and a ResNet."""
PAGED, PAGED_TENSOR = 350, 12
"""And where the state lies on a disk, those of a step, and of it for each parameter (optim/tiers/pager). Measured on
the same."""
STEP, STEP_TENSOR, STEP_STATISTICS, MICROBATCH = 60, 2.2, 10, 60
"""Launches that Python takes of a host's cores in a step of the engine, for each parameter that is trained, and for
each layer whose statistics of batches replicas merge; and in each of its microbatches, beside a plain loop and the
hooks of parameters. Measured, on GPTs of next to no width and a ResNet."""
MESSAGE = 42
"""And in sending or receiving what goes from one stage to the next: most of it on another thread, which is woken and
waits. Measured, on an interleaved GPT."""
MOST_CHUNKS = 24
"""Chunks of a rank's gradients that are counted at most: of more, calls take little beside what they carry."""


def chunks(gradients: float, link: Link, ranks: int) -> int:
    """The chunks of so many bytes of gradients, each of which is a call: those of matrices, of the size that the engine
    chooses for the link, and one of biases and norms."""
    if not gradients or ranks == 1:
        return 0
    shortest = link.seconds("all_reduce", 0, ranks)
    bandwidth = LARGEST / link.seconds("all_reduce", LARGEST, ranks, calls=0)
    size = best_size(shortest, bandwidth, gradients) if gradients > SMALLEST else USUAL_CHUNK
    return min(MOST_CHUNKS, 1 + math.ceil(gradients / size))


def moved(
    prices: Prices, choice: Choice, own: Sizes, number: int, tied: Tied, has: Held, kept: float
) -> tuple[float, float]:
    """Seconds in which weights, gradients and activations travel between a rank's device and the host while it computes
    or waits (see `exposed`), and those in which cores copy them and compute nothing, with those of the hooks that watch
    them. `kept`: bytes of a microbatch that backward keeps."""
    if choice.offload is None:
        return 0.0, 0.0
    device = prices.slowest
    cluster, home = prices.task.cluster, resting(prices, choice, own, tied)
    nbytes = has.times(number) * home["weights"] + (1 - has.stays) * number * home["gradients"]
    nbytes += 2 * number * choice.offload.activations * kept
    seconds = nbytes / cluster.to_host
    if not device.on_host:
        return seconds, 0.0
    watching = WATCHED + WATCHED_EACH * own.calls + WATCHED_TENSOR * own.tensors
    return 0.0, number * watching * launching(device) + seconds


def exposed(prices: Prices, moving: float, window: float) -> float:
    """Seconds that a step takes longer for what moves for `moving` seconds beside it. `window`: seconds in which a rank
    computes, or waits for other stages."""
    return max(0.05 * moving, moving - prices.task.cluster.overlap * window)


def updated(prices: Prices, choice: Choice, own: Sizes, tied: Tied, has: Held) -> float:
    """Seconds of the update: the bytes that it reads and writes, where they lie. What is at home on the host is updated
    there, or passes through the device, whichever takes less (optim/tiers/host); pages of the disk come and go beside
    that."""
    numbers, (together, with_experts), cluster = prices.task.numbers, copies(choice), prices.task.cluster
    _, trained, experts = elements(own, tied)
    if is_cut(choice, "optimizer state"):
        trained, experts = trained / together, experts / with_experts
    number, device = trained + experts, prices.slowest
    each = numbers.gradient + 2 * (numbers.master or numbers.weight) + 2 * numbers.state + numbers.weight
    there = device.updating * number * each / cluster.streams
    if choice.offload is None:
        return there
    pages = number * (numbers.master + numbers.state)
    on_host = device.updating * number * each / cluster.update
    if numbers.master and not device.on_host and choice.offload.disk is None:
        on_host = min(on_host, there + pages / cluster.to_host)  # both ways at once
    disk = 2 * has.paged * pages / cluster.disk if has.paged else 0.0
    paging = (PAGED + PAGED_TENSOR * own.tensors) * launching(device) if has.paged and device.on_host else 0.0
    return has.stays * there + max((1 - has.stays) * on_host, disk) + paging


def met(prices: Prices, choice: Choice) -> tuple[float, float]:
    """Seconds in which the first and the last stage of a pipeline add up the gradients of what they share (a tied
    embedding) beside what replicas exchange, and the bytes that one hands over for that."""
    spread, profile, cluster = choice.spread, prices.task.profile, prices.task.cluster
    if spread.stages == 1 or choice.schedule in THERE_AND_BACK:  # one rank has both
        return 0.0, 0.0
    if not (shared := profile.tied_trained.on(spread)):
        return 0.0, 0.0
    shared = min(shared, max(part.trained.on(spread) for part in profile.parts))
    nbytes = prices.task.numbers.gradient * shared
    link = cluster.link(spread.stride("stages") * (spread.stages - 1), 2)
    # Replicas add them up with their own, in groups of twice as many: each has a part of what is more then.
    return link.seconds("all_reduce", nbytes / spread.replicas, 2), nbytes if spread.replicas == 1 else 0.0


def launching(device: Device) -> float:
    """Seconds of a launch beside computing, whatever was learned of that."""
    return python_of(device) / device.slower


def agreed(prices: Prices, choice: Choice, number: int) -> float:
    """Seconds of a step of `number` microbatches beside what is computed and exchanged: the calls by which ranks add up
    the loss, the gradient's norm and the running statistics (training/ballot), and on cores the engine's Python."""
    spread, cluster, device = choice.spread, prices.task.cluster, prices.slowest
    replicas, statistics = spread.replicas, prices.task.profile.statistics
    among = cluster.link(spread.stride("copies") // spread.tokens, replicas)
    seconds = among.seconds("all_reduce", 8.0 * statistics.numbers, replicas)
    if statistics.layers:  # replicas tell each other first how often they have updated them
        seconds += among.seconds("all_gather", 0.0, replicas)
    ties = prices.task.profile.tied.value > 0
    for what, ranks, calls in (("parts", spread.parts, 1), ("stages", spread.stages, 2 + ties)):
        seconds += cluster.link(spread.stride(what), ranks).seconds("all_reduce", 0.0, ranks, calls)
    ends = 4 * (spread.stages * choice.chunks - 1) / spread.stages  # of messages of a microbatch, both ways
    of_all = STEP_TENSOR * prices.tensors + STEP_STATISTICS * statistics.layers * (replicas > 1)
    of_a_step = STEP + of_all / spread.stages
    of_a_microbatch = choice.chunks * MICROBATCH + ends * MESSAGE
    return seconds + device.on_host * (of_a_step + number * of_a_microbatch) * launching(device)
