"""Ranks, groups and what they say to each other."""

from shoal.comm.backend import register
from shoal.comm.collectives import Group
from shoal.comm.lane import Lane
from shoal.comm.ledger import Ledger, Span
from shoal.comm.links import Link
from shoal.comm.world import World

__all__ = ["Group", "Lane", "Ledger", "Link", "Span", "World"]

register()
