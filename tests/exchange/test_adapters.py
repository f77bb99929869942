"""Shoal's algorithms as the communication hook of torch's DDP."""

from __future__ import annotations

import gc
import random
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal import UserError, as_ddp_hook, as_fsdp2
from shoal.chunks import Chunk
from shoal.exchange import Algorithm
from shoal.exchange.named import ALGORITHMS
from tests.exchange.torch_loops import STEPS, evaluate, loss_of, network, ranks, samples, weights

SMALL = 0.002
"""MiB a bucket: one for each layer or two, from the second step on. The first has a single one."""
GRADIENTS = ["allreduce", "hierarchical", "fp16", "bf16", "bytegrad", "powersgd", "topk", "adasum"]


def hooked(model: nn.Module, exchange: Any, **options: Any) -> tuple[DistributedDataParallel, Any]:
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL, **options)
    if exchange is None:
        return ddp, None
    state, hook = as_ddp_hook(exchange, ddp)
    ddp.register_comm_hook(state, hook)
    return ddp, state


def train(rank: int, exchange: Any, late: float = 0.0, accumulate: int = 1, **options: Any) -> Any:
    """(loss on fresh samples, weights) after STEPS steps of AdamW; each gradient comes up to `late` seconds late."""
    ddp, _ = hooked(network(), exchange, **options)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    chance = random.Random(rank)
    if late:
        for parameter in ddp.parameters():
            parameter.register_hook(lambda gradient: time.sleep(chance.uniform(0, late)))
    for step in range(STEPS):
        for part in range(accumulate):
            with ddp.no_sync() if part < accumulate - 1 else nullcontext():
                loss_of(ddp, rank, step * accumulate + part).backward()
        optimizer.step()
        optimizer.zero_grad()
    return evaluate(ddp.module), weights(ddp)


@pytest.mark.fast
@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str
)
def test_all_reduce_is_what_ddp_does_bit_by_bit(options):
    plain, ours = ranks(train, 2, None, **options), ranks(train, 2, "allreduce", **options)
    for (_, expected), (_, got) in zip(plain, ours, strict=True):
        assert torch.equal(expected, got)


@pytest.fixture(scope="module")
def exact() -> float:
    return ranks(train, 2, None)[0][0]


@pytest.mark.parametrize(
    ("exchange", "tolerance"),
    [
        ({"name": "hierarchical", "ranks_per_host": 1, "codec": "u8"}, 0.03),
        ("fp16", 0.01),
        ("bf16", 0.03),
        ("bytegrad", 0.03),
        ({"name": "bytegrad", "codec": "u4", "error_feedback": True}, 0.1),
        ({"name": "powersgd", "rank": 4, "start": 2}, 0.1),
        ({"name": "topk", "ratio": 0.25}, 0.15),
        ("adasum", 0.3),
    ],
    ids=str,
)
def test_algorithms_train_as_the_exact_one_does(exchange, tolerance, exact):
    (loss, first), (_, second) = ranks(train, 2, exchange)
    assert torch.equal(first, second), "replicas stay equal"
    assert loss < 0.35 * evaluate(network()), "it learns"
    assert abs(loss / exact - 1) < tolerance


@pytest.mark.parametrize(
    ("backend", "exchange"),
    [("gloo", {"name": "powersgd", "start": 1, "min_compression": 1.0}), ("shm", "topk")],
    ids=str,
)
def test_delays_of_each_rank_never_mismatch(backend, exchange):
    """What breaks torch's own PowerSGD hook: buckets that are ready at different times on different ranks."""
    in_time = ranks(train, 3, exchange, backend=backend)
    for (_, expected), (_, got) in zip(in_time, ranks(train, 3, exchange, 0.004, backend=backend), strict=True):
        assert torch.equal(expected, got)


