"""Tensor parallelism: cuts the layers of a built module among the ranks along tp, by rules; the model file stays
single-device."""

from shoal.parallel.tensor.cut import CutLayers
from shoal.parallel.tensor.cuts import Cuts, cuts_of
from shoal.parallel.tensor.inside_experts import why_one_by_one
from shoal.parallel.tensor.logits import ShardedLogits
from shoal.parallel.tensor.pins import check_kinds, check_placements, names_blocks
from shoal.parallel.tensor.region import Region
from shoal.parallel.tensor.rules import Rules, check_rules, kind_of, rules_for
from shoal.parallel.tensor.slicing import cut_among

__all__ = [
    "CutLayers",
    "Cuts",
    "Region",
    "Rules",
    "ShardedLogits",
    "check_kinds",
    "check_placements",
    "check_rules",
    "cut_among",
    "cuts_of",
    "kind_of",
    "names_blocks",
    "rules_for",
    "why_one_by_one",
]
