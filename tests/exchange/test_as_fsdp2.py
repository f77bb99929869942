"""Shoal's codecs as FSDP2's reduce-scatter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shoal import UserError, as_fsdp2
from tests.exchange.torch_loops import STEPS, evaluate, loss_of, network, ranks, weights


def train_sharded(rank: int, exchange: Any, shards: int | None = None, **options: Any) -> Any:
    """(loss on fresh samples, full weights, bytes sent) after STEPS steps; `shards`: of hybrid sharding, ranks a
    copy."""
    shape = (dist.get_world_size(),) if shards is None else (dist.get_world_size() // shards, shards)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    ledger = None if exchange is None else as_fsdp2(exchange, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))
    gathered = network()
    gathered.load_state_dict(full)
    return evaluate(gathered), weights(gathered), 0 if ledger is None else ledger.total(purpose="gradients").wire


@pytest.fixture(scope="module")
def through_bytes() -> Any:
    return ranks(train_sharded, 2, "bytegrad")


@pytest.fixture(scope="module")
def sharded() -> float:
    """The loss that FSDP reaches by itself."""
    return ranks(train_sharded, 2, None)[0][0]


def test_fsdp_trains_through_bytes(through_bytes, sharded):
    (loss, first, _), (_, second, _) = through_bytes
    assert torch.equal(first, second), "there is one model"
    assert 0 < abs(loss / sharded - 1) < 0.05


@pytest.mark.parametrize(("exchange", "tolerance"), [("fp16", 0.01), ("bf16", 0.03)])
def test_fsdp_trains_through_half_precision(exchange, tolerance, sharded):
    assert 0 < abs(ranks(train_sharded, 2, exchange)[0][0] / sharded - 1) < tolerance


def test_fsdp_sends_what_the_codec_makes_of_the_gradients(through_bytes):
    """Of two ranks each sends half a gradient a layer and step, 8 bytes a row of 1024 and one an element. Layers of 12
    x 32 + 32, 32 x 32 + 32 twice, 32 x 4 + 4: halves of 208, 528, 528 and 66 elements, each less than a row."""
    for _, _, wire in through_bytes:
        assert wire == STEPS * sum(8 + half for half in (208, 528, 528, 66))


def test_fsdp_on_shared_memory(through_bytes):
    assert torch.equal(ranks(train_sharded, 2, "bytegrad", backend="shm")[0][1], through_bytes[0][1])


def test_hybrid_sharding_encodes_inside_a_shard_group():
    results = ranks(train_sharded, 4, "bytegrad", shards=2)
    assert all(torch.equal(gathered, results[0][1]) for _, gathered, _ in results)
    assert 0 < abs(results[0][0] / ranks(train_sharded, 4, None, shards=2)[0][0] - 1) < 0.05


def test_mixed_precision_under_fsdp():
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    exact, ours = ranks(train_sharded, 2, None, mp_policy=policy), ranks(train_sharded, 2, "bf16", mp_policy=policy)
    assert abs(ours[0][0] / exact[0][0] - 1) < 0.05


def bad_under_fsdp(rank: int) -> bool:
    model = network()
    fully_shard(model)
    as_fsdp2("bytegrad", model)
    loss = loss_of(model, rank, 0)
    (loss * (float("nan") if rank == 1 else 1.0)).backward()
    return any(bool(parameter.grad.to_local().isnan().any()) for parameter in model.parameters())


def test_nan_is_not_hidden_under_fsdp():
    assert ranks(bad_under_fsdp, 2) == [True, True]


def own_factor(rank: int) -> float:
    """The largest difference of the gradients with the caller's divisor of 1 from those of plain FSDP, relative to the
    largest."""
    gradients = []
    for exchange in (None, "fp16"):
        model = network()
        fully_shard(model)
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(1.0)
        if exchange is not None:
            as_fsdp2(exchange, model)
        loss_of(model, rank, 0).backward()
        gradients.append(torch.cat([parameter.grad.to_local().flatten() for parameter in model.parameters()]))
    return float((gradients[1] - gradients[0]).abs().max() / gradients[0].abs().max())


def test_the_caller_may_choose_the_divisor():
    assert max(ranks(own_factor, 2)) < 1e-3


@pytest.mark.fast
def test_what_fsdp_cannot_have_is_refused():
    for name in ("allreduce", "hierarchical", "powersgd", "topk", "adasum"):
        with pytest.raises(UserError, match=f'"{name}" cannot serve FSDP2: FSDP sums shards.*fp16, bf16, bytegrad'):
            as_fsdp2(name, nn.Identity())
    with pytest.raises(UserError, match="residual as large as the unsharded gradients"):
        as_fsdp2({"name": "bytegrad", "error_feedback": True}, nn.Identity())
    with pytest.raises(UserError, match="no sharded module: call fully_shard"):
        as_fsdp2("bytegrad", nn.Identity())
