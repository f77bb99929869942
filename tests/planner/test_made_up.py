"""What stands in for a while."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
import torch.nn.functional as F
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


SHAPE = (2, 8, 4, 4)
GIVES = {
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:], torch.ones(x.shape[-1], requires_grad=True)),
    "batch norm": lambda x: F.batch_norm(x, None, None, torch.ones(x.shape[1], requires_grad=True), training=True),
    "log-softmax": lambda x: F.log_softmax(x, -1),
    "log-sigmoid": F.logsigmoid,
    "glu": F.glu,
    "elu": F.elu,
    "softplus": F.softplus,
    "hard sigmoid": F.hardsigmoid,
    "hard swish": F.hardswish,
    "relu6": F.relu6,
    "roll": lambda x: x.roll((1,), (1,)),
    "reflection": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
}


def lying(shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """Numbers whose dims lie in memory in this order."""
    back = [order.index(dim) for dim in range(len(order))]
    return torch.randn([shape[dim] for dim in order]).permute(back)


def strides(function, order: Sequence[int], of_gradient: Sequence[int]) -> list[tuple[int, ...]]:
    """Those of what a function gives for an input that lies in one order, and of its gradient for one in another."""
    x = lying(SHAPE, order).requires_grad_()
    y = function(x)
    return [y.stride(), torch.autograd.grad(y, x, lying(y.shape, of_gradient))[0].stride()]


@pytest.mark.fast
@pytest.mark.parametrize("name", GIVES)
def test_results_lie_in_memory_as_real_ones_do(name):
    """A view of the one is a copy of the other: a step of Swin, whose head pools what its last norm gives with its
    channels moved to the front, was said to hold a gradient more."""
    for of_input, of_gradient in product(([0, 1, 2, 3], [0, 1, 3, 2], [0, 3, 1, 2], [0, 2, 3, 1]), repeat=2):
        real = strides(GIVES[name], of_input, of_gradient)
        with FakeTensorMode(), Values():
            assert strides(GIVES[name], of_input, of_gradient) == real
