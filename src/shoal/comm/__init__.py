"""The ranks of a job, groups among them, and the transports that carry their collectives."""

from shoal.comm.backend import register
from shoal.comm.collectives import Group
from shoal.comm.lane import Lane
from shoal.comm.ledger import Ledger, Span
from shoal.comm.links import Link, link_of
from shoal.comm.reaches import Reach, Reaches, measure_reaches
from shoal.comm.world import Seat, World

__all__ = [
    "Group",
    "Lane",
    "Ledger",
    "Link",
    "Reach",
    "Reaches",
    "Seat",
    "Span",
    "World",
    "link_of",
    "measure_reaches",
]

register()
