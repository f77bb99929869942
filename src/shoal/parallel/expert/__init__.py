"""Expert parallelism: the experts of a mixture are on different ranks, and tokens travel to them and back."""

from shoal.parallel.expert.counts import ExpertCounts
from shoal.parallel.expert.dispatch import Dispatch, Dispatched
from shoal.parallel.expert.mixtures import mixtures
from shoal.parallel.expert.spread import Spread

__all__ = ["Dispatch", "Dispatched", "ExpertCounts", "Spread", "mixtures"]
