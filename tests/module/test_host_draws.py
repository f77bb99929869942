"""Forwards that draw from numpy and Python, as SpecAugment and LayerDrop do: ranks of one row draw alike, a second
forward draws what the first did, and what others draw is none of theirs."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from shoal import Engine, Plan
from shoal.models import regression
from shoal.module.random import host_draws, host_state
from tests.exchange import teacher
from tests.pool import reference, run_ranks

MEANWHILE: list[Callable[[], object]] = []
"""What others do in the middle of each forward."""


class _Layer(nn.Module):
    """Weighs what it adds by draws."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(teacher.INPUTS, 16), nn.Linear(16, teacher.INPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(x)))
        return x + y * random.random() * np.random.rand()


class Augmented(nn.Module):
    """Masks features as numpy draws, in evaluations too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(2))
        self.outward = nn.Linear(teacher.INPUTS, teacher.OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.from_numpy((np.random.rand(teacher.INPUTS) > 0.3).astype(np.float32))
        for layer in self.layers:
            for each in MEANWHILE:
                each()
            x = layer(x)
        return self.outward(x)


def trained(world: Any, plan: dict[str, Any], **more: Any) -> list[float]:
    """Losses of steps and of an evaluation."""
    running = Engine(
        Augmented, regression, teacher.SGD, Plan(**plan), global_batch=16, microbatch=8, world=world, **more
    )
    try:
        losses = [running.step(batch).loss for batch in running.batches(teacher.data(), steps=3)]
        return [*losses, running.evaluate(teacher.data()).loss]
    finally:
        running.close()


def standing() -> Any:
    key, place = np.random.get_state()[1:3]
    return random.getstate(), key.tolist(), place


@pytest.mark.parametrize("plan", [{"tp": 2}, {"dp": 2}, {"tp": 2, "recompute": "full"}], ids=str)
def test_ranks_that_share_rows_draw_alike(plan):
    whole = reference(trained, 1, {})[0]
    for losses in run_ranks(trained, 2, plan):
        assert losses == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("dropout", ["keyed", "fused"])
@pytest.mark.parametrize("option", ["full", "selective", {"name": "blocks", "which": [1]}], ids=str)
def test_a_second_forward_draws_what_the_first_did(option, dropout):
    plain = trained(None, {}, dropout=dropout)
    assert trained(None, {"recompute": option}, dropout=dropout) == plain


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_compiled_block_draws_as_one_that_is_not(recompute):
    plan = {"compile": "aot_eager", "recompute": recompute}
    assert trained(None, plan) == pytest.approx(trained(None, {}), rel=1e-5)


def test_the_generators_go_on_as_if_no_forward_had_drawn():
    states = standing()
    first = trained(None, {})
    assert standing() == states
    random.random(), np.random.rand()
    assert trained(None, {}) == first, "whatever they had drawn before"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_threads_beside_forwards_draw_from_the_global_generators_in_order(recompute):
    plain, found = trained(None, {"recompute": recompute}), list[Any]()

    def draw() -> tuple[float, float, int]:
        return random.random(), np.random.rand(), int(np.random.permutation(100)[0])

    random.seed(5)
    np.random.seed(6)
    with ThreadPoolExecutor(1) as loader:
        MEANWHILE.append(lambda: found.append(loader.submit(draw).result()))
        try:
            assert trained(None, {"recompute": recompute}) == plain
        finally:
            MEANWHILE.clear()
    random.seed(5)
    np.random.seed(6)
    assert len(found) >= 3 * 2 * 2 and found == [draw() for _ in found]


def test_a_loop_of_ones_own_draws_by_the_step_too():
    losses = []
    for _ in range(2):
        running = Engine(Augmented, regression, teacher.SGD, Plan(), global_batch=16)
        loop, row = running.loop(), teacher.data()[0]
        states = standing()
        running.module.train()
        output = loop(row["inputs"][None])
        assert standing() == states
        losses.append(output.tolist())
        running.close()
        np.random.rand()
    assert losses[0] == losses[1]


def test_recompute_outside_of_a_step_repeats_the_draws_of_the_global_generators():
    gradients = []
    for recompute in ("none", "full"):
        running = Engine(Augmented, regression, teacher.SGD, Plan(recompute=recompute), global_batch=16)
        random.seed(1)
        np.random.seed(2)
        x = torch.ones(1, teacher.INPUTS, requires_grad=True)
        running.module(x).sum().backward()
        wanted = random.Random(1)
        assert random.random() == [wanted.random() for _ in range(3)][-1], "two layers have drawn one number each"
        gradients.append(x.grad)
        running.close()
    assert torch.equal(*gradients)


@pytest.mark.fast
def test_contexts_inside_one_another():
    wanted, inner = random.Random(1), np.random.RandomState(2)
    with host_draws(1):
        assert random.random() == wanted.random()
        with host_draws(2):
            assert np.random.rand() == inner.rand() and random.random() == random.Random(2).random()
            with host_draws(1):
                assert random.random() == random.Random(1).random()
            assert np.random.rand() == inner.rand()
        assert random.uniform(0, 2) == wanted.uniform(0, 2)


@pytest.mark.fast
def test_all_functions_of_the_modules_give_way():
    states, before = standing(), (dict(vars(random)), dict(vars(np.random)))
    wanted, numbers = random.Random(3), np.random.RandomState(4)
    with host_draws(0):
        random.seed(3)
        np.random.seed(4)
        assert random.gauss(0, 1) == wanted.gauss(0, 1) and random.choice("abcdef") == wanted.choice("abcdef")
        assert random.getstate() == wanted.getstate()
        assert np.random.sample() == numbers.random_sample() and np.random.ranf() == numbers.random_sample()
        assert np.array_equal(np.random.choice(9, 3, replace=False), numbers.choice(9, 3, replace=False))
        assert np.random.get_state()[2] == numbers.get_state()[2]
    assert standing() == states
    assert (dict(vars(random)), dict(vars(np.random))) == before, "the functions stand as they did"


@pytest.mark.fast
def test_a_state_is_repeated_in_another_thread():
    def draws() -> Any:
        return random.random(), np.random.rand()

    def repeated() -> Any:
        with host_draws(state):
            return draws()

    for others in (0, 2):  # a state may be from before the first draw
        with host_draws(7):
            for _ in range(others):
                draws()
            state = host_state()
            found = draws()
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(repeated).result() == found
        assert repeated() == found, "more than once"


@pytest.mark.fast
def test_a_thread_that_runs_a_backward_draws_from_the_only_generators_that_are_open():
    """As that of autograd for a GPU does, in which hooks are called; here another thread begins the backward."""
    found: list[float] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: found.append(random.random()))

    def backward() -> None:
        x.sum().backward()

    with ThreadPoolExecutor(1) as thread:
        with host_draws(7):
            thread.submit(backward).result()
        states = standing()
        thread.submit(backward).result()
    assert found[0] == random.Random(7).random() and standing() != states


@pytest.mark.fast
def test_threads_in_contexts_of_their_own_disturb_neither():
    both, found = threading.Barrier(2), dict[int, list[float]]()

    def rank(seed: int) -> None:
        with host_draws(seed):
            both.wait(10)
            found[seed] = [random.random() + np.random.rand() for _ in range(200)]
            both.wait(10)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(rank, [1, 2]))
    for seed, values in found.items():
        wanted, numbers = random.Random(seed), np.random.RandomState(seed)
        assert values == [wanted.random() + numbers.rand() for _ in range(200)]


@pytest.mark.fast
def test_functions_that_somebody_else_has_replaced_or_kept():
    with mock.patch("random.random", lambda: 0.5):
        with host_draws(1):
            assert random.random() == 0.5
        assert random.random() == 0.5
    with host_draws(1):
        kept = random.random, np.random.rand

        class Taken:
            draw = random.random

    states = standing()
    expected = [random.random(), np.random.rand(), random.random()]
    random.setstate(states[0])
    np.random.set_state(("MT19937", np.array(states[1], dtype=np.uint32), states[2]))
    assert [kept[0](), kept[1](), Taken().draw()] == expected, "outside they draw from the global generators"
    with host_draws(1):
        assert 0 <= pickle.loads(pickle.dumps(random.random))() < 1
        assert 0 <= pickle.loads(pickle.dumps(np.random.rand))() < 1
