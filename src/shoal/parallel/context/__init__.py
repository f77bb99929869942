"""Context parallelism: the tokens of each row are cut among the ranks along cp, and attention alone connects them."""

from shoal.parallel.context.context import Context
from shoal.parallel.context.parts import Parts

__all__ = ["Context", "Parts"]
