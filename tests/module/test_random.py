"""Keyed dropout: Philox against its published vectors, and masks that depend on the sample, not on the split."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.engine import Engine
from shoal.errors import UserError
from shoal.models import regression
from shoal.module.random import KeyedDropout, Randomness, keep_fallback, keyed_functional, mix
from shoal.native import library
from shoal.plan import Plan
from tests.parity.cases import vectors
from tests.pool import run_ranks

CPU = torch.device("cpu")


def keep_native(samples: int, elements: int, keys: torch.Tensor, threshold: int, first: int = 0) -> torch.Tensor:
    kernels = library()
    assert kernels is not None, "the standard machine has a C compiler"
    kept = torch.empty(samples, elements, dtype=torch.bool)
    kernels.shoal_keep(kept.data_ptr(), samples, elements, keys.data_ptr(), threshold, first)
    return kept


@pytest.mark.fast
@pytest.mark.parametrize("keep", [keep_native, keep_fallback])
def test_philox_words_are_the_published_ones(keep):
    """Random123's known answers for philox4x32-10: counter 0, key 0 gives 6627e8d5 e169c58d bc57ac4c 9b00dbd8."""
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    for place, word in enumerate(words):
        zero = torch.zeros(1, dtype=torch.int64)
        assert keep(1, 4, zero, word)[0, place] and not keep(1, 4, zero, word + 1)[0, place]


@pytest.mark.fast
@given(st.integers(0, 5), st.integers(0, 700), st.integers(0, 2**32 - 1), st.integers(0, 1000), st.integers(0, 900))
def test_the_torch_fallback_is_the_kernel_and_a_part_is_that_of_the_whole(samples, elements, threshold, start, first):
    keys = mix(torch.arange(start, start + samples))
    whole = keep_native(samples, first + elements, keys, threshold)
    assert torch.equal(whole, keep_fallback(samples, first + elements, keys, threshold))
    for keep in (keep_native, keep_fallback):
        assert torch.equal(keep(samples, elements, keys, threshold, first), whole[:, first:])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dropout(0.3), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.first(x), self.second(x), self.second(x), F.dropout(x, 0.3, self.training)], 1)


def masks(ids: list[int], step: int = 0, seed: int = 0, shape: tuple[int, ...] = (5, 7)) -> torch.Tensor:
    net, randomness = Net(), Randomness(seed, CPU)
    randomness.take_over(net)
    randomness.begin(step, ids)
    with keyed_functional(randomness):
        return net(torch.ones(len(ids), *shape))


@pytest.mark.fast
def test_a_sample_drops_the_same_in_any_company():
    whole = masks([11, 4, 7, 90])
    assert torch.equal(torch.cat([masks([11]), masks([4, 7]), masks([90])]), whole)
    assert torch.equal(masks([90, 4])[1], whole[1])


@pytest.mark.fast
def test_step_seed_layer_and_call_draw_apart():
    base = masks([1, 2])
    for other in (masks([1, 2], step=1), masks([1, 2], seed=1), masks([3, 4])):
        assert not torch.equal(base, other)
    layers = base.transpose(0, 1)  # first, second, second again, functional
    assert all(not torch.equal(layers[i], layers[j]) for i in range(4) for j in range(i))


@pytest.mark.fast
def test_the_rate_and_the_scale_are_those_of_dropout():
    x = masks(list(range(64)), shape=(50, 50))
    assert (x == 0).float().mean() == pytest.approx(0.3, abs=0.002)
    assert x[x != 0].unique().tolist() == [pytest.approx(1 / 0.7)]