class Given(nn.Module):
    """The gradient of its parameters is what it is called with. Used in another order than registered, so that DDP's
    buckets change."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        self.order = [1, 0, 3, 2, 4]

    def forward(self, given: list[Tensor]) -> Tensor:
        total = torch.zeros(())
        for place in self.order:  # a chain: the last one used has its gradient first
            total = total * 1.0 + (self.parts[place] * given[place]).sum()
        return total


SHAPES = [(30, 20), (700,), (16, 40), (40, 30), (8,)]


def given(rank: int, step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def accounts(rank: int, exchange: Any, steps: int) -> Any:
    """(sum of what all gave, sum of what was applied, sum of what all kept, the buckets of each step)."""
    ddp = DistributedDataParallel(Given(SHAPES), bucket_cap_mb=SMALL)
    state, hook = as_ddp_hook(exchange, ddp)
    buckets: list[list[tuple[int, ...]]] = []

    def seen(state, bucket):
        if bucket.index() == 0:
            buckets.append([])
        buckets[-1].append(tuple(parameter.numel() for parameter in bucket.parameters()))
        return hook(state, bucket)

    ddp.register_comm_hook(state, seen)
    gave, applied, kept = torch.zeros_like(weights(ddp)), torch.zeros_like(weights(ddp)), torch.zeros_like(weights(ddp))
    for step in range(steps):
        ddp(given(rank, step)).backward()
        gave += torch.cat([tensor.flatten() for tensor in given(rank, step)])
        applied += dist.get_world_size() * torch.cat([parameter.grad.flatten() for parameter in ddp.parameters()])
        ddp.zero_grad()
    for kind, tensors in state.state_dict()["tensors"].items():
        if "residual" in kind:
            for start, (name, parameter) in zip(offsets(ddp), ddp.module.named_parameters(), strict=True):
                if name in tensors:
                    kept[start : start + parameter.numel()] += tensors[name].flatten()
    dist.all_reduce(gave)
    dist.all_reduce(kept)
    return gave, applied, kept, buckets


def offsets(model: nn.Module) -> list[int]:
    sizes = [parameter.numel() for parameter in model.parameters()]
    return [sum(sizes[:place]) for place in range(len(sizes))]


@pytest.mark.parametrize(
    "exchange",
    [
        {"name": "bytegrad", "codec": "sign", "error_feedback": True},
        {"name": "topk", "ratio": 0.1},
        {"name": "powersgd", "rank": 1, "start": 0, "min_compression": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("steps", [1, 5])
def test_residuals_survive_that_ddp_makes_its_buckets_anew(exchange, steps):
    """What was applied and what is kept is all that was given, before and after."""
    for gave, applied, kept, buckets in ranks(accounts, 2, exchange, steps):
        assert len(buckets[0]) == 1 and (steps == 1 or len(buckets[-1]) == 4), "the test is about buckets that change"
        assert kept.abs().max() > 0.1, "the test is about lossy exchanges"
        torch.testing.assert_close(applied + kept, gave, rtol=0, atol=2e-4)


def resume(rank: int, exchange: Any) -> tuple[Tensor, Tensor]:
    """Eight steps in one go, and four of them in a hook that takes over after four."""
    straight, _ = hooked(network(), exchange)
    ddp, state = hooked(network(), exchange)
    for step in range(8):
        if step == 4:
            saved = state.state_dict()
            ddp = DistributedDataParallel(ddp.module, bucket_cap_mb=0.01)
            state, hook = as_ddp_hook(exchange, ddp)
            state.load_state_dict(saved)
            assert state.state_dict()["tensors"].keys() == saved["tensors"].keys(), "saved again before it has trained"
            ddp.register_comm_hook(state, hook)
        for model in (straight, ddp):
            loss_of(model, rank, step).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()
    return weights(straight), weights(ddp)


def test_a_hook_goes_on_from_its_saved_state():
    """PowerSGD works by parameter, so other buckets give the same bits; without its state it would start with exact
    sums again."""
    for straight, resumed in ranks(resume, 2, {"name": "powersgd", "rank": 2, "start": 2, "min_compression": 1.0}):
        assert torch.equal(straight, resumed)


def loads_another(rank: int) -> None:
    saving, state = hooked(network(), "topk")
    loss_of(saving, rank, 0).backward()
    other, into = hooked(network(), "powersgd")
    into.load_state_dict(state.state_dict())
    with pytest.raises(
        UserError, match="saved state holds residual, this algorithm needs residual, q: load what the same one"
    ):
        loss_of(other, rank, 0).backward()


def test_the_state_of_another_algorithm_is_refused():
    ranks(loads_another, 2)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.used, self.sometimes, self.never = nn.Linear(12, 4), nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.used(x) + self.sometimes(x) if both else self.used(x)


def with_unused(rank: int, exchange: Any) -> list[Tensor | None]:
    ddp, _ = hooked(Branches(), exchange, find_unused_parameters=True)
    for step in range(4):
        ddp.zero_grad()
        x, y = samples(rank, step)
        nn.functional.mse_loss(ddp(x, both=rank == 0), y).backward()
    return [parameter.grad for parameter in ddp.parameters()]


def test_unused_parameters():
    """One layer has a gradient on rank 0 only, one nowhere."""
    for got, plain in zip(ranks(with_unused, 2, "bytegrad"), ranks(with_unused, 2, None), strict=True):
        assert [gradient is None for gradient in got] == [False] * 4 + [True] * 2
        for ours, exactly in zip(got[:4], plain[:4], strict=True):
            torch.testing.assert_close(ours, exactly, rtol=0, atol=0.02)


def unused_for_a_while(rank: int, exchange: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What `sometimes` was given in all steps, and what it should have been given; it is used in some of them alone."""
    ddp, state = hooked(Branches(), exchange, **options)
    weight = ddp.module.sometimes.weight
    given, wanted = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(6):
        ddp.zero_grad()
        x, y = samples(rank, step)
        nn.functional.mse_loss(ddp(x, both=step in (0, 1, 4)), y).backward()
        if weight.grad is not None:
            given += weight.grad
            own = torch.autograd.grad(nn.functional.mse_loss(ddp.module(x, both=True), y), weight)[0]
            dist.all_reduce(own)
            wanted += own / 2
    kept = sum(tensors["sometimes.weight"] for tensors in state.state_dict()["tensors"].values())
    dist.all_reduce(kept)
    return given + kept / 2, wanted


