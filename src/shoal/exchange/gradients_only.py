"""The algorithms for loops that are not Shoal's: their work is done when a gradient has been reduced."""

from __future__ import annotations

from shoal.errors import UserError
from shoal.exchange.algorithm import Algorithm
from shoal.exchange.named import ALGORITHMS, algorithm
from shoal.plan import Option, option_name


def gradient_algorithm(option: Option | Algorithm, where: str) -> Algorithm:
    """Returns the algorithm of `option`. Raises UserError if a hook on gradients of `where` cannot carry it."""
    chosen = option if isinstance(option, Algorithm) else algorithm(option)
    if (reason := beyond_gradients(chosen)) is not None:
        raise refusal(
            option, where, reason, [name for name, make in ALGORITHMS.items() if beyond_gradients(make()) is None]
        )
    return chosen


def beyond_gradients(chosen: Algorithm) -> str | None:
    """Returns why `chosen` needs more of a step than its gradients; None if `reduce` is all of it."""
    kind = type(chosen)
    if chosen.trains_apart:
        return "its replicas train apart and exchange weights, which the hook never sees"
    if chosen.own_optimizers:
        return (
            "each replica takes a step of its optimizer before they meet, which the hook never sees "
            '(of = "gradients" does not)'
        )
    if chosen.updates_itself:
        return "it takes the place of the optimizer's step"
    if kind.exchanged is not Algorithm.exchanged or kind.end is not Algorithm.end:
        return "it works on after the backward pass"
    return None


def refusal(option: Option | Algorithm, where: str, reason: str, instead: list[str]) -> UserError:
    """Makes the error for an algorithm that `where` cannot have."""
    name = type(option).__name__ if isinstance(option, Algorithm) else option_name(option, "exchange")
    return UserError(
        f'"{name}" cannot serve {where}: {reason}. Take one of {", ".join(instead)}, or train with shoal.Engine'
    )
