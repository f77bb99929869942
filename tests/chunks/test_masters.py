"""Masters that are kept in less than fp32 between updates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import Engine, Plan, UserError
from shoal.chunks import Slot, masters
from shoal.chunks.masters import CompactMasters, round_stochastically
from shoal.comm.simulation import simulate_world
from shoal.models import regression
from shoal.precision.named import KEEPS
from tests.exchange import teacher

finite = st.integers(0, 2**32 - 1).filter(lambda bits: (bits >> 23) & 0xFF < 0xFE)


def fp32(bits: list[int]) -> torch.Tensor:
    return torch.tensor([value - 2**32 if value >= 2**31 else value for value in bits], dtype=torch.int32).view(
        torch.float32
    )


def keeper(how: str, master: torch.Tensor) -> tuple[CompactMasters, torch.Tensor, torch.Tensor]:
    data = torch.zeros(len(master), dtype=torch.bfloat16)
    return CompactMasters(how, master, [Slot("weight", torch.Size([len(master)]), 0)]), data, master


@given(st.lists(finite, min_size=1, max_size=50))
def test_split_masters_lose_nothing(bits: list[int]):
    values = fp32(bits)
    kept, data, master = keeper("split", values.clone())
    kept.close(data, 0)
    assert master.untyped_storage().nbytes() == 0
    kept.open(data)
    assert torch.equal(master.view(torch.int32), values.view(torch.int32))
    assert torch.allclose(data.float(), values.bfloat16().float(), rtol=2**-8, atol=2**-133)  # of subnormals one step


def test_kahans_rest_holds_what_rounding_left():
    values = torch.randn(10_000)
    kept, data, master = keeper("kahan", values.clone())
    kept.close(data, 0)
    kept.open(data)
    assert torch.equal(data, master.bfloat16()), "so a checkpoint of the masters gives the same weights"
    assert ((master - values).abs() <= values.abs() * 2**-16).all()
    before = master.clone()
    kept.close(data, 0)
    kept.open(data)
    assert torch.equal(master, before)
    for _ in range(100):  # steps that bf16 alone would not feel
        master.add_(values, alpha=1e-4)
        kept.close(data, 0)
        kept.open(data)
    torch.testing.assert_close(master, values * 1.01, rtol=1e-3, atol=0)  # bf16 alone would have stayed at 1.00


@pytest.mark.parametrize("compiled", [True, False], ids=["C", "torch"])
def test_rounding_by_chance_is_right_on_average(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(masters, "library", lambda: None)
    value = torch.full((200_000,), 1.0 + 0.3 * 2**-7)
    data = torch.empty(len(value), dtype=torch.bfloat16)
    round_stochastically(data, value, 12345, 0)
    assert set(data.tolist()) == {1.0, 1.0 + 2**-7}
    assert abs((data.double() - value.double()).mean()) < 2**-7 * 0.005
    whole, part = torch.randn(1000), torch.empty(1000, dtype=torch.bfloat16)
    cut = torch.empty(600, dtype=torch.bfloat16)
    round_stochastically(part, whole, 7, 0)
    round_stochastically(cut, whole[400:], 7, 400)
    assert torch.equal(part[400:], cut), "where it is cut cannot be seen"
    strange = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    got = torch.empty(5, dtype=torch.bfloat16)
    round_stochastically(got, strange, 3, 0)
    assert got[0] == float("inf") and got[1] == -float("inf") and got[2].isnan() and (got[3:] == 0).all()


def test_the_kernel_draws_what_torch_draws(monkeypatch):
    values, ways = torch.randn(5000), []
    for kernels in (masters.library, lambda: None):
        monkeypatch.setattr(masters, "library", kernels)
        data = torch.empty(5000, dtype=torch.bfloat16)
        round_stochastically(data, values, -(2**63) + 5, 17)
        ways.append(data)
    assert torch.equal(*ways)


def train(world, keep: str, zero: int, optimizer=teacher.ADAMW, steps: int = 30) -> tuple[list[float], int]:
    """Losses, and the bytes that weights and masters have between steps."""
    torch.set_num_threads(1)
    running = Engine(
        teacher.student, regression, optimizer, Plan(dp=world.size, zero=zero), global_batch=16,
        microbatch=8 // world.size, dropout="fused", precision={"name": "bf16", "master": keep}, world=world,
    )  # fmt: skip
    losses = [running.step(batch).loss for batch in running.batches(teacher.data(), steps=steps)]
    kept = sum(
        chunk.nbytes - (chunk.grad if chunk.grad is not None else chunk.owned.grad).nbytes
        for chunk in running.parts.chunks
    )
    running.close()
    return losses, kept


@pytest.mark.parametrize("optimizer", [teacher.ADAMW, torch.optim.NAdam], ids=["fused", "flat"])
def test_training_with_less_than_fp32(optimizer):
    found = {keep: simulate_world(1, train, keep, 0, optimizer)[0] for keep in KEEPS}
    exact, bytes_whole = found["whole"]
    elements = bytes_whole // 6
    assert {keep: kept // elements for keep, (_, kept) in found.items()} == {
        "whole": 6,
        "split": 4,
        "kahan": 4,
        "stochastic": 2,
    }
    assert found["split"][0] == pytest.approx(exact, rel=1e-2)
    for keep in ("kahan", "stochastic"):
        assert found[keep][0][-1] < 0.6 * exact[0] and found[keep][0] == pytest.approx(exact, rel=0.2)


@pytest.mark.parametrize("keep", ["split", "kahan", "stochastic"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_ranks_equal_one_process(keep, zero):
    one, two = simulate_world(1, train, keep, 0)[0], simulate_world(2, train, keep, zero)
    for losses, _ in two:
        assert losses == pytest.approx(one[0], rel=2e-2)


def test_a_checkpoint_holds_the_exact_masters(tmp_path):
    def make(keep: str) -> Engine:
        return Engine(
            teacher.student,
            regression,
            teacher.ADAMW,
            global_batch=16,
            microbatch=8,
            precision={"name": "bf16", "master": keep},
        )

    running = make("split")
    losses = []
    for batch in running.batches(teacher.data(), steps=12):
        losses.append(running.step(batch).loss)
        if batch.step == 5:
            running.save(tmp_path)
    other = make("split")
    other.load(tmp_path)
    assert [other.step(batch).loss for batch in other.batches(teacher.data(), steps=6)] == losses[6:], "the same bits"
    whole = make("whole")
    whole.load(tmp_path)
    assert [whole.step(batch).loss for batch in whole.batches(teacher.data(), steps=6)] == pytest.approx(
        losses[6:], rel=1e-2
    )


def test_replicas_that_exchange_weights_are_refused():
    with pytest.raises(
        UserError, match='"local_sgd" exchanges fp32 weights, which precision master = "split" does not keep'
    ):
        Engine(
            teacher.student, regression, teacher.ADAMW, Plan(exchange="local_sgd"), global_batch=16,
            precision={"name": "bf16", "master": "split"},
        )  # fmt: skip
