"""State that only one rank has is kept in the memory of another one, its buddy, from which survivors go on."""

from shoal.checkpoint.buddy.buddy import Buddy, Offer
from shoal.checkpoint.buddy.cost import FOR_BUDDY, steps_between
from shoal.checkpoint.buddy.replay import Make
from shoal.checkpoint.buddy.snapshot import Mine

__all__ = ["FOR_BUDDY", "Buddy", "Make", "Mine", "Offer", "steps_between"]
