"""plan.memory: weights, masters and optimizer state at home on the host, within a budget of the device's memory; the same bits as without."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from shoal import Engine, Plan, UserError
from shoal.comm import World
from shoal.comm.simulation import simulate_world
from shoal.errors import BudgetExceeded
from shoal.models import GPT, GPTConfig, causal_lm, regression
from tests.exchange import teacher
from tests.parity.cases import text

STEPS = 4
EXCHANGE = {"name": "allreduce", "chunk_bytes": 20_000}


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=61, sequence=12, layers=4, d_model=32, heads=4, tied=True))


def train(world: World | None, memory, precision: str = "fp32", model=gpt, optimizer=teacher.ADAMW, **plan) -> tuple:
    """Losses, norms, masters; then the engine's tier, bytes that came in during the last step, and sizes of the chunks."""
    running = Engine(
        model, causal_lm, optimizer, Plan(dp=world.size if world else 1, memory=memory, exchange=EXCHANGE, **plan),
        global_batch=12, microbatch=4, clip=0.5, precision=precision, world=world, dropout="fused",
    )  # fmt: skip
    try:
        results = []
        for batch in running.batches(text(), steps=STEPS):
            before = running.passing.executor.bytes_in if running.passing else 0
            results.append(running.step(batch))
        moved = running.passing.executor.bytes_in - before if running.passing else 0
        masters = {name: value.detach().clone() for name, value in running.optimizer.parameters.items()}
        sizes = [chunk.nbytes_whole for chunk in running.chunks if chunk.passes]
        return [r.loss for r in results], [r.grad_norm for r in results], masters, running.tier, moved, sizes
    finally:
        running.close()


def smallest(**plan) -> int:
    """The smallest budget that would do, as the refusal of one that would not says."""
    with pytest.raises(BudgetExceeded) as failure:
        train(None, {"device": 1000}, **plan)
    return failure.value.needed


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [("fp32", teacher.ADAMW), ("bf16", partial(torch.optim.NAdam, lr=3e-3)), ("fp16", teacher.ADAMW)],
    ids=["fp32-adamw", "bf16-nadam", "fp16-adamw"],
)
def test_every_budget_gives_the_same_bits(precision, optimizer):
    whole = train(None, None, precision, optimizer=optimizer)
    least = smallest(precision=precision, optimizer=optimizer)
    _, _, _, free, _, sizes = train(None, {}, precision, optimizer=optimizer)
    assert sum(sizes) < free.most_in_all
    moved = []
    for capacity in (least, (3 * least + free.most_in_all) // 4, (least + free.most_in_all) // 2, free.most_in_all):
        losses, norms, masters, tier, came, _ = train(None, {"device": capacity}, precision, optimizer=optimizer)
        assert losses == whole[0] and norms == whole[1]
        assert all(torch.equal(value, whole[2][name]) for name, value in masters.items())
        assert tier.most_in_all <= capacity
        moved.append(came)
    assert moved == sorted(moved, reverse=True), "more room, fewer moves"
    assert moved[-1] == sum(sizes), "with room for all each comes once a step, for the microbatches together"
    assert moved[0] > moved[-1]


def test_less_than_the_smallest_budget_is_refused_before_anything_is_trained():
    least = smallest()
    with pytest.raises(BudgetExceeded, match=f"{least:,} bytes are needed, the budget is {least - 1:,}"):
        train(None, {"device": least - 1})
    train(None, {"device": least})


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_with_several_ranks(zero):
    whole = simulate_world(2, train, None)
    least = max(tier.most_in_all for *_, tier, _, _ in simulate_world(2, partial(train, zero=zero), {}))
    for ours, theirs in zip(simulate_world(2, partial(train, zero=zero), {"device": least}), whole, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5) and ours[1] == pytest.approx(theirs[1], rel=1e-4)


def test_recompute_needs_less():
    assert smallest(recompute="full") < smallest()
    assert train(None, {"device": smallest(recompute="full")}, recompute="full")[0] == train(None, None)[0]


def test_save_and_load_across(tmp_path):
    def make(memory) -> Engine:
        return Engine(gpt, causal_lm, teacher.ADAMW, Plan(memory=memory, exchange=EXCHANGE), global_batch=12, microbatch=4)

    running, losses = make({"device": "1GiB"}), []
    for batch in running.batches(text(), steps=4):
        losses.append(running.step(batch).loss)
        if batch.step == 1:
            running.save(tmp_path)
    for memory in (None, {"device": "1GiB"}):
        other = make(memory)
        other.load(tmp_path)
        assert [other.step(batch).loss for batch in other.batches(text(), steps=2)] == losses[2:]


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"devise": "1GiB"}, 'plan.memory has no key "devise". Did you mean "device"?'),
        ({"device": "1GiG"}, "plan.memory.device = '1GiG': give bytes, or a text such as"),
        ("all", "plan.memory = 'all': give \"auto\", or a table"),
    ],
)
def test_wrong_tables_are_refused_by_name(memory, message):
    with pytest.raises(UserError) as error:
        Engine(teacher.student, regression, teacher.ADAMW, Plan(memory=memory), global_batch=16)
    assert message in str(error.value)


def test_exchanges_that_need_weights_or_whole_gradients_are_refused():
    with pytest.raises(UserError, match=r'"local_sgd" does not go with plan\.memory'):
        Engine(teacher.student, regression, teacher.ADAMW, Plan(memory={}, exchange="local_sgd"), global_batch=16)