@pytest.mark.parametrize("exchange", [{"name": "topk", "ratio": 0.1}, {"name": "bytegrad", "error_feedback": True}])
def test_nothing_kept_back_is_lost_where_a_parameter_is_not_used(exchange):
    for found, wanted in ranks(unused_for_a_while, 2, exchange, {"find_unused_parameters": True}):
        torch.testing.assert_close(found, wanted)


def uneven(rank: int, exchange: Any) -> Tensor:
    ddp, _ = hooked(network(), exchange)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(3 + 2 * rank):
            loss_of(ddp, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(ddp)


def test_a_rank_that_has_run_out_of_samples_joins():
    plain, ours = ranks(uneven, 2, None)[0], ranks(uneven, 2, "fp16")
    assert torch.equal(ours[0], ours[1])
    torch.testing.assert_close(ours[0], plain, rtol=0, atol=1e-3)


def with_a_bad_gradient(rank: int, exchange: Any, bad: float) -> list[bool]:
    """Whether the gradient of each step is finite; on rank 1 a number of the third step's is `bad`."""
    ddp, _ = hooked(network(), exchange)
    finite = []
    for step in range(6):
        loss = loss_of(ddp, rank, step)
        if rank == 1 and step == 2:
            loss = loss + ddp.module[4].weight[3, 5] * torch.tensor(bad)
        loss.backward()
        finite.append(all(bool(parameter.grad.isfinite().all()) for parameter in ddp.parameters()))
        ddp.zero_grad()
    return finite


@pytest.mark.parametrize(
    ("exchange", "bad"),
    [
        ("bytegrad", float("nan")),
        ({"name": "bytegrad", "codec": "sign", "error_feedback": True}, float("inf")),
        ({"name": "topk", "ratio": 0.1}, float("nan")),
        ({"name": "topk", "ratio": 0.1}, float("inf")),
        ({"name": "powersgd", "start": 0, "min_compression": 1.0}, float("nan")),
        ("adasum", float("nan")),
    ],
    ids=str,
)
def test_a_gradient_that_is_not_finite_is_seen_by_all_and_then_forgotten(exchange, bad):
    """As a GradScaler needs it: every rank skips that step, and the ones after it are sound."""
    assert ranks(with_a_bad_gradient, 2, exchange, bad) == [[True, True, False, True, True, True]] * 2


def in_bf16(rank: int) -> list[tuple[Tensor, Tensor]]:
    ddp = DistributedDataParallel(nn.Linear(12, 4).bfloat16())
    ddp.register_comm_hook(*as_ddp_hook("allreduce", ddp))
    alone = nn.Linear(12, 4).bfloat16()
    alone.load_state_dict(ddp.module.state_dict())
    sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in alone.parameters()]
    for other in range(dist.get_world_size()):
        alone.zero_grad()
        alone(samples(other, 0)[0].bfloat16()).square().sum().backward()
        for total, parameter in zip(sums, alone.parameters(), strict=True):
            total += parameter.grad.float()
    ddp(samples(rank, 0)[0].bfloat16()).square().sum().backward()
    means = [(total / dist.get_world_size()).bfloat16() for total in sums]
    return [(parameter.grad, mean) for parameter, mean in zip(ddp.parameters(), means, strict=True)]


def test_low_precision_is_reduced_in_fp32():
    for rank in ranks(in_bf16, 3):
        for got, mean in rank:
            torch.testing.assert_close(got, mean, rtol=2**-8, atol=0)


class Breaks(Algorithm):
    def __init__(self) -> None:
        self.reduced: list[int] = []

    def reduce(self, chunk: Chunk, own_mean: Tensor) -> None:
        self.reduced.append(chunk.index)
        if chunk.index == 1:
            raise RuntimeError("the network is gone")


