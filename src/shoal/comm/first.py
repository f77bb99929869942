"""What the first rank finds out for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.comm.collectives import Group
from shoal.errors import UserError


def from_first(group: Group, find: Callable[[], Any], said: str = "") -> Any:
    """Returns on all ranks what `find` returns on the first one of `group`, which alone calls it: a value of the types
    that `wire` knows. A collective call. What `find` raises is a UserError on all ranks, with `said` before it."""
    found: tuple[Any, str] = None, ""
    if group.rank == 0:
        try:
            found = find(), ""
        except UserError as error:
            found = None, str(error)
        except Exception as error:
            found = None, f"{type(error).__name__}: {error}"
    value, why = group.broadcast_object(found)
    if why:
        raise UserError(said + why)
    return value
