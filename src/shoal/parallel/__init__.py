"""The layout of parameters over ranks: boxes of global tensors, and the boxes of each parameter that a rank holds."""

from shoal.parallel.layout import Box, Layout, Part, boxes_of_range, intersect

__all__ = ["Box", "Layout", "Part", "boxes_of_range", "intersect"]
