"""Checkpoints under every algorithm: the run goes on as if it had not stopped; with other ranks, nothing that waited is
lost."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal import Engine, Plan
from shoal.checkpoint.reader import tensor_names
from shoal.comm.simulation import simulate_world
from shoal.exchange.named import ALGORITHMS
from shoal.models import regression
from tests.exchange.teacher import ADAMW, INPUTS, OUTPUTS, data, engine
from tests.exchange.test_algorithms import setting
from tests.pool import run_ranks

STOP, END = 7, 12
RESUMABLE = [name for name in ALGORITHMS if name not in ("async_average")]  # its rounds depend on clocks; W = 2
OPTIONS = {
    "bytegrad_fed_back": {"name": "bytegrad", "codec": "u4", "error_feedback": True},
    "between_meetings": {"name": "low_precision_decentralized", "every": 2},
    "under_way": {"name": "diloco", "every": 6, "overlap": 4, "guard": 0.0},
}


def through(world, name: str, directory: str) -> list[float]:
    """Trains to END and saves at STOP on the way; the losses after it."""
    torch.set_num_threads(1)
    running = engine(world, option(name))
    losses = []
    for batch in running.batches(data(), steps=END):
        if batch.step == STOP:
            running.save(directory)
        losses.append(running.step(batch).loss)
    running.close()
    return losses[STOP:]


def resumed(world, name: str, directory: str) -> list[float]:
    torch.set_num_threads(1)
    running = engine(world, option(name))
    running.load(directory)
    losses = [running.step(batch).loss for batch in running.batches(data(), steps=END - STOP)]
    running.close()
    return losses


@pytest.mark.parametrize("name", [*RESUMABLE, "between_meetings", "under_way"])
def test_a_run_goes_on_as_if_it_had_not_stopped(name, tmp_path):
    through_ = run_ranks(through, 2, name, str(tmp_path))
    assert run_ranks(resumed, 2, name, str(tmp_path)) == through_


class Sometimes(nn.Module):
    """Uses one layer in some forwards alone. Biases leave gaps in a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(INPUTS, 5), nn.Linear(5, 5), nn.Linear(5, OUTPUTS)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(hidden + self.extra(hidden) if bool(x[0, 0] > 0) else hidden)


def weights_after(world, exchange: Any, directory: str, cut: bool) -> torch.Tensor:
    torch.set_num_threads(1)
    make = partial(Engine, Sometimes, regression, ADAMW, Plan(dp=world.size, exchange=exchange), world=world)
    running = make(global_batch=2, microbatch=1)
    for batch in running.batches(data(), steps=STOP):
        running.step(batch)
    if cut:
        running.save(directory)
        running.close()
        running = make(global_batch=2, microbatch=1)
        running.load(directory)
    for batch in running.batches(data(), steps=END - STOP):
        running.step(batch)
    found = torch.cat([each.detach().flatten().clone() for each in running.module.parameters()])
    running.close()
    return found


@pytest.mark.parametrize("exchange", ["delayed", {"name": "onebit_adam", "warmup": 5}])
def test_gaps_and_layers_without_a_gradient_change_nothing_of_that(exchange, tmp_path):
    through_ = run_ranks(weights_after, 2, exchange, "", False)
    assert all(map(torch.equal, run_ranks(weights_after, 2, exchange, str(tmp_path), True), through_))


@pytest.mark.parametrize("name", ["bytegrad_fed_back", "topk", "powersgd", "diloco", "local_sgd", "qadam", "delayed"])
def test_other_ranks_go_on_from_there(name, tmp_path):
    """The mean of replicas that differ, the sum of what waited: the loss stays where it was."""
    before = run_ranks(until_stop, 4, name, str(tmp_path))[0]
    after = run_ranks(at_start, 2, name, str(tmp_path))
    assert after[0]["evaluation"] == pytest.approx(before["evaluation"], rel=1e-5)
    assert all(state["evaluation"] == after[0]["evaluation"] for state in after)
    waited = sum(state["waiting"] for state in run_ranks(at_start, 4, name, str(tmp_path)))
    torch.testing.assert_close(sum(state["waiting"] for state in after), waited, rtol=1e-5, atol=1e-6)


