"""The algorithms by the names that a plan's `exchange` takes; some are presets of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

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
    "ranks_per_host": 1,
    "delay": 1,
    "bound": 1,
    "fragments": 1,
    "start": 0,
    "warmup": 0,
    "overlap": 0,
    "chunk_bytes": 1,
}
"""The least of each parameter that counts something."""
OPEN = ("ranks_per_host", "chunk_bytes")
"""Those that None leaves to Shoal."""
NUMBERS = {"guard": "a number from 0 on", "interval_ms": "a number from 0 on", "min_compression": "a number above 0"}
"""What the parameters are that are other numbers; those that are not here are checked by their algorithm."""


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
    for key, value in given.items():
        if (wanted := _wanted(key, value)) and not (value is None and key in OPEN):
            raise UserError(f'plan.exchange: "{name}": {key} = {value!r:.100}: give {wanted}')
    try:
        return ALGORITHMS[name](**given)
    except TypeError as error:
        raise UserError(f"plan.exchange = {option!r}: a parameter is of the wrong kind ({error})") from error


def _wanted(key: str, value: Any) -> str:
    """What a parameter has to be that is `value`; "" where it is so, and for one that its algorithm checks."""
    if key in LEAST:
        is_count = type(value) is int and LEAST[key] <= value < 2**63
        return "" if is_count else f"a whole number from {LEAST[key]} on"
    if key in NUMBERS:
        is_number = type(value) in (int, float) and math.isfinite(value)
        return "" if is_number and (value > 0 or (value == 0 and "from 0" in NUMBERS[key])) else NUMBERS[key]
    return "true or false" if key == "error_feedback" and type(value) is not bool else ""
