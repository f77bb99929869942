"""What stands in for a while."""

from __future__ import annotations

import pytest

from shoal.planner.made_up import patched


class Inherited:
    def both(self) -> str:
        return "of the base"


class Owner(Inherited):
    own = "own"


@pytest.mark.fast
@pytest.mark.parametrize(("name", "was"), [("both", Inherited.both), ("own", "own")])
def test_the_last_who_leaves_gives_back_what_was_there(name, was):
    first, second = patched(Owner, name, "for a while"), patched(Owner, name, "for a while")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert getattr(Owner, name) == "for a while"
    second.__exit__(None, None, None)
    assert getattr(Owner, name) is was and ("both" in vars(Owner)) is False
