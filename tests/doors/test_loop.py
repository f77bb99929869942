"""A loop that the caller owns: accumulation, forwards outside of steps, rates that the caller changes, and what it must
not do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from shoal import Engine, Plan, TrainingError, UserError, initialize_engine
from shoal.comm import World
from shoal.data import Batch
from shoal.doors import Model
from shoal.training.loop import callers_loss
from tests.chunks.test_gather import Mixed
from tests.doors.loops import HIDDEN, INPUTS, OUTPUTS, Net, assert_alike, by_torch, microbatch, through_the_door
from tests.pool import apart, run_ranks

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0, "train_micro_batch_size_per_gpu": 8}
HOSTS = {**SGD, "zero_optimization": {"stage": 3}}


def alone(config=SGD, model=Net):
    return initialize_engine(model, None, config, world=World.single(device="cpu"))


def test_before_the_boundary_a_step_does_nothing():
    model, optimizer = alone({**SGD, "gradient_accumulation_steps": 3})
    boundaries, moved = [], []
    for number in range(6):
        before = model.module.outward.weight.clone()
        boundaries.append(model.is_gradient_accumulation_boundary())
        model.backward(model(microbatch(0, 0, number)))
        assert model.is_gradient_accumulation_boundary() == boundaries[-1], "also after backward"
        (model if number % 2 else optimizer).step()
        moved.append(not torch.equal(model.module.outward.weight, before))
    assert boundaries == moved == [False, False, True] * 2
    assert model.engine.step_index == 2


def evaluated(world, config) -> tuple[list[float], list[float]]:
    """Losses of a no-grad forward in evaluation mode between steps, in the middle of one, and those of training."""
    torch.manual_seed(5)
    model, optimizer = initialize_engine(Net, None, config, world=apart(world))
    seen, losses = [], []

    def look() -> None:
        model.eval()
        with torch.no_grad():
            seen.append(float(model(microbatch(99, 0, 0))))
        model.train()

    for step in range(4):
        look()
        for number in range(2):
            loss = model(microbatch(step, world.rank, number))
            model.backward(loss)
            if number == 0:
                look()
            optimizer.step()
        losses.append(model.result.loss)
    model.close()
    return seen, losses


def test_evaluation_between_and_within_steps_where_weights_pass():
    config = {**HOSTS, "gradient_accumulation_steps": 2}
    (seen, losses), other = run_ranks(evaluated, 2, config)
    assert (seen, losses) == other
    assert seen[0::2] == seen[1::2], "weights change with steps only"
    assert len(set(seen)) == 4
    plain = run_ranks(through_the_door, 2, config, 4, True)[0]
    assert losses == plain["losses"], "and looking changes nothing"


def _lrs_by_hand(optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("how", ["hand", "torch"])
def test_rates_that_the_caller_changes_are_taken(how, stage):
    model, optimizer = alone(
        {**SGD, "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu" if stage else "none"}}}
    )
    before, losses, rates = model.state_dict(), [], []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if how == "torch" else None
    for step in range(6):
        if scheduler is None:
            _lrs_by_hand(optimizer, step)
        rates.append(optimizer.param_groups[0]["lr"])
        model.backward(model(microbatch(step, 0, 0)))
        optimizer.step()
        losses.append(model.result.loss)
        if scheduler is not None:
            scheduler.step()
    assert rates == pytest.approx(
        [0.1 / (s + 1) for s in range(6)] if scheduler is None else [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    )
    expected = by_torch(before, partial(torch.optim.SGD, lr=0.1), 6, lrs=rates)
    assert_alike({"losses": losses, "after": model.state_dict()}, expected)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Dropout(0.5), nn.Linear(HIDDEN, OUTPUTS))

    def forward(self, batch):
        return (self.body(batch["x"]) - batch["y"]).square().mean() + 0 * torch.rand(()).item()


def test_draws_are_keyed_and_the_callers_generator_is_left_alone():
    def run() -> tuple[list[float], torch.Tensor]:
        model, optimizer = alone(model=Dropping)
        torch.manual_seed(3)
        losses = []
        for _ in range(3):
            model.backward(model(microbatch(0, 0, 0)))
            optimizer.step()
            losses.append(model.result.loss)
        return losses, torch.rand(4)

    torch.manual_seed(11)
    first = run()
    torch.manual_seed(11)
    again = run()
    assert first[0] == again[0] and len(set(first[0])) == 3
    torch.manual_seed(3)
    assert torch.equal(first[1], torch.rand(4))
    torch.manual_seed(12)
    assert run()[0] != first[0], "the seed is torch's"


def first_masks(world) -> list[float]:
    """Each rank's loss on the same data, whose only difference is what was dropped."""
    torch.manual_seed(1)
    model, _ = initialize_engine(Dropping, None, {**SGD, "gradient_accumulation_steps": 2}, world=world)
    losses = []
    for _ in range(2):
        loss = model(microbatch(0, 0, 0))
        model.backward(loss)
        model.step()
        losses.append(float(loss.detach()))
    model.close()
    return losses