@pytest.mark.fast
def test_backward_and_forward_mode_use_the_same_mask():
    layer, randomness = nn.Sequential(nn.Dropout(0.5)), Randomness(0, CPU)
    randomness.take_over(layer)
    x = torch.randn(3, 20, requires_grad=True)

    def run(value: torch.Tensor) -> torch.Tensor:
        randomness.begin(0, [5, 6, 7])
        with keyed_functional(randomness):
            return layer(value)

    y = run(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    _, tangent = torch.func.jvp(run, (x.detach(),), (torch.ones_like(x),))
    assert torch.equal(gradient, tangent) and torch.equal(gradient != 0, y != 0)


@pytest.mark.fast
def test_a_recomputed_forward_drops_the_same():
    net, randomness = nn.ModuleList([nn.Linear(8, 8), nn.Dropout(0.5)]), Randomness(0, CPU)
    randomness.take_over(net)
    x = torch.randn(4, 8)

    def gradient(checkpointed: bool) -> torch.Tensor:
        net.zero_grad()
        randomness.begin(0, [0, 1, 2, 3])
        with keyed_functional(randomness):
            part = lambda value: F.dropout(net[1](net[0](value)), 0.5)  # noqa: E731
            y = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False) if checkpointed else part(x)
            randomness.replay()
            y.square().sum().backward()
        return net[0].weight.grad.clone()

    assert torch.equal(gradient(True), gradient(False))


class Again(nn.Module):
    """Checkpoints what its forward calls, so that its hooks do not run again in backward."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.linear, self.drop, self.reentrant = nn.Linear(8, 8), nn.Dropout(0.5), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.run(x)
        return torch.utils.checkpoint.checkpoint(self.run, x, use_reentrant=self.reentrant)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.drop(self.linear(x)), 0.5).square()  # keeps what was drawn for backward


@pytest.mark.fast
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_module_that_checkpoints_its_own_forward_drops_the_same_in_each_of_its_calls(reentrant):
    x = torch.randn(4, 8)

    def gradient(how: bool | None) -> torch.Tensor:
        torch.manual_seed(0)
        net, randomness = nn.ModuleList([Again(how), Again(how)]), Randomness(0, CPU)
        randomness.take_over(net)
        randomness.begin(0, [0, 1, 2, 3])
        with keyed_functional(randomness):
            y = net[1](net[0](net[0](net[1](x.requires_grad_()))))
            randomness.replay()
            y.square().sum().backward()
        return torch.stack([each.linear.weight.grad for each in net])

    assert torch.equal(gradient(reentrant), gradient(None))


@pytest.mark.fast
def test_attention_with_dropout_inside_torch_modules_is_keyed_too():
    def run(ids: list[int]) -> torch.Tensor:
        torch.manual_seed(0)
        layer, randomness = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.4, batch_first=True), Randomness(0, CPU)
        x = torch.randn(10, 6, 16)[ids]
        randomness.take_over(layer)
        randomness.begin(0, ids)
        with keyed_functional(randomness):
            return layer(x)

    torch.testing.assert_close(torch.cat([run([0, 1]), run([2])]), run([0, 1, 2]))


@pytest.mark.fast
def test_attention_weights_are_those_of_torch():
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    randomness = Randomness(0, CPU)
    randomness.begin(0, [0, 1])
    with keyed_functional(randomness):
        ours = F.scaled_dot_product_attention(q, k, v, dropout_p=1e-9, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


@pytest.mark.fast
def test_torch_is_itself_again_outside_and_in_evaluation():
    net, randomness = Net(), Randomness(0, CPU)
    before = (F.dropout, F.scaled_dot_product_attention)
    randomness.take_over(net)
    with keyed_functional(randomness):
        net.eval()
        assert torch.equal(net(torch.ones(2, 3)), torch.ones(2, 4, 3))
    assert (F.dropout, F.scaled_dot_product_attention) == before
    assert isinstance(net.first, KeyedDropout) and net.train()(torch.ones(2, 3)).shape == (2, 4, 3)


@pytest.mark.fast
def test_threads_draw_each_for_themselves():
    """The first that opened leaves first."""
    before, both, first_left = F.dropout, threading.Barrier(2, timeout=10), threading.Event()

    def run(seed: int, threads: bool = True) -> torch.Tensor:
        randomness = Randomness(seed, CPU)
        randomness.begin(0, [0, 1, 2])
        with keyed_functional(randomness):
            if threads:
                both.wait()
            drawn = F.dropout(torch.ones(3, 64), 0.5)
            if threads:
                both.wait()
            if threads and seed == 2:
                first_left.wait(10)
        first_left.set()
        return drawn

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, (1, 2))
    assert F.dropout is before
    assert torch.equal(first, run(1, False)) and torch.equal(second, run(2, False)) and not torch.equal(first, second)


@pytest.mark.fast
def test_a_layer_that_drops_in_place_does():
    """Of a layer whose result is not used there was nothing else to see."""
    layers, randomness = nn.ModuleDict({"drop": nn.Dropout(0.5, inplace=True)}), Randomness(0, CPU)
    randomness.take_over(layers)
    randomness.begin(0, range(4))
    inside, outside = torch.ones(4, 64), torch.ones(4, 64)
    with keyed_functional(randomness):
        assert layers["drop"](inside) is inside
    layers["drop"](outside)
    for dropped in (inside, outside):
        assert 0.3 < float((dropped == 0).float().mean()) < 0.7 and dropped.max() == 2


@pytest.mark.fast
def test_dropout_inside_a_recurrent_kernel_is_refused_by_name():
    with pytest.raises(UserError, match=r"LSTM\(dropout=0.2\) in rnn draws inside its kernel"):
        Randomness(0, CPU).take_over(nn.ModuleDict({"rnn": nn.LSTM(4, 4, num_layers=2, dropout=0.2)}))


@pytest.mark.fast
def test_dropout_of_whole_channels_is_refused_by_name():
    with pytest.raises(UserError, match="Dropout2d in 0 drops whole channels"):
        Randomness(0, CPU).take_over(nn.Sequential(nn.Dropout2d(0.1)))


def test_without_a_compiler_the_fallback_gives_the_same():
    code = (
        "import torch; from shoal.module.random.philox import _keyed_drop, mix; from shoal.native import library; "
        "assert library() is None;"
        "print(_keyed_drop(torch.ones(2, 40), 0.5, mix(torch.arange(2)), 0).long().flatten().tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SHOAL_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    kept = keep_native(2, 40, mix(torch.arange(2)), 1 << 31).long().flatten() * 2
    assert done.stdout.strip() == str(kept.tolist())


class Noisy(nn.Module):
    """Draws in evaluation too: from torch, and by a dropout that is always on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(nn.functional.dropout(x, 0.3, training=True) + torch.randn(x.shape, dtype=x.dtype))


