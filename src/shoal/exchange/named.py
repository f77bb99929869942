"""The algorithms by the names that a plan's `exchange` takes; some are presets of parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shoal.errors import UserError, did_you_mean
from shoal.exchange.adasum import Adasum
from shoal.exchange.algorithm import Algorithm
from shoal.exchange.allreduce import AllReduce
from shoal.exchange.async_average import AsyncAverage
from shoal.exchange.compressed import Compressed
from shoal.exchange.decentralized import Decentralized
from shoal.exchange.delayed import Delayed
from shoal.exchange.diloco import DiLoCo
from shoal.exchange.hierarchical import Hierarchical
from shoal.exchange.islands import Islands
from shoal.exchange.local_sgd import LocalSGD
from shoal.exchange.low_precision_decentralized import LowPrecisionDecentralized
from shoal.exchange.none import NoExchange
from shoal.exchange.powersgd import PowerSGD
from shoal.exchange.qadam import QAdam
from shoal.exchange.topk import TopK
from shoal.plan import Option, check_parameters, option_name, option_parameters

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "allreduce": AllReduce,
    "hierarchical": Hierarchical,
    "fp16": partial(Compressed, codec="fp16"),
    "bf16": partial(Compressed, codec="bf16"),
    "bytegrad": partial(Compressed, codec="u8"),
    "powersgd": PowerSGD,
    "topk": TopK,
    "adasum": Adasum,
    "delayed": Delayed,
    "qadam": partial(QAdam, codec="u8"),
    "onebit_adam": partial(QAdam, codec="sign"),
    "decentralized": Decentralized,
    "low_precision_decentralized": LowPrecisionDecentralized,
    "async_average": AsyncAverage,
    "local_sgd": LocalSGD,
    "post_local_sgd": partial(LocalSGD, start=100),
    "diloco": DiLoCo,
    "streaming_diloco": partial(DiLoCo, fragments=4, overlap=4, codec="u4", keep=0.5),
    "islands": partial(Islands, lambda option: algorithm(option)),
    "none": NoExchange,
}

LEAST = {
    "rank": 1,
    "every": 1,
    "ranks": 1,
    "delay": 1,
    "bound": 1,
    "fragments": 1,
    "start": 0,
    "warmup": 0,
    "overlap": 0,
}
"""The least of each parameter that counts something; of bytes see tuning.given_chunk_bytes."""


def algorithm(option: Option) -> Algorithm:
    """Makes the algorithm that a plan's `exchange` names. Raises UserError for an unknown name or parameter, and for a
    value that a parameter cannot have."""
    name = option_name(option, "exchange")
    if name not in ALGORITHMS:
        raise UserError(
            f'plan.exchange = "{name}" is not implemented.{did_you_mean(name, list(ALGORITHMS))} '
            f"This version has: {', '.join(ALGORITHMS)}"
        )
    check_parameters("exchange", option, ALGORITHMS[name])
    given = option_parameters(option)
    try:
        made = ALGORITHMS[name](**given)
    except TypeError as error:
        raise UserError(f"plan.exchange = {option!r}: a parameter is of the wrong kind ({error})") from error
    for key in LEAST.keys() & given.keys():
        if type(given[key]) is not int or given[key] < LEAST[key]:
            raise UserError(
                f'plan.exchange: "{name}": {key} = {given[key]!r:.100}: give a whole number from {LEAST[key]} on'
            )
    return made
