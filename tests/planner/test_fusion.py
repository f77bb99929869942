"""What a compiler would make of a part: kernels and bytes of what is no product, against counts by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.errors import UserError
from shoal.models import build
from shoal.plan import Plan
from shoal.planner import Subject
from shoal.planner.compiled import keeps_inside, why_not_compiled
from shoal.planner.counts import Counts
from shoal.precision import precision

B = 4 * 8 * 16
"""Bytes of a matrix [8, 16] in fp32; of a square one of 16 two times as many."""


def counted(run: Callable[..., object], *shapes: tuple[int, ...]) -> tuple[float, float]:
    """Bytes and kernels of what `run` does with tensors of these shapes, which come from outside."""
    with FakeTensorMode():
        given = [torch.empty(*shape) for shape in shapes]
        with Counts() as counts:
            kept = run(*given)
            del kept
    return counts.all[-2:]  # type: ignore[return-value]


ROW, SQUARE = (8, 16), (16, 16)
CASES: dict[str, tuple[Callable[..., object], list[tuple[int, ...]], int, int]] = {
    "a chain is read once and written once": (lambda x: (x.exp() + 1).tanh(), [ROW], 2 * B, 1),
    "what two operations of a kernel read": (lambda x, y: (x * y).exp() + x, [ROW, ROW], 3 * B, 1),
    "operations that have nothing to do with each other": (lambda x, y: (x.exp(), y.exp()), [ROW, ROW], 4 * B, 2),
    "two that come together": (lambda x, y: x.exp() * y.exp(), [ROW, ROW], 3 * B, 1),
    "a reduction is of the kernel": (lambda x: x - x.mean(-1, keepdim=True), [ROW], 2 * B, 1),
    "a product parts kernels": (lambda x, w: (x.exp() @ w).tanh(), [ROW, SQUARE], 4 * B, 3),
    "what waits across a product": (lambda x, w: (y := x.exp()) + y @ w, [ROW, SQUARE], 2 * B + 3 * B, 3),
    "views cost nothing": (lambda x: x.exp().view(16, 8).t().tanh(), [ROW], 2 * B, 1),
    "pieces of all sizes cost nothing": (lambda x: [each.tanh() for each in x.split([4, 12], 1)], [ROW], 2 * B, 2),
    "in place": (lambda x, y: x.exp().add_(y), [ROW, ROW], 3 * B, 1),
    "one after the other in one place": (lambda x, w: [(x @ w).tanh() for _ in range(9)], [ROW, SQUARE], 9 * 2 * B, 18),
    "products alone": (lambda x, w: x @ w, [ROW, SQUARE], 0, 1),
    "a broadcast tensor is as large as its storage": (lambda x, y: x + y.expand(8, 16), [ROW, (1, 16)], 2 * B + 64, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_by_hand(name: str) -> None:
    run, shapes, nbytes, kernels = CASES[name]
    assert counted(run, *shapes) == (nbytes, kernels)


class Choosing(nn.Module):
    """Its forward asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        print("a block that a compiler has to leave")
        return self.inner(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Choosing() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_block_that_is_not_one_graph_is_named() -> None:
    sample = {"x": torch.zeros(4)}
    subject = Subject(Model, lambda module, batch: (module(batch["x"]).sum(), 4), sample, 1, precision("fp32"), Plan())
    assert "Choosing is not one graph" in why_not_compiled(subject)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_blocks_of_a_gpt_are_graphs(dropout: float) -> None:
    """They keep results of operations as well, but where they draw, at which keyed dropout breaks a graph."""
    sizes = {"layers": 2, "d_model": 16, "heads": 2, "vocab_size": 64, "sequence": 8}
    made = build({"name": "gpt", **sizes, "dropout": dropout})
    row = {key: torch.zeros(8, dtype=torch.int64) for key in ("input_ids", "labels")}
    subject = Subject(made.factory, made.loss, row, 1, precision("bf16"), Plan())
    assert why_not_compiled(subject) == ""
    assert keeps_inside(subject, {"recompute": "full"}) == (not dropout)
    assert keeps_inside(subject, {"recompute": "selective"}) == (not dropout), "they may stay as they are written"
    if dropout:
        with pytest.raises(UserError, match=r'it draws numbers .*: take "full", or compile = false'):
            keeps_inside(subject, {"recompute": "selective", "compile": True})


def test_blocks_that_count_their_calls_keep_no_results_of_operations() -> None:
    sample = {"x": torch.zeros(4)}
    subject = Subject(Model, lambda module, batch: (module(batch["x"]).sum(), 4), sample, 1, precision("fp32"), Plan())
    assert not keeps_inside(subject, {})