def failing(rank: int) -> list[int]:
    algorithm = Breaks()
    ddp, _ = hooked(network(), algorithm)
    loss_of(ddp, rank, 0).backward()  # the first step has one bucket only
    with pytest.raises(RuntimeError, match="the network is gone"):
        loss_of(ddp, rank, 1).backward()
    return algorithm.reduced


def test_an_error_on_the_lane_ends_the_backward_pass():
    """And nothing is tried after it: the ranks are no longer at the same place."""
    assert ranks(failing, 2, timeout=30) == [[0, 0, 1]] * 2


def lanes_left(rank: int) -> int:
    ddp, state = hooked(network(), "bytegrad")
    loss_of(ddp, rank, 0).backward()
    assert any(thread.name == "shoal-lane" for thread in threading.enumerate())
    assert state.ledger.total(purpose="gradients").wire > 0
    del ddp, state
    gc.collect()
    return sum(thread.name == "shoal-lane" for thread in threading.enumerate())


def test_the_lane_ends_with_the_hook():
    before = ranks(threads, 2)
    assert ranks(lanes_left, 2) == before


def threads(rank: int) -> int:
    gc.collect()
    return sum(thread.name == "shoal-lane" for thread in threading.enumerate())


def refuses_sparse(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Embedding(8, 4, sparse=True))
    ddp.register_comm_hook(*as_ddp_hook("allreduce", ddp))
    with pytest.raises(UserError, match=r"gradient of weight is sparse.*sparse=False"):
        ddp(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradients_are_refused():
    ranks(refuses_sparse, 2)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("delayed", "after the backward pass"),
        ("qadam", "place of the optimizer's step"),
        ("onebit_adam", "place of the optimizer's step"),
        *((name, "exchange weights") for name in ("decentralized", "low_precision_decentralized", "async_average")),
        *(
            (name, "exchange weights")
            for name in ("local_sgd", "post_local_sgd", "diloco", "streaming_diloco", "islands")
        ),
        ("none", "apart"),
    ],
)
def test_algorithms_on_more_than_gradients_are_refused(name, reason):
    with pytest.raises(
        UserError, match=f'"{name}" cannot serve a hook of DistributedDataParallel.*{reason}.*{", ".join(GRADIENTS)}'
    ):
        as_ddp_hook(name, nn.Identity())
    with pytest.raises(UserError, match=f'"{name}" cannot serve FSDP2.*{reason}'):
        as_fsdp2(name, nn.Identity())


def test_every_algorithm_is_either_served_or_refused():
    refused = {
        "delayed",
        "qadam",
        "onebit_adam",
        "decentralized",
        "low_precision_decentralized",
        "async_average",
        "islands",
        "none",
    }
    assert {*GRADIENTS, *refused, "local_sgd", "post_local_sgd", "diloco", "streaming_diloco"} == set(ALGORITHMS)


def scaled_accounts(rank: int, exchange: Any) -> tuple[Tensor, Tensor]:
    """(sum of what all gave, sum of what was applied and is kept) under a loss scale that a GradScaler would change
    from step to step; the third step overflows."""
    ddp = DistributedDataParallel(Given(SHAPES), bucket_cap_mb=SMALL)
    scale = 1.0
    state, hook = as_ddp_hook(exchange, ddp, loss_scale=lambda: scale)
    ddp.register_comm_hook(state, hook)
    gave, told = torch.zeros_like(weights(ddp)), torch.zeros_like(weights(ddp))
    for step in range(6):
        scale = 2.0**step
        loss = ddp(given(rank, step)) * scale
        if rank == 1 and step == 2:
            loss = loss + ddp.module.parts[4][3] * torch.tensor(float("inf"))
        loss.backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in ddp.parameters()])
        ddp.zero_grad()
        if gradients.isfinite().all():
            gave += torch.cat([tensor.flatten() for tensor in given(rank, step)])
            told += gradients / scale  # of both ranks: twice the mean
    for kind, tensors in state.state_dict()["tensors"].items():
        if "residual" in kind:
            for start, (name, parameter) in zip(offsets(ddp), ddp.module.named_parameters(), strict=True):
                if name in tensors:
                    told[start : start + parameter.numel()] += tensors[name].flatten()
    dist.all_reduce(gave)
    dist.all_reduce(told)
    return gave, told


def test_residuals_do_not_follow_the_loss_scale():
    """A bucket that is finite in a step that is skipped for another one's gradients loses nothing either."""
    for exchange in ({"name": "topk", "ratio": 0.1}, {"name": "bytegrad", "codec": "sign", "error_feedback": True}):
        for gave, told in ranks(scaled_accounts, 2, exchange):
            torch.testing.assert_close(told, gave, rtol=0, atol=1e-3)
