"""Checks whether an algorithm goes with cut models, cut chunks (plan.zero), rounded masters and clipped elements."""

from __future__ import annotations

from shoal.errors import UserError
from shoal.exchange.algorithm import Algorithm
from shoal.plan import Option, option_name


def check_sharding(chosen: Algorithm, option: Option, stage: int, offloads: bool = False) -> None:
    """Raises UserError where `chosen` needs on each replica what ZeRO keeps on one, or what is offloaded."""
    kind = type(chosen)
    reason = None
    if chosen.trains_apart:
        reason = "its replicas train apart, so each needs all of its own weights and optimizer state"
    elif kind.update is not Algorithm.update:
        reason = "it updates every parameter on every replica itself"
    elif (stage >= 2 or offloads) and kind.holds is not Algorithm.holds:
        reason = "it works on the whole gradient of a step, which is reduced microbatch by microbatch"
    elif chosen.own_optimizers:
        reason = (
            "each replica's optimizer goes by its own gradients, so each needs all of its state; "
            'of = "gradients" combines gradients instead'
        )
    if reason is not None:
        plan = "plan.memory" if offloads else f"plan.zero = {stage}"
        raise UserError(f'plan.exchange = "{option_name(option, "exchange")}" does not go with {plan}: {reason}')


def check_cut_model(chosen: Algorithm, option: Option) -> None:
    """Raises UserError where `chosen` would give other results for a model that is cut among ranks (plan.tp)."""
    if chosen.of_whole_models is not None:
        raise UserError(
            f'plan.exchange = "{option_name(option, "exchange")}" does not go with a model that is cut (plan.tp): '
            f"{chosen.of_whole_models}"
        )


def check_shared_rows(chosen: Algorithm, option: Option, sharers: int) -> None:
    """Raises UserError where `chosen` does not go with ranks that share rows (plan.cp), or lets them drift apart."""
    if chosen.of_whole_rows is not None:
        raise UserError(
            f'plan.exchange = "{option_name(option, "exchange")}" does not go with plan.cp: {chosen.of_whole_rows}'
        )
    together = getattr(chosen, "ranks", 1)
    if chosen.trains_apart and together % sharers:
        raise UserError(
            f'plan.exchange = "{option_name(option, "exchange")}" lets ranks train apart that share each row '
            f'(plan.cp = {sharers}): take {{name = "islands", ranks = {sharers}}}, or one that keeps replicas equal'
        )


def check_masters(chosen: Algorithm, option: Option, keep: str) -> None:
    """Raises UserError where `chosen` exchanges the masters themselves, which `keep` rounds."""
    if chosen.trains_apart or chosen.own_optimizers:
        raise UserError(
            f'plan.exchange = "{option_name(option, "exchange")}" exchanges fp32 weights, which precision '
            f'master = "{keep}" does not keep'
        )


def check_clip_value(chosen: Algorithm, option: Option, value: float) -> None:
    """Raises UserError unless `value` is positive, and where `chosen` itself does the update that clips."""
    if not value > 0:
        raise UserError(f"clip_value = {value}: give a number above 0, or None for no clipping")
    if type(chosen).update is not Algorithm.update:
        raise UserError(
            f'plan.exchange = "{option_name(option, "exchange")}" updates by itself, without clip_value: use clip'
        )