def option(name: str) -> dict:
    return OPTIONS.get(name) or setting(name)


def describe(running) -> dict:
    residuals = [
        tensor.flatten()
        for state in running.parts.exchange.state().values()
        if state.on_resize != "mean"
        for tensor in state.tensors.values()
    ]
    waiting = torch.cat(residuals).double() if residuals else torch.zeros(1, dtype=torch.float64)
    return {"evaluation": running.evaluate(data()).loss, "waiting": waiting}


def until_stop(world, name: str, directory: str) -> dict:
    torch.set_num_threads(1)
    running = engine(world, option(name))
    for batch in running.batches(data(), steps=11):
        running.step(batch)
    running.save(directory)
    state = describe(running)
    running.close()
    return state


def at_start(world, name: str, directory: str) -> dict:
    torch.set_num_threads(1)
    running = engine(world, option(name))
    running.load(directory)
    state = describe(running)
    running.close()
    return state


def test_a_checkpoint_of_another_algorithm_is_taken_up_with_a_warning(tmp_path):
    run_ranks(through, 2, "allreduce", str(tmp_path))
    warned = run_ranks(load_with_warnings, 2, "topk", str(tmp_path))
    assert "holds no state of plan.exchange" in warned[0] and warned[1] == "", "said once, by the first rank"


def load_with_warnings(world, name: str, directory: str) -> str:
    running = engine(world, setting(name))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        running.load(directory)
    running.close()
    return " ".join(str(warning.message) for warning in caught if "plan.exchange" in str(warning.message))


def warned_of(world, name: str, directory: str, then: Any) -> list[str]:
    """What is said where the exchange changes, in memory or by a checkpoint; by rank 0."""
    running = engine(world, option(name))
    for batch in running.batches(data(), steps=12):
        running.step(batch)
    running.save(directory)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        running.replan(Plan(dp=world.size, exchange=then))
        again = engine(world, then)
        again.load(directory)
    running.close()
    again.close()
    return [str(each.message) for each in caught if "kept back" in str(each.message)]


@pytest.mark.parametrize(
    ("name", "then", "lost"),
    [
        ("topk", "allreduce", "residual"),
        ("topk", {"name": "powersgd", "rank": 2}, "residual"),  # which keeps back nothing of biases
        ("bytegrad_fed_back", {"name": "topk", "ratio": 0.1}, "own_residual, summed_residual"),
        ("delayed", "allreduce", "waiting0"),
        ("topk", {"name": "topk", "ratio": 0.5}, ""),
        ("allreduce", {"name": "topk", "ratio": 0.5}, ""),
    ],
)
def test_gradients_that_a_change_of_the_exchange_loses_are_named(name, then, lost, tmp_path):
    said = run_ranks(warned_of, 2, name, str(tmp_path), then)
    assert said[1] == [] and len(said[0]) == (2 if lost else 0)
    for each in said[0]:
        assert f"has kept back ({lost})" in each and f"{then!r} does not take them over" in each


LOCAL = {"name": "diloco", "every": 5, "outer_lr": 0.5, "outer_momentum": 0.0, "codec": "fp32", "guard": 0.0}


def masters_after(world, exchange: Any, steps: int, directory: str) -> list[torch.Tensor]:
    """All weights of this rank as they were read and after each of the steps, from a checkpoint of another exchange."""
    torch.set_num_threads(1)
    running = engine(world, exchange)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        running.load(directory)
    seen = [torch.cat([chunk.master for chunk in running.parts.chunks])]
    for batch in running.batches(data(), steps=steps):
        running.step(batch)
        seen.append(torch.cat([chunk.master for chunk in running.parts.chunks]))
    running.close()
    return seen