def test_ranks_and_microbatches_drop_different_elements():
    drawn = [loss for losses in run_ranks(first_masks, 2) for loss in losses]
    assert len(set(drawn)) == 4


class Looks(nn.Module):
    """Sees which dropout there is in its forward and in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.seen = nn.Linear(INPUTS, OUTPUTS), []

    def forward(self, batch):
        look = lambda *_: self.seen.append(nn.functional.dropout)  # noqa: E731
        look()
        out = self.body(batch["x"])
        out.register_hook(look)
        return out.square().mean()


def test_forward_and_backward_are_keyed_and_nothing_between():
    plain = nn.functional.dropout
    model, _ = alone(model=Looks)
    loss = model(microbatch(0, 0, 0))
    assert nn.functional.dropout is plain
    model.backward(loss)
    assert len(model.module.seen) == 2 and plain not in model.module.seen and nn.functional.dropout is plain


def outputs_of(world, hosts: bool, **plan) -> tuple[list[float], dict, int]:
    """Losses and weights where the model gives outputs, and the caller computes the loss and reads a weight itself; how
    many chunks pass."""
    world = apart(world) if hosts else world
    spread = Plan(dp=world.size, exchange={"name": "allreduce", "chunk_bytes": 4096}, **plan)
    engine = Engine(
        Mixed,
        callers_loss,
        partial(torch.optim.SGD, lr=0.1),
        spread,
        global_batch=world.size,
        microbatch=1,
        world=world,
    )
    model = Model(engine)
    draw, losses = torch.Generator().manual_seed(4), []
    for _ in range(4):
        x, y = torch.randn(8, INPUTS, generator=draw), torch.randn(8, OUTPUTS, generator=draw)
        mine = slice(4 * world.rank, 4 * world.rank + 4) if world.size > 1 else slice(None)
        loss = (model(x[mine]) - y[mine]).square().mean() + model.module.inward.weight.square().sum() * 1e-3
        model.backward(loss)
        model.step()
        losses.append(model.result.loss)
    passing = engine.parts.gather
    after, moved = model.state_dict(), 0 if passing is None else passing.executor.bytes_in
    model.close()
    return losses, after, moved


@pytest.mark.parametrize(
    ("hosts", "plan"),
    [(False, {}), (False, {"zero": 3}), (True, {"zero": 3}), (False, {"zero": 3, "memory": {"device": 160_000}})],
    ids=["replicas", "host", "hosts", "budget"],
)
def test_the_caller_may_compute_the_loss_and_read_weights_in_it(hosts, plan):
    ((losses, weights, _),) = run_ranks(outputs_of, 1, False)
    for theirs in run_ranks(partial(outputs_of, **plan), 2, hosts):
        assert theirs[0] == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(theirs[1], weights, rtol=1e-4, atol=1e-6)
        assert bool(theirs[2]) == (hosts or "memory" in plan)


def test_a_forward_without_a_backward_is_forgotten():
    model, optimizer = alone({**SGD, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    assert model.engine.parts.gather is not None
    model(microbatch(7, 0, 0))
    before = model.state_dict()
    losses = []
    for step in range(3):
        model(microbatch(9, 0, 0))
        model.backward(model(microbatch(step, 0, 0)))
        optimizer.step()
        losses.append(model.result.loss)
    assert_alike({"losses": losses, "after": model.state_dict()}, by_torch(before, partial(torch.optim.SGD, lr=0.1), 3))


def test_after_an_error_in_the_model_the_step_begins_anew():
    model, optimizer = alone({**SGD, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    before, losses = model.state_dict(), []
    for step in range(3):
        with pytest.raises(KeyError):
            model({"x": microbatch(step, 0, 0)["x"]})
        model.backward(model(microbatch(step, 0, 0)))
        optimizer.step()
        losses.append(model.result.loss)
    assert_alike({"losses": losses, "after": model.state_dict()}, by_torch(before, partial(torch.optim.SGD, lr=0.1), 3))


def test_what_a_loop_must_not_do_is_said():
    model, optimizer = alone()
    loss = model(microbatch(0, 0, 0))
    with pytest.raises(UserError, match=r"one number that depends on the weights; it got a tensor of shape \(2,\)"):
        model.backward(torch.ones(2, requires_grad=True))
    with pytest.raises(UserError, match="it got a float"):
        model.backward(0.5)
    with pytest.raises(UserError, match=r"call model.backward\(loss\), not loss.backward\(\)"):
        optimizer.step()
    with pytest.raises(UserError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(UserError, match="parameters cannot be added later"):
        optimizer.add_param_group({"params": []})
    model.backward(loss)
    with pytest.raises(UserError, match=r"step 0 has had its 1 backward\(s\) on this rank: call step\(\) first"):
        model.backward(model(microbatch(0, 0, 1)))
    with pytest.raises(UserError, match=r"1 of 1 microbatches of step 0 are accumulated: do this after step\(\)"):
        model.state_dict()
    optimizer.step()
    with pytest.raises(UserError, match="backward without a forward"):
        model.backward(torch.ones((), requires_grad=True))
    with pytest.raises(UserError, match=r"drop .to\(\), .cuda\(\)"):
        model.half()
    with pytest.raises(UserError, match="this engine has no loss function"):
        model.engine.evaluate([{"x": torch.zeros(1)}])


def test_an_engine_is_not_saved_in_the_middle_of_an_accumulation(tmp_path):
    """A run that goes on from there would lose the microbatches that came before."""
    engine = Engine(Net, callers_loss, partial(torch.optim.SGD, lr=0.1), global_batch=2, microbatch=1)
    loop = engine.loop(2)

    def step(_) -> None:
        engine.step(Batch(engine.step_index, 0, (0,), lambda ids: {}))

    for _ in range(2):
        loop.backward(loop(microbatch(0, 0, 0)))
        if loop.step() is None:
            for between in (engine.save, engine.load, step):
                with pytest.raises(UserError, match=r"1 of 2 microbatches of step 0 are accumulated: do this after"):
                    between(tmp_path)
    engine.save(tmp_path)
    engine.load(tmp_path)
    engine.close()


def test_a_loss_that_is_not_finite_leaves_the_weights():
    model, optimizer = alone()
    before = model.state_dict()
    model.backward(model(microbatch(0, 0, 0)) * float("nan"))
    with pytest.raises(TrainingError, match="step 0: the loss is nan"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.backward(model(microbatch(0, 0, 0)))
    optimizer.step()
    assert model.engine.step_index == 1


def test_clip_value_needs_a_number_and_an_algorithm_that_leaves_updates_to_the_optimizer():
    make = partial(Engine, Net, callers_loss, torch.optim.Adam, global_batch=1)
    with pytest.raises(UserError, match="clip_value = 0: give a number above 0"):
        make(clip_value=0)
    with pytest.raises(UserError, match='"qadam" updates by itself, without clip_value: use clip'):
        make(plan=Plan(exchange="qadam"), clip_value=1.0)


def replanned(world) -> None:
    """A caller's loop goes on when the engine's plan changes, and a plan that knows no such loop is refused first."""
    torch.manual_seed(5)
    config = {**SGD, "gradient_accumulation_steps": 2}
    (model, optimizer), (twin, other) = (initialize_engine(Net, None, config, world=world) for _ in range(2))
    for step, plan in enumerate([Plan(dp=2, zero=1), Plan(pp=2), Plan(dp=2, zero=3), Plan(dp=2)]):
        for each, optim in ((model, optimizer), (twin, other)):
            for number in range(2):
                loss = each(microbatch(step, world.rank, number))
                each.backward(loss)
                optim.step()
        assert model.result.loss == pytest.approx(twin.result.loss, rel=1e-6)
        model.eval()
        if plan.pp == 2:
            with pytest.raises(UserError, match=r"plan.pp > 1 runs forwards"):
                model.engine.replan(plan)
        else:
            model.engine.replan(plan)
        assert not model.module.training and model.module is model.engine.module
        assert [id(each) for each in model.parameters()] == [id(each) for each in model.engine.module.parameters()]
        model.train()
    mine, its = model.state_dict(), twin.state_dict()
    for name, value in its.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-6)
    model.close(), twin.close()


def test_a_loop_goes_on_under_another_plan():
    run_ranks(replanned, 2)
