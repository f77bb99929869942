"""Tensors and numbers that a module keeps as plain attributes and changes in its forward."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from shoal import Engine, Plan, UserError
from shoal.comm.simulation import simulate_world
from shoal.models import regression
from shoal.module.attributes import AT_ONCE, number_of
from tests.exchange import teacher

WIDTH = 24


class Keeps(nn.Module):
    """Centres its first layer's result by an average of what it was; `way`: how the average is kept."""

    seen = 0

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(teacher.INPUTS, WIDTH), nn.Linear(WIDTH, teacher.OUTPUTS)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.way, self.average = way, torch.zeros(WIDTH)
        self.last, self.table = torch.zeros(WIDTH), torch.arange(4.0)
        self.averages: list[torch.Tensor] = [torch.zeros(WIDTH)]
        self.by_name: dict[str, torch.Tensor] = {}
        self.later: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inward(x)
        for block in self.blocks:
            h = h + block(h).tanh()
        new = h.detach().mean(0)
        if self.way == "bound":
            self.average = 0.9 * self.average + 0.1 * new
        elif self.way == "in place":
            self.average.mul_(0.9).add_(new, alpha=0.1)
        elif self.way == "in a list":
            h = h - self.averages[0]
            self.averages = [0.9 * self.averages[0] + 0.1 * new]
        elif self.way == "in a dict":
            h = h - self.by_name.get("average", 0.0)
            self.by_name["average"] = new
        elif self.way == "set later":
            h = h if self.later is None else h - self.later
            self.later = new
        elif self.way == "number":
            self.seen += 1
            h = h / (1 + self.seen)
        else:  # for who looks at it; and a table that is made as it is needed
            self.last = new
            if len(self.table) < WIDTH:
                self.table = torch.cat([self.table, self.table.new_zeros(WIDTH - 4)])
            h = h + self.table
        return self.outward(h - self.average)


def train(world, way: str, **plan) -> list[float]:
    torch.set_num_threads(1)
    optimizer, values = partial(torch.optim.SGD, lr=0.05), Plan(**(plan or {"dp": world.size}))
    running = Engine(
        partial(Keeps, way), regression, optimizer, values, global_batch=16, microbatch=4, dropout="fused", world=world
    )
    try:
        return [running.step(batch).loss for batch in running.batches(teacher.data(), steps=3)]
    finally:
        running.close()


WAYS = {
    "bound": "average",
    "in place": "average",
    "in a list": r"averages\[0\]",
    "in a dict": r"by_name\[0\]",
    "set later": "later",
}


@pytest.mark.parametrize("way", WAYS)
def test_one_that_goes_from_microbatch_to_microbatch_is_refused(way):
    """Replicas had other losses than one process, and said nothing."""
    message = rf"depends on {WAYS[way]}, a tensor that its module keeps.*register_buffer"
    with pytest.raises(UserError, match=message):
        simulate_world(2, train, way)


def test_one_that_is_for_those_who_look_and_one_that_is_made_as_needed_are_not():
    (one,), two = simulate_world(1, train, "looked at"), simulate_world(2, train, "looked at")
    assert two[0] == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("way", [*WAYS, "number"])
def test_a_forward_that_is_tried_out_for_stages_leaves_them(way):
    """It went into the average, and was counted."""
    (one,) = simulate_world(1, train, way)
    for losses in simulate_world(2, partial(train, pp=2), way):
        assert losses == pytest.approx(one, rel=1e-5)


class Hides(nn.Module):
    """Follows its first layer by one that is registered nowhere, which stays as it is or not."""

    def __init__(self, follows: bool) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(teacher.INPUTS, WIDTH), nn.Linear(WIDTH, teacher.OUTPUTS)
        self.hidden, self.follows = [copy.deepcopy(self.inward)], follows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.follows and self.training:
            with torch.no_grad():
                self.hidden[0].weight.lerp_(self.inward.weight, 0.5)
        return self.outward((self.inward(x) + self.hidden[0](x).detach()).tanh())


def with_hidden(world, follows: bool) -> list[float]:
    torch.set_num_threads(1)
    optimizer, plan = partial(torch.optim.SGD, lr=0.05), Plan(dp=world.size)
    running = Engine(
        partial(Hides, follows),
        regression,
        optimizer,
        plan,
        global_batch=16,
        microbatch=4,
        dropout="fused",
        world=world,
    )
    try:
        return [running.step(batch).loss for batch in running.batches(teacher.data(), steps=3)]
    finally:
        running.close()


def test_a_module_that_is_registered_nowhere_stays_as_it_is():
    (one,), two = simulate_world(1, with_hidden, False), simulate_world(2, with_hidden, False)
    assert two[0] == pytest.approx(one, rel=1e-5)
    with pytest.raises(UserError, match=r"depends on hidden.weight, a tensor"):
        simulate_world(2, with_hidden, True)


class Centres(nn.Module):
    """A block that centres its result by an average, and by what it saw last, and weighs it by how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.average, self.seen = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH), 0
        self.last: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        h = self.layer(x).tanh()
        self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
        h = h - sum(self.last)
        self.last = [h.detach().mean(0)]
        return x + (h - self.average).square() / self.seen


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(teacher.INPUTS, WIDTH), nn.Linear(WIDTH, teacher.OUTPUTS)
        self.blocks = nn.ModuleList(Centres() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inward(x)
        for block in self.blocks:
            h = block(h)
        return self.outward(h)


def in_blocks(world, recompute: str) -> list[float]:
    torch.set_num_threads(1)
    optimizer, plan = partial(torch.optim.SGD, lr=0.05), Plan(recompute=recompute)
    running = Engine(Centred, regression, optimizer, plan, global_batch=16, microbatch=4, world=world)
    try:
        return [running.step(batch).loss for batch in running.batches(teacher.data(), steps=3)]
    finally:
        running.close()


def test_a_block_that_is_computed_again_finds_them_as_before():
    """It went on with those of the first forward, and gradients were others."""
    assert simulate_world(1, in_blocks, "full") == simulate_world(1, in_blocks, "none")


FORMATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64]
INTEGERS = [torch.int64, torch.int32, torch.uint16, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", [*FORMATS, *INTEGERS], ids=str)
def test_numbers_tell_one_value_and_all_values_that_are_others(dtype):
    """torch has no hash and no sum of some formats."""
    ones = torch.ones(2 * AT_ONCE + 6).to(dtype)
    raw = ones.view(torch.uint8)
    seen = {tuple(number_of(ones).tolist())}
    assert tuple(number_of(ones.clone()).tolist()) in seen
    raw[-ones.itemsize] ^= 1  # the last of its values
    seen.add(tuple(number_of(ones).tolist()))
    seen |= {tuple(number_of(torch.full((512,), value).to(dtype)).tolist()) for value in (0.0, 1.0)}
    assert len(seen) == 4
