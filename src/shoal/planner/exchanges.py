"""What copies of the model exchange in a step, what moves between tiers, and the update: seconds, closed forms."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.exchange.algorithm import USUAL_CHUNK
from shoal.exchange.named import algorithm
from shoal.exchange.sends import Sends
from shoal.exchange.tuning import LARGEST, SMALLEST, best_size
from shoal.planner.cluster import Device, Link
from shoal.planner.computing import python_of, python_once
from shoal.planner.costs import REDUCED_AT_ONCE, Prices
from shoal.planner.held import Held, Tied, copies, elements, in_common, is_cut, on_one_host, resting
from shoal.planner.pipes import THERE_AND_BACK
from shoal.planner.sizes import Sizes
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
    stride = spread.stride("copies") // spread.tokens
    link, together = cluster.link(stride, ranks), copies(choice)[0]
    inner = cluster.link(stride, together)
    again = number if choice.zero >= 2 or (choice.zero and choice.offload) else 1  # copies add up once
    gradients = numbers.gradient * trained, numbers.gradient * experts
    calls = [chunks(gradients[0], link, ranks), chunks(gradients[1], link, max(1, ranks // spread.experts))]
    total, once, wire = _summed(prices, choice, sends, gradients, calls, again)
    device = prices.slowest
    coding = again * sends.passes * sum(gradients) / cluster.streams
    common = in_common(prices, choice)
    passes = is_cut(choice, "weights") and not common  # they are gathered to be used
    shared = gathered = paused = 0.0
    stays = has.stays if choice.offload or not passes else 0.0  # of weights that are whole on each rank
    if choice.zero:  # they come together when all are updated, and the next forward waits for them (chunks/shard)
        nbytes = 0.0 if common else stays * numbers.weight * (trained + experts)
        shared = inner.seconds("all_gather", nbytes, together, stays * sum(calls))
        wire += nbytes
    often = has.times(number) + has.stays - stays  # others are gathered to be used
    gathers = often * sum(calls)
    if passes:
        nbytes = often * numbers.weight * (weights + experts)
        gathered = inner.seconds("all_gather", nbytes, together, gathers)
        paused = inner.seconds("all_gather", 0, together, _asked(prices, choice, gathers, number))
        wire += nbytes
    hidden = cluster.overlap * (window[1] if choice.zero >= 2 or passes or sends.beside else window[0])
    chunk = 0.0 if sends.beside else 1 / max(1, sum(calls) - 1)  # the last one's share, which follows backward
    late = sum(part * max(chunk and REDUCED_AT_ONCE, chunk / times) for part, times in ((total, again), (once, 1)))
    early = total + once - late + gathered + (0.0 if device.on_host else coding)
    waits = cluster.contention * min(early, hidden) + late + shared
    waits += gathered * GATHERED_FIRST + paused + (coding if device.on_host else 0.0)
    if device.on_host:
        handed = again * sum(calls) * (sends.share > 0)
        waits += (HOOKS * gathers * passes + HANDED * handed) * python_once(device)
    at_once = 0.0 if sends.beside else _at_once(prices, own, total / again, cluster.overlap * window[0]) - late
    return max(0.0, early - hidden, at_once) + waits, {"copies": wire}


def _summed(
    prices: Prices,
    choice: Choice,
    sends: Sends,
    gradients: tuple[float, float],
    calls: Sequence[int],
    again: int,
) -> tuple[float, float, float]:
    """Seconds of `again` sums of gradients among the ranks that share the state, or among all; those in which copies of
    the state add up their parts, once a step; and the bytes handed to collectives. `gradients`: bytes of those of
    weights that all have, and of experts; `calls`: of a sum of each."""
    spread, cluster = choice.spread, prices.task.cluster
    ranks, stride = spread.replicas, spread.stride("copies") // spread.tokens
    in_parts = choice.zero >= 1 and sends.in_parts
    operation = "reduce_scatter" if in_parts else "all_reduce"
    together, of_experts = copies(choice) if in_parts else (ranks, max(1, ranks // spread.experts))
    link = cluster.link(stride, together)
    total = wire = 0.0
    for nbytes, among, times in zip(gradients, (together, of_experts), calls, strict=True):
        total += link.seconds(operation, sends.share * again * nbytes, among, again * times if sends.share else 0)
        inside = min(among, cluster.per_host)
        wire += sends.payload(inside) * again * nbytes * (among > 1)
        if sends.inside_hosts and among > 1:  # all of it travels inside of a host before
            total += cluster.inside.seconds(operation, again * nbytes, inside)
    if together == ranks:
        return total, 0.0, wire
    parts = gradients[0] / together + gradients[1] / of_experts
    across = cluster.link(stride * together, ranks // together)
    return total, across.seconds("all_reduce", parts, ranks // together, sum(calls)), wire + parts


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
HOOKS, HANDED = 4, 10
"""Launches that Python takes of a host's cores for the hooks of one gather (chunks/gather), and for a chunk of
gradients that another thread exchanges (comm/lane). Measured, of the latter, on a GPT and a Mixtral."""
WATCHED, WATCHED_EACH, WATCHED_TENSOR = 50, 1.4, 9
"""Launches that Python takes of a host's cores where weights are at home elsewhere: those of a microbatch, and of it
for each operation, which saves something for backward, and for each parameter (chunks/gather, chunks/saved). Measured,
on GPTs of 1 to 8 layers of next to no width, Mixtrals of 1 to 4, and a ResNet."""
PAGED, PAGED_TENSOR = 350, 12
"""And where the state lies on a disk, those of a step, and of it for each parameter (optim/tiers/pager). Measured on
the same."""
STEP, STEP_TENSOR, STEP_STATISTICS, MICROBATCH = 75, 1.3, 5, 50
"""Launches that Python takes of a host's cores in a step of the engine, for each parameter that a rank updates, and for
each layer whose statistics of batches replicas merge; and in each of its microbatches, beside a plain loop and the
hooks of parameters. Measured, on GPTs of 4 and 12 layers from next to no width to 256, a Mixtral and a ResNet; that
ZeRO divides what is for each parameter, on 20 and 80 of them."""
IDLE = 8e-3
"""Seconds in which a core has nothing to do as replicas that share cores wait for each other at the end of a step,
times the root of the seconds that they compute in it: whose turn on a core it is, is by chance, and by how much some
are ahead grows like that. Stages and ranks that share experts wait inside of a step, which their schedule and their
calls say; a run that was compared has it in what computing took. Measured, of a ResNet, a Mixtral and a GPT on four
ranks of two cores: of steps of 28, 82 and 258 ms 1.3, 2.6 and 3.6."""
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
    often = WATCHED_EACH * own.calls + WATCHED_TENSOR * own.tensors
    return 0.0, number * launching(device, WATCHED, often) + seconds


def exposed(prices: Prices, moving: float, window: float) -> float:
    """Seconds that a step takes longer for what moves for `moving` seconds beside it. `window`: seconds in which a rank
    computes, or waits for other stages."""
    return max(0.05 * moving, moving - prices.task.cluster.overlap * window)


def updated(prices: Prices, choice: Choice, own: Sizes, tied: Tied, has: Held) -> float:
    """Seconds of the update: the bytes that it reads and writes, where they lie, and on cores its Python for each
    parameter. What is at home on the host is updated there, or passes through the device, whichever takes less
    (optim/tiers/host); pages of the disk come and go beside that."""
    numbers, (together, with_experts), cluster = prices.task.numbers, copies(choice), prices.task.cluster
    _, trained, experts = elements(own, tied)
    if is_cut(choice, "optimizer state"):
        trained, experts = trained / together, experts / with_experts
    number, device = trained + experts, prices.slowest
    each = numbers.gradient + 2 * (numbers.master or numbers.weight) + 2 * numbers.state + numbers.weight
    there = device.updating * number * each / cluster.streams
    owned = own.tensors / together if is_cut(choice, "optimizer state") else own.tensors
    python = device.updating * launching(device, 0, STEP_TENSOR * owned) if device.on_host else 0.0
    if choice.offload is None:
        return there + python
    pages = number * (numbers.master + numbers.state)
    on_host = device.updating * number * each / cluster.update
    if numbers.master and not device.on_host and choice.offload.disk is None:
        on_host = min(on_host, there + pages / cluster.to_host)  # both ways at once
    disk = 2 * has.paged * pages / cluster.disk if has.paged else 0.0
    if has.paged and device.on_host:
        python += launching(device, PAGED, PAGED_TENSOR * own.tensors)
    return has.stays * there + max((1 - has.stays) * on_host, disk) + python


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


def launching(device: Device, once: float, often: float) -> float:
    """Seconds of Python of so many launches, beside computing, whatever was learned of that: of those that come `once`
    in a step or a microbatch, and `often`."""
    return (once * python_once(device) + often * python_of(device)) / device.slower


def agreed(prices: Prices, choice: Choice, number: int, computing: float) -> float:
    """Seconds of a step of `number` microbatches beside what is computed and exchanged: the calls by which ranks add up
    the loss, the gradient's norm and the running statistics (training/ballot), and on cores the engine's Python, and
    what replicas wait for each other. `computing`: seconds of the first rank, without what is computed again."""
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
    of_all = STEP_STATISTICS * statistics.layers * (replicas > 1)
    once = STEP + number * (choice.chunks * MICROBATCH + ends * MESSAGE)
    if replicas > 1 == spread.stages * spread.experts and device.crowd > 1 and device.slower == 1.0:
        seconds += IDLE * math.sqrt(computing)
    return seconds + device.on_host * launching(device, once, of_all / spread.stages)
