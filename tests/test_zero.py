"""ZeRO stage 1: chunks cut among the replicas. Numbers are those of one process (tests/parity); here what is kept where, saved and refused."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from shoal import Engine, Plan, UserError
from shoal.comm.simulation import simulate_world
from shoal.exchange.named import ALGORITHMS
from tests.exchange import teacher
from tests.parity.cases import CASES, gathered
from tests.parity.cases import engine as parity_engine
from tests.pool import run_ranks

NADAM = partial(torch.optim.NAdam, lr=3e-3)  # not fused in torch: it runs over flat pieces
STEPS = 8


def make(world, zero: int, precision: str, optimizer=None, case: str = "tied") -> Engine:
    more = {} if optimizer is None else {"optimizer": optimizer}
    chosen = CASES[case]
    if optimizer is None:
        return parity_engine(case, precision, 1, world=world, plan=Plan(dp=world.size, zero=zero))
    return Engine(
        chosen.factory, chosen.loss, plan=Plan(dp=world.size, zero=zero), global_batch=12, microbatch=3, precision=precision,
        clip=0.8, world=world, **more,
    )  # fmt: skip


def train(world, zero: int, precision: str, optimizer=None, save: Path | None = None, load: Path | None = None) -> tuple:
    """Losses of STEPS steps (of the second half after `load`), then masters and optimizer state, whole."""
    running = make(world, zero, precision, optimizer)
    try:
        if load is not None:
            running.load(load)
        data, losses = CASES["tied"].data(), []
        for batch in running.batches(data, steps=STEPS - running.step_index):
            losses.append(running.step(batch).loss)
            if save is not None and batch.step == STEPS // 2 - 1:
                running.save(save)
        masters = gathered(running, {name: value.detach() for name, value in running.optimizer.parameters.items()})
        elements = {}
        for (name, key), value in running.optimizer.state_tensors().items():
            if value.shape == running.optimizer.slots[name].shape:
                elements.setdefault(key, {})[name] = value
        return losses, masters, {key: gathered(running, tensors) for key, tensors in sorted(elements.items())}
    finally:
        running.close()


@pytest.mark.parametrize("optimizer", [None, NADAM], ids=["adamw", "nadam"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_ranks_compute_the_bits_of_two_replicas(precision, optimizer):
    """Sums of two have one order, updates are elementwise: masters and state are the replicas' to the last bit. torch's unfused kernels
    round the last few elements of a tensor, and only those, another way: with NAdam that is elsewhere, by the last bit."""
    cut, whole = (run_ranks(train, 2, zero, precision, optimizer)[0] for zero in (1, 0))
    exact = 1e-5 if optimizer is NADAM else 0
    assert cut[0] == pytest.approx(whole[0], rel=exact, abs=0)
    for ours, theirs in zip(cut[1:], whole[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=exact, atol=exact)


@pytest.mark.parametrize("optimizer", [None, NADAM], ids=["adamw", "nadam"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("before", "after"), [((3, 1), (2, 0)), ((2, 0), (3, 1)), ((2, 1), (4, 1)), ((1, 0), (2, 1))])
def test_a_checkpoint_goes_on_under_another_cut(before, after, precision, optimizer, tmp_path):
    """Saved by as many ranks with that stage, read by others: the masters and state read are those of the checkpoint, bit by bit."""
    (size, zero), (other_size, other_zero) = before, after
    whole = run_ranks(train, size, zero, precision, optimizer, tmp_path)[0]
    half = run_ranks(read, other_size, other_zero, precision, optimizer, tmp_path)[0]
    back = run_ranks(read, 1, 0, precision, optimizer, tmp_path)[0]
    for ours, theirs in zip(half[1:], back[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert half[0] == back[0], "options and counts of the groups"
    rest = run_ranks(train, other_size, other_zero, precision, optimizer, None, tmp_path)[0]
    assert rest[0] == pytest.approx(whole[0][STEPS // 2 :], rel=1e-5 if precision == "fp32" else 2e-3)


def read(world, zero: int, precision: str, optimizer, directory: Path) -> tuple:
    """What a new engine has read."""
    running = make(world, zero, precision, optimizer)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            running.load(directory)
        masters = gathered(running, {name: value.detach() for name, value in running.optimizer.parameters.items()})
        elements: dict = {}
        counts = set()
        for (name, key), value in running.optimizer.state_tensors().items():
            if value.shape == running.optimizer.slots[name].shape:
                elements.setdefault(key, {})[name] = value
            else:
                counts.add((key, float(value)))
        options = [group["lr"] for group in running.optimizer.torch.param_groups]
        return (options, sorted(counts)), masters, {key: gathered(running, each) for key, each in sorted(elements.items())}
    finally:
        running.close()


def held(world, zero: int) -> tuple[int, int, bool]:
    """Bytes of optimizer state and of masters beside the data; whether the weights are one memory for all ranks."""
    running = make(world, zero, "bf16")
    running.step(next(running.batches(CASES["tied"].data())))
    state = sum(value.nbytes for value in running.optimizer.state_tensors().values() if value.dim())
    masters = sum(chunk.owned.master.nbytes for chunk in running.chunks)
    running.world.everyone.barrier()
    weight = next(iter(running.parameters.values()))
    before = weight.detach().clone()
    running.world.everyone.barrier()
    if world.rank == 0:
        with torch.no_grad():
            weight.zero_()
    running.world.everyone.barrier()
    common = not torch.equal(weight, before)
    running.close()
    return state, masters, common


def test_each_rank_keeps_its_part():
    [(state, masters, _)] = run_ranks(held, 1, 0)
    each = run_ranks(held, 4, 1)
    assert sum(part for part, _, _ in each) == state
    assert all(part <= state / 4 * 1.05 + 1024 for part, _, _ in each)
    assert all(part <= masters / 4 * 1.05 + 1024 for _, part, _ in each)
    assert all(common for _, _, common in each), "ranks of one host share one copy of the weights"


def test_without_common_memory_weights_are_gathered():
    """Threads of one process have none: there the gather is an operation of the transport."""
    sharded = simulate_world(3, partial(teacher.train, zero=1), "allreduce")
    replicated = simulate_world(3, teacher.train, "allreduce")
    for ours, theirs in zip(sharded, replicated, strict=True):
        assert ours.losses == theirs.losses
        assert all(torch.equal(ours.weights[name], value) for name, value in theirs.weights.items())


def exported(world, zero: int, directory: Path) -> None:
    running = make(world, zero, "bf16")
    running.step(next(running.batches(CASES["tied"].data())))
    running.export(directory)
    running.close()


def test_an_export_has_whole_masters(tmp_path):
    from safetensors.torch import load_file

    for name, zero in (("cut", 1), ("whole", 0)):
        run_ranks(exported, 2, zero, tmp_path / name)
    [one], [other] = (sorted((tmp_path / name).glob("*.safetensors")) for name in ("cut", "whole"))
    ours, theirs = load_file(one), load_file(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("name", ["fp16", "bytegrad", "powersgd", "topk", "adasum", "delayed", "hierarchical"])
def test_gradients_may_travel_as_they_like(name):
    """Any algorithm that leaves replicas equal: the same as with whole chunks."""
    exchange = {"name": name, "ranks_per_host": 1} if name == "hierarchical" else name
    sharded = simulate_world(2, partial(teacher.train, zero=1), exchange)
    replicated = simulate_world(2, teacher.train, exchange)
    for ours, theirs in zip(sharded, replicated, strict=True):
        # Rows of a codec are those of the chunk, which is a little longer where it is cut.
        rel = 0.05 if name == "bytegrad" else 1e-5
        assert ours.losses == pytest.approx(theirs.losses, rel=rel)
        assert ours.norms == pytest.approx(theirs.norms, rel=rel * 10)


def test_what_does_not_go_together_is_refused():
    apart = ["qadam", "onebit_adam", "decentralized", "local_sgd", "diloco", "async_average", "none", "islands"]
    assert set(apart) < set(ALGORITHMS)
    for name in apart:
        with pytest.raises(UserError, match=f'"{name}" does not go with plan.zero = 1: '):
            simulate_world(2, partial(teacher.train, zero=1), name)