def evaluated(world, plan: dict) -> list[float]:
    options = {"global_batch": 6, "microbatch": 2, "precision": "fp64", "world": world}
    running = Engine(Noisy, regression, partial(torch.optim.SGD, lr=0.1), Plan(**{"dp": world.size, **plan}), **options)
    batches, state = running.batches(vectors()), torch.get_rng_state()
    found = [running.evaluate(vectors(), max_batches=3).loss, running.evaluate(vectors(), max_batches=3).loss]
    assert torch.equal(state, torch.get_rng_state()), "the caller's generator goes on as it was"
    found.append(running.step(next(batches)).loss)
    running.close()
    return found


def test_what_an_evaluation_draws_does_not_depend_on_the_plan():
    (expected,) = run_ranks(evaluated, 1, {})
    assert expected[0] == expected[1] != expected[2]
    for size, plan in ((2, {}), (3, {"zero": 3})):
        for found in run_ranks(evaluated, size, plan):
            assert found == pytest.approx(expected, rel=1e-9)


def attended(x: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
    return F.dropout(F.scaled_dot_product_attention(x, x, x, is_causal=True), dropout) + 1


def test_attention_and_dropout_of_nothing_are_compiled_in_one_graph():
    """Until somebody attends otherwise, which a compiled graph heeds, too."""
    x, plain = torch.randn(1, 2, 5, 4), Randomness(0, CPU)
    whole = torch.compile(attended, backend="eager", fullgraph=True)
    with keyed_functional(plain):
        assert torch.equal(whole(x), attended(x))
    assert torch.equal(whole(x), attended(x))
    either = torch.compile(attended, backend="eager")
    for attend in (None, lambda query, *args, **kwargs: query, None):
        with keyed_functional(Randomness(0, CPU, attend=attend)):
            assert torch.equal(either(x), attended(x)) and torch.equal(either(x), x + 1) == (attend is not None)
