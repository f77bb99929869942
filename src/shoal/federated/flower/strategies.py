"""Flower's strategies by the names of a job file, and its differential privacy around them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from shoal.errors import UserError, check_choice, check_names
from shoal.federated.flower.buffered import FedBuff
from shoal.federated.settings import Federated

from flwr.serverapp import strategy as flower  # isort: skip
from flwr.serverapp.strategy import Strategy  # isort: skip

NAMES = {
    "fedavg": flower.FedAvg,
    "fedavgm": flower.FedAvgM,
    "fedadam": flower.FedAdam,
    "fedadagrad": flower.FedAdagrad,
    "fedyogi": flower.FedYogi,
    "fedprox": flower.FedProx,
    "fedmedian": flower.FedMedian,
    "fedtrimmedavg": flower.FedTrimmedAvg,
    "krum": flower.Krum,
    "multikrum": flower.MultiKrum,
    "bulyan": flower.Bulyan,
    "qfedavg": flower.QFedAvg,
}
OPTIMIZERS = (flower.FedAvgM, flower.FedAdam, flower.FedAdagrad, flower.FedYogi)
"""Those that make an update of the mean movement, by an optimizer of the server."""
OURS = {
    "fedavgm": {"lr": "server_learning_rate", "momentum": "server_momentum"},
    "fedadam": {"lr": "eta", "beta1": "beta_1", "beta2": "beta_2", "tau": "tau"},
    "fedprox": {"mu": "proximal_mu"},
}
"""Parameters that Flower calls otherwise than `shoal.federated.strategies`."""
DEFAULTS: dict[str, dict[str, Any]] = {"fedavgm": {"server_momentum": 0.9}, "fedprox": {"proximal_mu": 0.1}}


def flower_strategy(settings: Federated, clients: int) -> Strategy:
    """Returns the strategy that `federated.strategy` names, for so many clients; with a buffer FedBuff around its
    mean. Raises UserError for unknown names and parameters."""
    option: str | Mapping[str, Any] = settings.strategy
    name = str(option if isinstance(option, str) else option.get("name"))
    given = {} if isinstance(option, str) else {key: value for key, value in option.items() if key != "name"}
    at_once = max(1, round(settings.fraction * clients))
    if settings.buffer:
        if name != "fedavg" or given.keys() - {"lr"}:
            raise UserError(f'federated.strategy = {option!r} with a buffer: Flower is given FedBuff: take "fedavg"')
        return FedBuff(settings.buffer, at_once, settings.most_stale, float(given.get("lr", 1.0)))
    check_choice(f"federated.strategy = {name!r} is none of Flower's:", name, NAMES)
    renamed = OURS.get(name, {})
    values = DEFAULTS.get(name, {}) | {renamed.get(key, key): value for key, value in given.items()}
    known = [key for key in inspect.signature(NAMES[name]).parameters if key not in _ROUNDS]
    check_names(f"federated.strategy {name!r} has no parameter", values, known)
    rounds = {"fraction_train": settings.fraction, "fraction_evaluate": 0.0}
    counts = {"min_train_nodes": at_once, "min_evaluate_nodes": 0, "min_available_nodes": at_once}
    try:
        return NAMES[name](**rounds, **counts, **values)
    except (TypeError, ValueError) as error:
        raise UserError(f"federated.strategy = {option!r}: {error}") from error


_ROUNDS = ("fraction_train", "fraction_evaluate", "min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
