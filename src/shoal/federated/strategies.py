"""Strategies by name: what the server does with the mean movement of a round, and what clients add to their loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from shoal.errors import ArgumentError, UserError, check_choice, check_names
from shoal.optim.outer import Outer, OuterAdam, OuterSGD


@dataclass(frozen=True)
class Strategy:
    """`outer`: the server's update. `mu`: clients add mu / 2 |w - w0|^2 to their loss, with w0 as they began."""

    outer: Outer
    mu: float = 0.0


@dataclass(frozen=True)
class Named:
    """A strategy's outer optimizer, its parameters that may be given, and the default of `mu`; None where it has
    none."""

    make: Callable[..., Outer]
    parameters: tuple[str, ...]
    mu: float | None = None


STRATEGIES = {
    "fedavg": Named(OuterSGD, ("lr",)),
    "fedavgm": Named(partial(OuterSGD, momentum=0.9), ("lr", "momentum", "nesterov")),
    "fedadam": Named(OuterAdam, tuple(each.name for each in fields(OuterAdam))),
    "fedprox": Named(OuterSGD, ("lr", "mu"), mu=0.1),
}
"""FedAvg (https://arxiv.org/abs/1602.05629), FedAvgM (https://arxiv.org/abs/1909.06335), FedAdam
(https://arxiv.org/abs/2003.00295), FedProx (https://arxiv.org/abs/1812.06127)."""

OF_FLOWER = ("fedadagrad", "fedyogi", "fedmedian", "fedtrimmedavg", "krum", "multikrum", "bulyan", "qfedavg")
"""Strategies of a job file that only Flower has (federated/flower/strategies)."""


def strategy_named(option: str | Mapping[str, Any]) -> Strategy:
    """Returns the strategy of `federated.strategy`: a name, or a table with its parameters. Raises UserError."""
    name = option if isinstance(option, str) else option.get("name")
    if name in OF_FLOWER:
        raise UserError(
            f"federated.strategy = {name!r} is Flower's: `shoal fed sim --flower` has it, with pip install "
            f'"shoal[fed]"; without Flower there are {", ".join(STRATEGIES)}'
        )
    check_choice(f"federated.strategy = {name!r} is not one of", name, STRATEGIES)
    named = STRATEGIES[str(name)]
    given = {} if isinstance(option, str) else {key: value for key, value in option.items() if key != "name"}
    check_names(f"federated.strategy {name!r} has no parameter", given, named.parameters)
    for key, value in given.items():
        fitting, wanted = ((bool,), "true or false") if key == "nesterov" else ((int, float), "a number")
        if type(value) not in fitting:
            raise UserError(f"federated.strategy.{key} = {value!r}: give {wanted}")
    mu = given.pop("mu", named.mu or 0.0)
    if mu < 0:
        raise UserError(f"federated.strategy.mu = {mu}: give 0 or more")
    try:
        return Strategy(named.make(**given), mu)
    except ArgumentError as error:
        raise UserError(f"federated.strategy.{error}") from error
