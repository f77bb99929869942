"""The numbers a run computes in: named precisions, their formats, loss scaling, how masters are kept."""

from shoal.precision.named import Precision, cast_floating, is_floating, precision, set_products
from shoal.precision.scaling import LossScale, Scaling

__all__ = ["LossScale", "Precision", "Scaling", "cast_floating", "is_floating", "precision", "set_products"]
