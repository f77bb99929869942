"""State dicts and checkpoints of the doors: whole weights on every rank, any plan reads them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from shoal import CheckpointError, Engine, UserError, initialize_engine
from shoal.comm import World
from shoal.models import regression
from tests.doors.loops import INPUTS, OUTPUTS, Net, microbatch
from tests.exchange import teacher
from tests.pool import apart, run_ranks

FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
PLANS = {
    "0": {},
    "2": {"zero_optimization": {"stage": 2}},
    "3-offload": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    "3-fp16": {"zero_optimization": {"stage": 3}, "fp16": FP16},
}


def door(world, plan: str, model=Net):
    torch.manual_seed(5)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_type": "linear"}},
        **PLANS[plan],
    }
    return initialize_engine(model, None, config, world=world)


def train(world, model, optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        model.backward(model(microbatch(model.engine.step_index, world.rank, 0)))
        optimizer.step()
        losses.append(model.result.loss)
    return losses


class Tied(nn.Module):
    """A weight with two names, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(INPUTS, INPUTS).requires_grad_(False)
        self.outward = nn.Linear(INPUTS, OUTPUTS)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch):
        if self.training:
            self.seen += 1
        return (self.outward(self.frozen(self.second(self.first(batch["x"])))) - batch["y"]).square().mean()


def round_trip(world, plan: str) -> tuple[dict, dict, list, dict]:
    world = apart(world)
    model, optimizer = door(world, plan, Tied)
    train(world, model, optimizer, 3)
    trained = model.state_dict()
    other, _ = door(world, plan, Tied)
    names = other.load_state_dict({**trained, "more": torch.ones(1)})
    back = other.state_dict()
    with torch.no_grad():
        other.eval()
        losses = [float(each(microbatch(50, 0, 0))) for each in (model.eval(), other)]
    model.close()
    other.close()
    return trained, back, list(names), {"losses": losses}


@pytest.mark.parametrize("plan", PLANS)
def test_whole_weights_go_out_and_come_back(plan):
    for trained, back, names, more in run_ranks(round_trip, 2, plan):
        assert list(trained) == list(Tied().state_dict()), "names and order of one process"
        for name, value in trained.items():
            assert torch.equal(back[name], value) and torch.isfinite(value).all(), name
        assert torch.equal(trained["second.weight"], trained["first.weight"])
        assert float(trained["seen"]) == 6, "three steps of two microbatches, one a rank"
        assert trained["first.weight"].dtype == torch.float32, "masters, also under fp16"
        assert names == [[], ["more"]] and more["losses"][0] == more["losses"][1]
        Tied().load_state_dict(trained)


def test_weights_of_any_plan_are_alike_on_all_ranks():
    states = [state for plan in ("0", "2", "3-offload") for state, *_ in run_ranks(round_trip, 2, plan)]
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=1e-4, atol=1e-6)


def test_wrong_states_are_refused():
    model, _ = door(World.single(device="cpu"), "0")
    good = model.state_dict()
    with pytest.raises(UserError, match=r"the state lacks \['scale'\], and has nothing"):
        model.load_state_dict({name: value for name, value in good.items() if name != "scale"}, strict=True)
    wrong = {**{name: value + 1 for name, value in good.items()}, "outward.bias": torch.zeros(3)}
    with pytest.raises(UserError, match=r"outward.bias has shape \(3,\) in the state, the model wants \(4,\)"):
        model.load_state_dict(wrong)
    assert all(torch.equal(value, good[name]) for name, value in model.state_dict().items()), "nothing was changed"


def optimizer_state(world, plan: str) -> tuple[list[float], list[float], bool]:
    """Losses that follow, and loss scales, when one goes on, and when another does from its state dicts."""
    world = apart(world)
    model, optimizer = door(world, plan)
    train(world, model, optimizer, 3)
    weights, state = model.state_dict(), copy.deepcopy(optimizer.state_dict())
    schedule = model.lr_scheduler.state_dict()
    went_on = train(world, model, optimizer, 3)
    other, other_optimizer = door(world, plan)
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(state)
    other.lr_scheduler.load_state_dict(schedule)
    again = train(world, other, other_optimizer, 3)
    if model.engine.loss_scale is not None:
        went_on, again = (
            losses + each.engine.loss_scale.state() for losses, each in ((went_on, model), (again, other))
        )
    refused = False
    if world.size > 1:
        theirs = world.everyone.broadcast_object(state)
        try:
            other_optimizer.load_state_dict(theirs)
        except UserError as error:
            refused = "each rank loads its own, under the same plan" in str(error)
    model.close()
    other.close()
    return went_on, again, refused


@pytest.mark.parametrize("plan", PLANS)
def test_an_optimizer_goes_on_from_its_state(plan):
    for rank, (went_on, again, refused) in enumerate(run_ranks(optimizer_state, 2, plan)):
        assert again == went_on
        assert refused == (rank == 1), "that of another rank"


def save(world, plan: str, directory: str, tag: str | None) -> list[float]:
    model, optimizer = door(apart(world), plan)
    train(world, model, optimizer, 3)
    model.save_checkpoint(directory, tag, {"epoch": 7})
    losses = train(world, model, optimizer, 3)
    model.close()
    return losses


def load(world, plan: str, directory: str, tag: str | None) -> tuple[list[float], dict, int]:
    model, optimizer = door(apart(world), plan)
    _, client = model.load_checkpoint(directory, tag)
    at = model.engine.step_index
    losses = train(world, model, optimizer, 3)
    model.close()
    return losses, client, at


@pytest.mark.parametrize(
    ("before", "after", "tag"), [("0", "3-offload", None), ("3-offload", "2", "best"), ("3-fp16", "3-fp16", None)]
)
def test_a_checkpoint_goes_on_under_any_plan(before, after, tag, tmp_path):
    expected = run_ranks(save, 2, before, str(tmp_path), tag)[0]
    for losses, client, at in run_ranks(load, 2, after, str(tmp_path), tag):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert client == {"epoch": 7} and at == 3
    assert list((tmp_path / (tag or "")).glob("step-*"))


def test_checkpoints_are_kept_and_a_missing_one_is_said(tmp_path):
    world = World.single(device="cpu")
    model, optimizer = door(world, "0")
    for _ in range(5):
        train(world, model, optimizer, 1)
        model.save_checkpoint(tmp_path)
    assert len(list(tmp_path.glob("step-*"))) == 5
    torch.manual_seed(77)
    other, _ = initialize_engine(Net, None, {"optimizer": {}}, world=world)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".* is used from here on")  # of what was given otherwise
        other.load_checkpoint(tmp_path)
    assert other.engine.seed == 77 and other.engine.step_index == 5
    with pytest.raises(CheckpointError, match="no checkpoint to load"):
        model.load_checkpoint(tmp_path, "best")
    model.close()


def test_a_loop_of_a_plain_engine_shares_its_steps():
    """`Engine.loop` beside `Engine.step`: one count of steps."""
    engine = Engine(teacher.student, regression, teacher.ADAMW, global_batch=16, microbatch=8)
    loop = engine.loop()
    (batch,) = engine.batches(teacher.data(), steps=1)
    first = engine.step(batch)
    loop.backward((loop(torch.ones(4, teacher.INPUTS))).square().mean())
    assert loop.step().step == 1 and first.step == 0 and engine.step_index == 2
    (batch,) = engine.batches(teacher.data(), steps=1)
    assert batch.step == 2 and engine.step(batch).loss < 10