def test_after_another_exchange_replicas_move_from_the_weights_that_were_read(tmp_path):
    """DiLoCo's outer step goes half of the way from there to the mean; it went from the first weights of the model."""
    run_ranks(through, 2, "allreduce", str(tmp_path))
    ours, averaged = (
        run_ranks(masters_after, 2, exchange, 3, str(tmp_path))[0]
        for exchange in (LOCAL, {"name": "local_sgd", "every": 5})
    )
    torch.testing.assert_close(ours[3], (averaged[0] + averaged[3]) / 2, rtol=1e-5, atol=1e-6)


def test_after_another_exchange_no_movement_arrives_that_was_never_taken(tmp_path):
    """The fragment that would have started after step 5, two before the checkpoint, put replicas back where it was."""
    run_ranks(through, 2, "allreduce", str(tmp_path))
    ours, alone = (
        run_ranks(masters_after, 2, exchange, 4, str(tmp_path))
        for exchange in ({**LOCAL, "every": 6, "overlap": 4}, "none")
    )
    for one, other in zip(ours, alone, strict=True):
        assert torch.equal(one[4], other[4])


def test_after_another_exchange_no_gradient_is_late_yet(tmp_path):
    """A delayed step without gradients moved Adam's weights by its momentum."""
    run_ranks(through, 2, "allreduce", str(tmp_path))
    before, first, second = run_ranks(masters_after, 2, "delayed", 2, str(tmp_path))[0]
    assert torch.equal(before, first) and not torch.equal(first, second)


def variances(world) -> list[torch.Tensor]:
    """Adam's variances with their bias correction, after each step from the warm-up's last one on."""
    torch.set_num_threads(1)
    running = engine(world, {"name": "qadam", "warmup": 3})
    seen = []
    for batch in running.batches(data(), steps=STOP):
        running.step(batch)
        states = running.optimizer.torch.state.values()
        seen.append(torch.cat([(each["exp_avg_sq"] / (1 - 0.999 ** float(each["step"]))).flatten() for each in states]))
    running.close()
    return seen[2:]


def test_another_exchange_goes_on_with_the_variance_that_was_frozen():
    """Adam's own correction after 7 steps of a variance that was of the third would take 2.3 times as large steps."""
    first, *others = simulate_world(2, variances)[0]
    for each in others:
        torch.testing.assert_close(each, first, rtol=1e-5, atol=0)


def test_each_replica_s_own_state_is_saved_beside_their_mean(tmp_path):
    run_ranks(until_stop, 2, "local_sgd", str(tmp_path))
    names = tensor_names(next(Path(tmp_path).glob("step-*")))
    for rank in range(2):
        assert f"replica.{rank}.model.0.weight" in names and f"replica.{rank}.optim.0.weight.exp_avg" in names
    assert "model.0.weight" in names and "optim.0.weight.exp_avg" in names


def loaded(world, exchange: str, zero: int, directory: str) -> dict[str, torch.Tensor]:
    running = engine(world, exchange, zero=zero)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        running.load(directory)
    weights = {name: parameter.detach().clone() for name, parameter in running.parameters.items()}
    running.close()
    return weights


@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_that_may_not_differ_start_from_the_mean(zero, tmp_path):
    """Saved in the middle of local steps, read by as many ranks under a plan that keeps replicas equal."""
    run_ranks(through, 2, "local_sgd", str(tmp_path))
    apart = run_ranks(loaded, 2, "local_sgd", 0, str(tmp_path))
    first, second = run_ranks(loaded, 2, "allreduce", zero, str(tmp_path))
    for name, value in first.items():
        assert torch.equal(second[name], value)
        torch.testing.assert_close(value, (apart[0][name] + apart[1][name]) / 2, rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(apart[0][name], apart[1][name]) for name in first)
