"""A vote of replicas on what each of them holds: a bit that has flipped in the memory of one is found, and the rank.

A rank hashes, on the device, the tensors that other ranks hold with the same bits. All ranks tell each other the
hashes, one number for each kind of tensor, and judge alike: of three or more, a majority is right; of two that differ,
nobody knows which.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from shoal.comm import Group
from shoal.comm.digest import combined
from shoal.errors import CorruptionError, LaunchError, UserError
from shoal.exchange import Algorithm
from shoal.plan import Plan


def check_verify(plan: Plan, exchange: Algorithm, flushes: bool) -> None:
    """Raises UserError where replicas need not hold the same between steps."""
    if exchange.trains_apart or exchange.own_optimizers:
        raise UserError(
            f"under plan.exchange = {plan.exchange!r} replicas differ on purpose, so they cannot be compared: leave "
            "out run.verify_every (engine.verify), or take an exchange that keeps them equal"
        )
    if not flushes:
        raise UserError(
            f"under plan.schedule = {plan.schedule!r} updates are always under way, so replicas cannot be compared: "
            "leave out run.verify_every (engine.verify), or take a schedule with a flush"
        )


@dataclass(frozen=True)
class Held:
    """A tensor of this rank.

    what: its kind, for messages: "weights".
    replicas: the ranks that hold the same, or None where this rank alone has it.
    """

    what: str
    tensor: Tensor
    replicas: Group | None


@dataclass(frozen=True)
class Vote:
    """A vote in which all agreed. `compared`, `alone`: bytes here that were compared, and those without a replica, by
    kind."""

    compared: dict[str, int]
    alone: dict[str, int]


def vote(held: Sequence[Held], everyone: Group, step: int) -> Vote:
    """Has replicas compare what they hold after `step` steps. A collective call of `everyone`.

    Raises CorruptionError, on all ranks, where they differ: it says who is wrong, if that can be known.
    """
    compared: dict[str, int] = defaultdict(int)
    alone: dict[str, int] = defaultdict(int)
    groups: dict[str, list[Tensor]] = defaultdict(list)
    for each in held:
        if each.replicas is None or each.replicas.size == 1:
            alone[each.what] += each.tensor.nbytes
        else:
            compared[each.what] += each.tensor.nbytes
            groups[f"{each.what}/{each.replicas.ranks[0]}/{each.replicas.size}"].append(each.tensor)
    mine = {key: f"{combined(tensors):x}" for key, tensors in groups.items()}
    told = everyone.all_gather_object(mine)
    wrong, tied = judge(told)
    if wrong or tied:
        error = _error(wrong, tied, everyone, step)
        with suppress(LaunchError):  # a rank that is wrong ends now: all are to know by then
            everyone.barrier()
        raise error
    return Vote(dict(compared), dict(alone))


def judge(told: Sequence[Mapping[str, str]]) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Judges the hashes of all ranks, by the name of what each group of replicas holds.

    Returns the places of the ranks that are outvoted, and of those of which it is not known who is right, each with the
    kinds of tensors in which they differ.
    """
    wrong: dict[int, list[str]] = defaultdict(list)
    tied: dict[int, list[str]] = defaultdict(list)
    for key in sorted({key for each in told for key in each}):
        votes = {place: each[key] for place, each in enumerate(told) if key in each}
        most, number = Counter(votes.values()).most_common(1)[0]
        majority = 2 * number > len(votes)
        for place, hashed in votes.items():
            if number < len(votes) and (hashed != most or not majority):
                (wrong if majority else tied)[place].append(key.partition("/")[0])
    return dict(wrong), dict(tied)


def _error(
    wrong: Mapping[int, list[str]], tied: Mapping[int, list[str]], everyone: Group, step: int
) -> CorruptionError:
    said = [
        f"rank {everyone.ranks[place]} holds other bits ({', '.join(kinds)}) than most ranks with the same state"
        for place, kinds in sorted(wrong.items())
    ]
    if tied:
        ranks, kinds = (", ".join(map(str, each)) for each in ([everyone.ranks[p] for p in sorted(tied)], _all(tied)))
        said.append(f"ranks {ranks} hold different bits ({kinds}), and there is no majority that says which are right")
    here = everyone.rank in wrong or everyone.rank in tied
    return CorruptionError(
        f"after step {step} {'; '.join(said)}. Memory, a device or a link has changed what it holds: go on from the "
        "newest checkpoint, without that host if it happens again",
        here,
    )


def _all(kinds: Mapping[int, list[str]]) -> list[str]:
    return sorted({kind for each in kinds.values() for kind in each})
