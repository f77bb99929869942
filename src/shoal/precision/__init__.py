"""The numbers a run computes in: named precisions, their formats, loss scaling, how masters are kept."""

from shoal.precision.named import Precision, cast_at_the_border, cast_floating, precision, set_products
from shoal.precision.scaling import LossScale, Scaling

__all__ = ["LossScale", "Precision", "Scaling", "cast_at_the_border", "cast_floating", "precision", "set_products"]
