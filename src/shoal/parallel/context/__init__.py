"""Context parallel: the tokens of each row cut among the ranks along cp, which come together in attention alone."""

from shoal.parallel.context.context import Context
from shoal.parallel.context.parts import Parts

__all__ = ["Context", "Parts"]
