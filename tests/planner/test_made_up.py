"""What stands in for a while."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.planner.made_up import Values, patched


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


@pytest.mark.fast
def test_all_of_a_mask_is_true_however_that_is_asked():
    with FakeTensorMode(), Values():
        mask = torch.ones(3, 5, dtype=torch.bool)
        assert mask.all() and mask.sum() == mask.numel() and int(mask.sum()) == 15
        assert mask.sum() != 14


@pytest.mark.fast
def test_the_gradient_of_an_embedding_with_padding_has_rows_of_all_tokens():
    """A rehearsal of a model of transformers with a pad_token_id was refused, as one that goes on by values."""
    with FakeTensorMode(), Values():
        words = nn.Embedding(7, 4, padding_idx=0, sparse=True)
        words(torch.ones(2, 3, dtype=torch.int64)).square().sum().backward()
        assert words.weight.grad is not None and words.weight.grad._values().shape == (6, 4)
