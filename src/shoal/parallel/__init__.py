"""Where each parameter lives: boxes of global tensors, and the layout that stands beside a parameter."""

from shoal.parallel.layout import Box, Layout, Part, boxes_of_range, intersect

__all__ = ["Box", "Layout", "Part", "boxes_of_range", "intersect"]
