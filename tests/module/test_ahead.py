"""A model that was built before it is needed is the one that would be built then, and is given out once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.assembly.replan import _anew
from shoal.errors import UserError
from shoal.module.ahead import Ahead, build_ahead

pytestmark = pytest.mark.fast


class Counted:
    """A factory that knows how often it was called, and fails from the call `fails` on."""

    def __init__(self, fails: int = 99) -> None:
        self.calls, self._fails = 0, fails

    def __call__(self) -> nn.Module:
        self.calls += 1
        if self.calls >= self._fails:
            raise RuntimeError("no more")
        return nn.Linear(4, 3)


def test_what_was_prepared_is_taken_once_and_has_the_same_weights():
    factory = Counted()
    ahead = Ahead(factory)
    ahead.prepare(7)
    ahead.prepare(7)
    assert factory.calls == 1
    first, second = build_ahead(ahead, 7), build_ahead(ahead, 7)
    assert factory.calls == 2 and first.module is not second.module
    there = dict(first.module.named_parameters())
    for name, parameter in second.module.named_parameters():
        assert torch.equal(first.value(name, there[name]), second.value(name, parameter))


def test_another_seed_is_built_anew():
    factory = Counted()
    ahead = Ahead(factory)
    ahead.prepare(7)
    build_ahead(ahead, 8)
    assert factory.calls == 2


def test_a_factory_that_fails_raises_where_the_model_is_needed():
    ahead = Ahead(Counted(fails=1))
    ahead.prepare(0)
    with pytest.raises(RuntimeError, match="no more"):
        build_ahead(ahead, 0)


def test_modules_in_training_are_refused_whether_they_were_prepared_or_not():
    trained = nn.Linear(4, 3)
    ahead = Ahead(lambda: trained)
    ahead.prepare(0)
    with pytest.raises(UserError, match="modules that are in training"):
        build_ahead(_anew(ahead, trained), 0)
