"""Why a member has no place in the generation."""

from __future__ import annotations

from shoal.elastic.membership import RUNNING, Membership
from shoal.elastic.messages import Note
from shoal.elastic.peers import Peers


def why_it_waits(machine: Membership, name: str) -> str:
    """Says what the member waits for, "" where it waits for nothing but the next generation."""
    if (left := machine.roster.backoff.left(name, machine.now)) > 0:
        return f"{name} is put aside for another {left:.0f} s"
    if (ranks := machine.roster.unfit_with(machine.generation, name, machine.now)) and machine.phase == RUNNING:
        new = name in machine.named and machine.roster.ready.get(name)
        who = "those that are new there wait" if new else "it waits"
        return f"{ranks} rank(s) with those of {name} could not go on: {who} until another one comes or leaves"
    if len(machine.roster.members) < machine.limits.minimum:
        return f"{len(machine.roster.members)} of at least {machine.limits.minimum} nodes have come"
    if name not in machine.named and machine.phase == RUNNING and len(machine.named) >= machine.limits.maximum:
        return f"{machine.limits.maximum} node(s) train, which is the most: {name} is kept in reserve"
    return ""


def tell_who_waits(machine: Membership, peers: Peers) -> None:
    """Tells the members with whose ranks, or further ones, a new generation could not go on that they wait for that."""
    for name in sorted(machine.roster.members.keys()):
        if machine.roster.unfit_with(machine.generation, name, machine.now) and (why := why_it_waits(machine, name)):
            peers.send(name, Note(why))
