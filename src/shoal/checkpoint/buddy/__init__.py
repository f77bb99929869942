"""State that only one rank has is kept in the memory of another one, its buddy, from which survivors go on."""

from shoal.checkpoint.buddy.buddy import Buddy, Offer
from shoal.checkpoint.buddy.replay import Make
from shoal.checkpoint.buddy.snapshot import Mine

__all__ = ["Buddy", "Make", "Mine", "Offer"]
