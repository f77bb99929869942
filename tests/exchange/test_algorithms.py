"""Every algorithm by its name: it trains, on any number of ranks, with accumulation, clipping, short batches; the same
bits everywhere."""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch

from shoal import Plan, UserError
from shoal.assembly.compatibility import check_exchange
from shoal.comm.simulation import simulate_world
from shoal.exchange.named import ALGORITHMS
from shoal.optim.groups import small_optimizer
from tests.exchange.teacher import ADAMW, SGD, Trace, train
from tests.parity.covering import in_turn, thinned
from tests.pool import run_ranks

SETTINGS: dict[str, dict] = {
    "hierarchical": {"ranks_per_host": 2},
    "islands": {"ranks": 2, "across": {"name": "local_sgd", "every": 4}},
    "powersgd": {"min_compression": 1.0, "rank": 2, "start": 3},
    "topk": {"ratio": 0.1},
    "qadam": {"warmup": 10},
    "onebit_adam": {"warmup": 20},
    "async_average": {"interval_ms": 5},
    "local_sgd": {"every": 4},
    "post_local_sgd": {"start": 10, "every": 4},
    "diloco": {"every": 5, "outer_momentum": 0.5},
    "streaming_diloco": {"every": 8, "overlap": 1, "fragments": 2},
}
EQUAL = [
    "allreduce",
    "hierarchical",
    "fp16",
    "bf16",
    "bytegrad",
    "powersgd",
    "topk",
    "adasum",
    "delayed",
    "qadam",
    "onebit_adam",
]
"""Algorithms whose replicas are the same bits after every step."""


def setting(name: str) -> dict:
    return {"name": name, **SETTINGS.get(name, {})}


@cache
def exact(steps: int = 60, optimizer: Any = ADAMW) -> Trace:
    return simulate_world(1, train, "allreduce", steps, optimizer)[0]


LEARNING = [name for name in ALGORITHMS if name != "none"]


SIZES = [2, 4]
SOME = {*in_turn(LEARNING, SIZES), ("islands", 4)}


@pytest.mark.parametrize(("name", "size"), thinned(list(product(LEARNING, SIZES)), SOME))
def test_it_learns_as_the_exact_sum_does(name, size):
    """From 0.26: one process ends at 0.0144, a replica alone at 0.018."""
    traces = simulate_world(size, train, setting(name), 60)
    assert traces[0].evaluation < (0.05 if "diloco" in name else 0.026), [trace.evaluation for trace in traces]
    assert all(trace.evaluation == traces[0].evaluation for trace in traces), (
        "evaluation is of the mean, the same on every rank"
    )
    if name in EQUAL:
        assert all(trace.losses == traces[0].losses for trace in traces)
        if "adam" not in name:  # which clips each replica's gradient by its own norm
            assert all(trace.norms == traces[0].norms for trace in traces)
        for trace in traces[1:]:
            assert all(torch.equal(trace.weights[key], value) for key, value in traces[0].weights.items())


@pytest.mark.parametrize(
    "name", [name for name in ALGORITHMS if name not in ("none", "async_average", "hierarchical", "islands")]
)
def test_batches_that_are_short_and_ranks_without_work(name):
    """Ten samples in microbatches of two on four ranks: one rank has two microbatches; of an epoch's last six one has
    none."""
    traces = simulate_world(4, partial(train, global_batch=10), setting(name), 30)
    assert traces[0].evaluation < 0.1


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("none", "async_average")])
def test_threads_give_the_bits_of_real_ranks(name):
    size = 4 if name in ("hierarchical", "islands") else 3
    for simulated, real in zip(
        simulate_world(size, train, setting(name), 16), run_ranks(train, size, setting(name), 16), strict=True
    ):
        assert simulated.losses == real.losses
        assert all(torch.equal(simulated.weights[key], value) for key, value in real.weights.items())


@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("name", ["fp16", "bf16", "hierarchical", "bytegrad"])
def test_near_lossless_algorithms_follow_the_exact_sum(name, optimizer):
    losses = simulate_world(4, train, setting(name), 20, optimizer)[0].losses
    assert losses == pytest.approx(
        exact(20, optimizer).losses, rel={"fp16": 1e-3, "bf16": 5e-3, "hierarchical": 1e-5, "bytegrad": 2e-2}[name]
    )


def test_codec_and_error_feedback_are_parameters():
    lossy = simulate_world(2, train, {"name": "bytegrad", "codec": "u4"}, 60)[0].evaluation
    fed_back = simulate_world(2, train, {"name": "bytegrad", "codec": "u4", "error_feedback": True}, 60)[0].evaluation
    assert abs(fed_back - exact().evaluation) <= abs(lossy - exact().evaluation) + 1e-3
    compressed = simulate_world(4, train, {"name": "hierarchical", "ranks_per_host": 2, "codec": "u8"}, 60)[0]
    assert compressed.evaluation == pytest.approx(exact().evaluation, rel=0.05)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("bytgrad", 'did you mean "bytegrad"'),
        ({"name": "bytegrad", "rate": 3}, "rate"),
        ({"name": "topk", "ratio": 7.0}, "ratio"),
        ({"name": "local_sgd", "every": 0}, "every = 0"),
        ({"name": "decentralized", "peers": "some"}, "shift_one"),
        ({"name": "delayed", "delay": 0}, "delay = 0"),
        ({"name": "diloco", "every": 4, "overlap": 4}, "overlap = 4"),
        ({"name": "async_average", "bound": 0}, "bound = 0"),
        ({"name": "hierarchical", "ranks_per_host": 2}, "hosts have 2, 1"),
        (
            {"name": "islands", "ranks": 2},
            "plan.exchange.ranks = 2: islands of 2 ranks do not divide 3",
        ),
        ({"name": "islands", "ranks": 1, "across": "fp16"}, "must let them train alone"),
        ({"name": "islands", "ranks": 3, "across": "async_average"}, "its rounds begin by the clock"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(option, says):
    """Before anything is attached: whoever asks the planner hears it too."""
    with pytest.raises(UserError) as caught:
        check_exchange(Plan(dp=3, exchange=option), "whole")
    assert says in str(caught.value).replace("Did", "did")


@pytest.mark.parametrize("name", ["qadam", "onebit_adam"])
def test_compressed_momentum_needs_adam(name):
    with pytest.raises(UserError, match="needs Adam or AdamW, the optimizer is SGD"):
        check_exchange(Plan(dp=2, exchange=name), "whole", make=partial(small_optimizer, SGD, [{}]))
