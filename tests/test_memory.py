"""plan.memory: weights, masters and optimizer state at home on the host, within a budget of the device's memory; the
same bits as without."""

from __future__ import annotations

import math
import threading
import time
from functools import partial

import pytest
import torch
from torch import nn

from shoal import Engine, Plan, UserError
from shoal.chunks import Slot, Tier
from shoal.chunks import activations_on_host as saved
from shoal.chunks.activations import Activations
from shoal.comm import Lane, World
from shoal.comm.simulation import simulate_world
from shoal.errors import BudgetExceeded
from shoal.models import GPT, GPTConfig, causal_lm, regression
from shoal.optim.fused.host_adam import HostAdam
from shoal.optim.tiers.host import streams
from tests.exchange import teacher
from tests.parity.cases import text

STEPS = 4
EXCHANGE = {"name": "allreduce", "chunk_bytes": 20_000}


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=61, sequence=12, layers=4, d_model=32, heads=4, tied=True))


def train(
    world: World | None, memory, precision: str = "fp32", model=gpt, optimizer=teacher.ADAMW, schedule=None,
    steps=STEPS, exchange=EXCHANGE, clip=0.5, **plan
) -> tuple:  # fmt: skip
    """Losses, norms, masters; then the engine's tier, bytes that came in during the last step, sizes of the chunks, and
    the host's tier."""
    running = Engine(
        model, causal_lm, optimizer, Plan(dp=world.size if world else 1, memory=memory, exchange=exchange, **plan),
        global_batch=12, microbatch=4, clip=clip, precision=precision, world=world, dropout="fused",
        schedule=schedule,
    )  # fmt: skip
    try:
        results = []
        for batch in running.batches(text(), steps=steps):
            before = running.parts.gather.executor.bytes_in if running.parts.gather else 0
            results.append(running.step(batch))
        moved = running.parts.gather.executor.bytes_in - before if running.parts.gather else 0
        masters = {name: value.detach().clone() for name, value in running.optimizer.parameters.items()}
        sizes = [chunk.nbytes_whole for chunk in running.parts.chunks if chunk.passes]
        return (
            [r.loss for r in results],
            [r.grad_norm for r in results],
            masters,
            running.parts.tier,
            moved,
            sizes,
            running.parts.host,
        )
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
    _, _, _, free, _, sizes, _ = train(None, {}, precision, optimizer=optimizer)
    assert sum(sizes) < free.most_in_all
    moved = []
    for capacity in (least, (3 * least + free.most_in_all) // 4, (least + free.most_in_all) // 2, free.most_in_all):
        losses, norms, masters, tier, came, *_ = train(None, {"device": capacity}, precision, optimizer=optimizer)
        assert losses == whole[0] and norms == whole[1]
        assert all(torch.equal(value, whole[2][name]) for name, value in masters.items())
        assert tier.most_in_all <= capacity
        moved.append(came)
    assert moved == sorted(moved, reverse=True), "more room, fewer moves"
    assert moved[-1] == sum(sizes), "with room for all each comes once a step, for the microbatches together"
    assert moved[0] > moved[-1]


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        ("fp32", teacher.ADAMW),
        ({"name": "bf16", "master": "split"}, teacher.ADAMW),
        ({"name": "bf16", "master": "kahan"}, partial(torch.optim.NAdam, lr=3e-3)),
        ("bf16", partial(torch.optim.NAdam, lr=3e-3)),
    ],
    ids=["fp32-adamw", "bf16-split-adamw", "bf16-kahan-nadam", "bf16-nadam"],
)
def test_what_is_updated_stays_on_the_device_where_there_is_room(precision, optimizer):
    whole = train(None, {}, precision, optimizer=optimizer)
    tier, host = whole[3], whole[6]
    weights, state = tier.most_in_all, sum(host.held.values()) - host.held["weights"]
    moved = []
    for room in (weights + state // 2, weights + state):
        losses, norms, masters, tier, came, _, host = train(None, {"device": room}, precision, optimizer=optimizer)
        assert losses == whole[0] and norms == whole[1]
        assert all(torch.equal(value, whole[2][name]) for name, value in masters.items())
        assert tier.most_in_all <= room and tier.held["optimizer state"] > 0
        moved.append(came)
    assert 0 < moved[0] < whole[4] and moved[1] == 0, "half of it moves, then nothing"
    assert not any(host.held.values())


@pytest.mark.parametrize("zero", [0, 3])
def test_several_ranks_with_room_on_the_device(zero):
    whole = simulate_world(2, partial(train, zero=zero), {})
    budget = whole[0][3].most_in_all + sum(whole[0][6].held.values())
    for ours, theirs in zip(simulate_world(2, partial(train, zero=zero), {"device": budget}), whole, strict=True):
        assert ours[0] == theirs[0] and ours[1] == theirs[1]
        assert ours[4] == 0 and theirs[4] > 0, "moved in the last step"


def test_less_than_the_smallest_budget_is_refused_before_anything_is_trained():
    least = smallest()
    with pytest.raises(BudgetExceeded, match=f"{least:,} bytes are needed, the budget is {least - 1:,}"):
        train(None, {"device": least - 1})
    train(None, {"device": least})


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_with_several_ranks(zero):
    whole = simulate_world(2, train, None)
    least = max(tier.most_in_all for *_, tier, _, _, _ in simulate_world(2, partial(train, zero=zero), {}))
    for ours, theirs in zip(simulate_world(2, partial(train, zero=zero), {"device": least}), whole, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5) and ours[1] == pytest.approx(theirs[1], rel=1e-4)


@pytest.mark.parametrize("disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("optimizer", [teacher.ADAMW, partial(torch.optim.NAdam, lr=3e-3)], ids=["adamw", "nadam"])
def test_updates_during_the_next_forward_give_the_same_bits(tmp_path, optimizer, disk):
    whole = train(None, None, "bf16", optimizer=optimizer)
    memory = {"update": "deferred", "device": smallest(precision="bf16")} | ({"disk": str(tmp_path)} if disk else {})
    ours = train(None, memory, "bf16", optimizer=optimizer)
    assert ours[:2] == whole[:2]
    assert all(torch.equal(value, whole[2][name]) for name, value in ours[2].items())


@pytest.mark.parametrize("tensor", [False, True])
def test_updates_during_the_next_forward_with_a_schedule_and_several_ranks(tensor):
    """A schedule writes into a learning rate that is a tensor, before the updates with it are made."""
    lr = torch.tensor(1e-2) if tensor else 1e-2
    options = {"zero": 3, "schedule": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.3)}
    run = partial(train, **options, optimizer=partial(torch.optim.AdamW, lr=lr))
    runs = [simulate_world(2, run, memory) for memory in ({}, {"update": "deferred"})]
    assert float(lr) == pytest.approx(1e-2), "that of the factory is nobody's"
    for ours, theirs in zip(*runs, strict=True):
        assert ours[:2] == theirs[:2]


def test_the_next_forward_begins_while_updates_go_on(monkeypatch):
    """The deepest layer's update waits until the first layer has run; then a deadlock would mean that they do not
    overlap."""
    engine = Engine(
        gpt,
        causal_lm,
        teacher.ADAMW,
        Plan(memory={"update": "deferred"}, exchange=EXCHANGE),
        global_batch=12,
        microbatch=4,
    )
    first_layer_ran, waited = threading.Event(), []
    update = HostAdam.step

    def step(self, chunk, *rest):
        if chunk.index == 0:  # the deepest one, which is updated last
            waited.append(first_layer_ran.wait(30))
        update(self, chunk, *rest)

    monkeypatch.setattr(HostAdam, "step", step)
    engine.module.blocks[0].register_forward_hook(lambda *_: first_layer_ran.set() if engine.step_index >= 1 else None)
    for batch in engine.batches(text(), steps=2):
        engine.step(batch)
    engine.close()
    assert waited == [True, True]


def test_an_update_that_fails_is_raised_in_the_next_step(monkeypatch):
    engine = Engine(
        gpt,
        causal_lm,
        teacher.ADAMW,
        Plan(memory={"update": "deferred"}, exchange=EXCHANGE),
        global_batch=12,
        microbatch=4,
    )
    batches = engine.batches(text(), steps=2)

    def step(self, chunk, *rest):
        raise OSError("broken")

    monkeypatch.setattr(HostAdam, "step", step)
    engine.step(next(batches))
    with pytest.raises(OSError, match="broken"):
        engine.step(next(batches))


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        ("bf16", teacher.ADAMW),
        ("bf16", partial(torch.optim.NAdam, lr=3e-3)),
        ("fp16", partial(torch.optim.Adagrad, lr=0.01)),
    ],
    ids=["bf16-adamw", "bf16-nadam", "fp16-adagrad"],
)
def test_state_that_is_streamed_through_the_device(precision, optimizer):
    whole = train(None, {}, precision, optimizer=optimizer)
    ours = train(None, {"update": "streamed"}, precision, optimizer=optimizer)
    assert ours[:2] == whole[:2] and all(torch.equal(value, whole[2][name]) for name, value in ours[2].items())
    assert ours[3].held["optimizer state in turn"] > 0 and ours[6].held == whole[6].held
    two = simulate_world(2, partial(train, precision=precision, optimizer=optimizer, zero=3), {"update": "streamed"})
    for mine, theirs in zip(
        two, simulate_world(2, partial(train, precision=precision, optimizer=optimizer, zero=3), {}), strict=True
    ):
        assert mine[:2] == theirs[:2]


def gradient_dtypes(world: World | None, model=gpt, loss=causal_lm, data=None, **plan) -> set[torch.dtype]:
    """Of an engine whose gradients come once a step."""
    plan = Plan(memory={"update": "at once"}, **plan)
    running = Engine(model, loss, teacher.ADAMW, plan, global_batch=12, microbatch=12, precision="bf16", world=world)
    try:
        assert all(math.isfinite(running.step(batch).loss) for batch in running.batches(data or text(), steps=1))
        return {chunk.owned.gradient.dtype for chunk in running.parts.chunks if chunk.trainable}
    finally:
        running.close()


class Normed(torch.nn.Module):
    """BatchNorm keeps fp32 parameters under bf16."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(teacher.INPUTS)
        self.linear = torch.nn.Linear(teacher.INPUTS, teacher.OUTPUTS)

    def forward(self, x):
        return self.linear(self.norm(x))


def test_gradients_go_to_the_host_as_bf16_where_that_rounds_none():
    assert gradient_dtypes(None) == {torch.bfloat16}
    assert gradient_dtypes(None, Normed, regression, teacher.data()) == {torch.float32}, "those of BatchNorm are fp32"
    for plan in ({"tp": 2}, {"pp": 2}):  # ranks sum those of norms, or of tied weights
        assert simulate_world(2, partial(gradient_dtypes, **plan)) == [{torch.float32}] * 2


def test_only_masters_beside_low_precision_are_streamed(tmp_path):
    for precision, more in (("fp32", {}), ({"name": "bf16", "master": "split"}, {}), ("bf16", {"disk": str(tmp_path)})):
        with pytest.raises(UserError, match="goes with bf16 or fp16 and whole masters, without"):
            train(None, {"update": "streamed", **more}, precision)


def test_a_streamed_run_saves_and_goes_on(tmp_path):
    def make(memory) -> Engine:
        plan = Plan(memory=memory, exchange=EXCHANGE)
        return Engine(
            gpt, causal_lm, teacher.ADAMW, plan, global_batch=12, microbatch=4, precision="bf16", dropout="fused"
        )

    running = make({"update": "streamed"})
    losses = [running.step(batch).loss for batch in running.batches(text(), steps=3)]
    running.save(tmp_path)
    losses += [running.step(batch).loss for batch in running.batches(text(), steps=3)]
    running.close()
    for memory in (None, {"update": "streamed"}):
        other = make(memory)
        other.load(tmp_path)
        assert [other.step(batch).loss for batch in other.batches(text(), steps=3)] == losses[3:]
        other.close()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("link", "seconds", "answer"), [(50e9, 0.2e-9, False), (50e9, 0.4e-9, True), (10e9, 0.4e-9, False)]
)
def test_the_faster_way_to_update_by_measured_rates(link, seconds, answer):
    """12 bytes of bf16's AdamW pass each way."""
    assert streams(link, seconds, 12) is answer


@pytest.mark.parametrize(("share", "most"), [(1.0, 0.2), (0.5, 0.75)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_backward_keeps_waits_on_the_host(share, most, recompute, monkeypatch):
    monkeypatch.setattr(saved, "WORTH", 256)
    whole = train(None, {}, steps=9, recompute=recompute)
    ours = train(None, {"activations": share}, steps=9, recompute=recompute)
    assert ours[:2] == whole[:2] and all(torch.equal(value, whole[2][name]) for name, value in ours[2].items())
    if recompute == "none":
        assert ours[3].most["activations"] < most * whole[3].most["activations"]
    assert 0 < ours[6].most["activations"] <= whole[3].most["activations"] and not ours[6].held["activations"]


def test_the_first_microbatch_is_measured_as_the_later_ones(monkeypatch):
    """It sends all to the host, since nobody knows yet how much there is; what will stay takes its part all the
    same."""
    monkeypatch.setattr(saved, "WORTH", 256)

    def run(device) -> list[float]:
        plan = Plan(memory={"activations": 0.5, "device": device}, exchange=EXCHANGE)
        engine = Engine(gpt, causal_lm, teacher.ADAMW, plan, global_batch=12, dropout="fused")
        try:
            return [engine.step(batch).loss for batch in engine.batches(text(), steps=3)]
        finally:
            engine.close()

    with pytest.raises(BudgetExceeded) as failure:
        run(1000)
    least = failure.value.needed
    assert run(least) == run(least * 5 // 4) == run(2 * least) == run("1GiB")


def test_conjugates_are_saved_as_such(monkeypatch):
    monkeypatch.setattr(saved, "WORTH", 16)

    class Conjugates(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(
                torch.linspace(-1, 1, teacher.INPUTS * teacher.OUTPUTS).view(teacher.INPUTS, -1)
            )

        def forward(self, x):
            z = torch.complex(x @ self.w, x @ self.w.flip(0))
            return (z.conj() * z.conj() * self.w.sum()).imag

    def run(memory) -> list[float]:
        engine = Engine(Conjugates, regression, teacher.ADAMW, Plan(memory=memory), global_batch=16)
        results = [engine.step(batch).grad_norm for batch in engine.batches(teacher.data(), steps=3)]
        engine.close()
        return results

    assert run({"activations": 1.0}) == run(None)


def test_an_error_in_backward_leaves_nothing_booked():
    broken = [True]

    def loss(model, mb):
        total, count = causal_lm(model, mb)
        if broken[0]:
            total.register_hook(lambda grad: None)
            model.blocks[1].attention.qkv.weight.register_hook(lambda grad: 1 / 0 if broken[0] else None)
        return total, count

    engine = Engine(gpt, loss, teacher.ADAMW, Plan(memory={}, exchange=EXCHANGE), global_batch=12, microbatch=4)
    (batch,) = engine.batches(text(), steps=1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            engine.step(batch)
    broken[0] = False
    engine.step(batch)
    assert not any(engine.parts.tier.held.values())
    engine.close()


class Divergence(nn.Module):
    """Adds the slope of its layer at each row, by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(teacher.INPUTS, teacher.OUTPUTS)

    def forward(self, x):
        slopes = torch.func.vmap(torch.func.grad(lambda row: self.inner(row).tanh().sum()))(x)
        return self.inner(x) + slopes.sum(1, keepdim=True)


def test_derivatives_by_torch_func_are_refused_where_it_is_seen_what_backward_keeps():
    """It was an error of torch."""
    engine = Engine(Divergence, regression, teacher.ADAMW, Plan(memory={}), global_batch=8, microbatch=4)
    with pytest.raises(UserError, match=r"takes derivatives by torch.func .* as under plan.memory"):
        engine.step(next(engine.batches(teacher.data(), steps=1)))
    engine.close()


def test_training_inside_whole_weights_is_refused():
    engine = Engine(gpt, causal_lm, teacher.ADAMW, Plan(memory={}), global_batch=12, microbatch=4)
    with engine.whole_weights(), pytest.raises(UserError, match="Train outside"):
        engine.step(next(engine.batches(text(), steps=1)))
    loop = engine.loop()
    with engine.whole_weights(), pytest.raises(UserError, match="Train outside"):
        loop(torch.zeros(1, 12, dtype=torch.int64))
    engine.close()


def test_options_of_some_groups_are_theirs():
    """The kernel for the host knows no amsgrad; torch's fused SGD no dampening, and its other one no scale."""

    def run(optimizer, rule, memory) -> list[float]:
        engine = Engine(
            teacher.student, regression, optimizer, Plan(memory=memory), global_batch=16, param_groups=rule, clip=0.1
        )
        losses = [engine.step(batch).loss for batch in engine.batches(teacher.data(), steps=6)]
        engine.close()
        return losses

    amsgrad = partial(torch.optim.AdamW, lr=0.05), lambda name, _: {"amsgrad": name[0] == "0", "betas": (0.5, 0.5)}
    dampening = teacher.SGD, lambda name, _: {"momentum": 0.9, "dampening": 0.3 * (name[0] == "0")}
    for optimizer, rule in (amsgrad, dampening):
        memory = {"device": "1GiB", "chunk": 1000}
        assert run(optimizer, rule, memory) == pytest.approx(run(optimizer, rule, None), rel=1e-5)


def test_weights_are_read_when_a_deferred_update_is_over(monkeypatch):
    update = HostAdam.step

    def step(self, chunk, *rest):
        time.sleep(0.05)
        update(self, chunk, *rest)

    monkeypatch.setattr(HostAdam, "step", step)
    plan = Plan(memory={"update": "deferred", "chunk": 1000})
    engine = Engine(teacher.student, regression, teacher.ADAMW, plan, global_batch=16)
    engine.step(next(engine.batches(teacher.data(), steps=1)))
    seen = {name: value.clone() for name, value in engine.weights_on_first().items()}
    assert all(torch.equal(seen[name], value) for name, value in engine.optimizer.masters().items())
    engine.close()


def test_an_evaluation_in_the_middle_of_a_step_of_a_loop():
    def run(memory) -> list[float]:
        engine = Engine(teacher.student, regression, teacher.SGD, Plan(memory=memory), global_batch=2, microbatch=1)
        loop, losses = engine.loop(2), []
        for sample in teacher.data(8):
            loss = (loop(sample["inputs"][None]) - sample["targets"]).square().mean()
            loop.backward(loss)
            losses += [float(loss), engine.evaluate(teacher.data(5)).loss]
            loop.step()
        engine.close()
        return losses

    assert run({"chunk": 1000}) == pytest.approx(run(None), rel=1e-5)


def test_with_activations_on_the_host_a_smaller_budget_does(monkeypatch):
    monkeypatch.setattr(saved, "WORTH", 256)
    least = smallest()
    with pytest.raises(BudgetExceeded) as failure:
        train(None, {"device": 1000, "activations": 1.0})
    assert failure.value.needed < least
    assert train(None, {"device": failure.value.needed + 4096, "activations": 1.0})[0] == train(None, None)[0]


def test_one_storage_goes_once(monkeypatch):
    """A tensor that two operations save, and views of it, are one copy."""
    monkeypatch.setattr(saved, "WORTH", 256)
    lane, host, device = Lane(torch.device("cpu")), Tier("host"), Tier("device")
    on_host = saved.OnHost(1.0, lane, host, Activations(device))
    x = torch.arange(1000.0)
    one, other, view = (on_host.save(tensor) for tensor in (x, x, x[100:200].view(10, 10)))
    assert on_host.bytes_out == x.nbytes == host.held["activations"]
    on_host._let_go(0)
    x.mul_(2)  # another version
    later = on_host.save(x)
    assert on_host.bytes_out == 2 * x.nbytes
    back = [on_host.restore(each, x.device, True) for each in (view, other, one, later)]
    assert torch.equal(back[0], torch.arange(100.0, 200).view(10, 10)) and torch.equal(back[1], back[2])
    assert torch.equal(back[3], x) and torch.equal(back[1] * 2, x)
    lane.close()
    assert device.held["activations"] == 2 * x.nbytes, "what has come back"


def test_the_share_is_of_storages_however_often_they_are_saved(monkeypatch):
    monkeypatch.setattr(saved, "WORTH", 256)
    lane = Lane(torch.device("cpu"))
    on_host, sent = saved.OnHost(0.5, lane, Tier("host"), None), []
    for _ in range(4):
        before = on_host.bytes_out
        tensors = [torch.arange(1000.0) for _ in range(8)]
        kept = [on_host.save(tensor) for tensor in tensors for _ in range(3)]
        back = [on_host.restore(each, tensors[0].device, True) for each in reversed(kept) if each is not None]
        assert all(torch.equal(each, tensors[0]) for each in back)
        on_host.begin()
        sent.append(on_host.bytes_out - before)
    lane.close()
    assert sent == [32_000, 16_000, 16_000, 16_000]


def test_forwards_of_a_pipeline_have_their_share_each(monkeypatch):
    """Several microbatches go forward before the first comes back: of each of them but the first half goes."""
    monkeypatch.setattr(saved, "WORTH", 256)
    lane = Lane(torch.device("cpu"))
    on_host, sent, under_way = saved.OnHost(0.5, lane, Tier("host"), None), [], []
    for microbatch in range(5):
        before = on_host.bytes_out
        under_way.append([on_host.save(torch.arange(1000.0)) for _ in range(8)])
        on_host.forward_is_over()
        sent.append(on_host.bytes_out - before)
        if microbatch >= 2:  # three are under way
            for each in reversed(under_way.pop(0)):
                if each is not None:
                    on_host.restore(each, torch.device("cpu"), True)
            on_host.begin()
    lane.close()
    assert sent == [32_000, 16_000, 16_000, 16_000, 16_000]


class ChangesWhatItHasUsed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(teacher.INPUTS, teacher.OUTPUTS))

    def forward(self, x):
        hidden = x @ self.weight
        out = hidden * hidden
        hidden.add_(1)
        return out


@pytest.mark.parametrize("memory", [{}, {"activations": 1.0}])
def test_what_was_changed_in_place_is_an_error_as_in_torch(memory, monkeypatch):
    monkeypatch.setattr(saved, "WORTH", 16)
    engine = Engine(ChangesWhatItHasUsed, regression, teacher.ADAMW, Plan(memory=memory), global_batch=16)
    with pytest.raises(UserError, match="was changed in place after it had been used"):
        for batch in engine.batches(teacher.data(), steps=1):
            engine.step(batch)


def test_ranks_with_unequal_shares_make_the_same_moves():
    """The last batch has five samples: one rank has four of them. What each keeps of them differs, what they gather
    together must not."""
    whole = simulate_world(2, partial(train, zero=3, steps=9), {})
    tight = max(tier.most["weights in use"] // 2 + tier.most["activations"] for _, _, _, tier, *_ in whole)
    for ours, theirs in zip(simulate_world(2, partial(train, zero=3, steps=9), {"device": tight}), whole, strict=True):
        assert ours[:2] == theirs[:2]


def test_recompute_needs_less():
    assert smallest(recompute="full") < smallest()
    assert train(None, {"device": smallest(recompute="full")}, recompute="full")[0] == train(None, None)[0]


def test_save_and_load_across(tmp_path):
    def make(memory) -> Engine:
        return Engine(
            gpt, causal_lm, teacher.ADAMW, Plan(memory=memory, exchange=EXCHANGE), global_batch=12, microbatch=4
        )

    running, losses = make({"device": "1GiB"}), []
    for batch in running.batches(text(), steps=4):
        losses.append(running.step(batch).loss)
        if batch.step == 1:
            running.save(tmp_path)
    for memory in (None, {"device": "1GiB"}):
        other = make(memory)
        other.load(tmp_path)
        assert [other.step(batch).loss for batch in other.batches(text(), steps=2)] == losses[2:]


@pytest.mark.parametrize("zero", [0, 3])
def test_every_size_of_chunk_gives_the_same_bits(zero):
    first, *others = (
        simulate_world(2, partial(train, exchange="allreduce", zero=zero, clip=None), memory)
        for memory in ({"chunk": "10KiB"}, {"chunk": 30_000}, {"chunk": "1MiB"})
    )
    counts = {len(first[0][5])}
    for ranks in others:
        counts.add(len(ranks[0][5]))
        for ours, theirs in zip(ranks, first, strict=True):
            assert ours[0] == theirs[0]
    assert len(counts) == 3, "each size cut the model otherwise"


def test_a_budget_chooses_chunks_that_fit_it():
    """One chunk of everything, the usual size, would not."""
    with pytest.raises(BudgetExceeded):
        train(None, {"device": 500_000, "chunk": "1MiB"}, exchange="allreduce")
    chosen = train(None, {"device": 500_000}, exchange="allreduce")
    assert chosen[3].most_in_all <= 500_000
    assert chosen[:2] == train(None, None)[:2]


def test_two_who_say_how_large_a_chunk_is():
    with pytest.raises(UserError, match="both say how large a chunk is"):
        train(None, {"chunk": "1MiB"})


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"devise": "1GiB"}, 'plan.memory has no key "devise". Did you mean "device"?'),
        ({"device": "1GiG"}, "plan.memory.device = '1GiG': give bytes, or a text such as"),
        ({"chunk": "0"}, "plan.memory.chunk = '0': give at least 1 byte, or a text such as"),
        ("all", "plan.memory = 'all': give \"auto\", or a table"),
        ({"activations": 2}, "plan.memory.activations = 2: give the share"),
        ({"update": "never"}, "plan.memory.update = 'never': give one of auto, at once, deferred, streamed"),
    ],
)
def test_wrong_tables_are_refused_by_name(memory, message):
    with pytest.raises(UserError) as error:
        Engine(teacher.student, regression, teacher.ADAMW, Plan(memory=memory), global_batch=16)
    assert message in str(error.value)


def test_exchanges_that_need_weights_or_whole_gradients_are_refused():
    with pytest.raises(UserError, match=r'"local_sgd" does not go with plan\.memory'):
        Engine(teacher.student, regression, teacher.ADAMW, Plan(memory={}, exchange="local_sgd"), global_batch=16)


@pytest.mark.parametrize("memory", [{}, {"device": "auto", "update": "deferred"}])
def test_gradients_are_bf16_on_the_host_where_that_loses_nothing(memory):
    """One rank, one microbatch: what autograd gives is what is updated with."""

    def run(memory) -> tuple:
        engine = Engine(
            gpt,
            causal_lm,
            teacher.ADAMW,
            Plan(memory=memory, exchange=EXCHANGE),
            global_batch=12,
            clip=0.5,
            precision="bf16",
        )
        results = [engine.step(batch) for batch in engine.batches(text(), steps=6)]
        masters = {name: value.detach().clone() for name, value in engine.optimizer.parameters.items()}
        held = engine.parts.host.held["gradients"] if engine.parts.host else 0
        engine.close()
        return [r.loss for r in results], [r.grad_norm for r in results], masters, held

    whole, ours = run(None), run(memory)
    assert ours[:2] == whole[:2] and all(torch.equal(value, whole[2][name]) for name, value in ours[2].items())
    assert ours[3] == sum(2 * (value.numel() + -value.numel() % 32) for value in whole[2].values()), (
        "two bytes each, and padding"
    )


def thirds(norms) -> dict[str, float]:
    return dict.fromkeys(norms, 1 / 3)


def kept_by_a_hook() -> torch.nn.Module:
    model = teacher.student()

    def less(parameter: torch.Tensor) -> None:
        parameter.grad = parameter.grad / 3

    model[0].weight.register_post_accumulate_grad_hook(less)
    return model


@pytest.mark.parametrize(
    ("model", "more"),
    [(teacher.student, {"clip": thirds}), (teacher.student, {"keep_gradients": True}), (kept_by_a_hook, {})],
    ids=["clip", "kept", "hook"],
)
def test_gradients_that_are_more_than_handed_on_are_not_rounded_to_bf16(model, more):
    def run(memory) -> tuple:
        plan = Plan(memory=memory)
        engine = Engine(model, regression, teacher.ADAMW, plan, global_batch=16, precision="bf16", **more)
        results = [engine.step(batch) for batch in engine.batches(teacher.data(), steps=4)]
        masters = {name: value.detach().clone() for name, value in engine.optimizer.parameters.items()}
        gradients = engine.gradients() if "keep_gradients" in more else {}
        engine.close()
        return [r.loss for r in results], masters, gradients

    whole, ours = run(None), run({})
    assert ours[0] == whole[0]
    for mine, theirs in zip(ours[1:], whole[1:], strict=True):
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_masters_that_are_changed_by_hand_reach_weights_that_a_step_leaves_alone():
    engine = Engine(teacher.student, regression, teacher.ADAMW, Plan(memory={}), global_batch=16, precision="bf16")
    engine.module[0].requires_grad_(False)
    for batch in engine.batches(teacher.data(), steps=2):
        with torch.no_grad():
            engine.optimizer.parameters["0.weight"].mul_(2)
        engine.step(batch)
        with engine.whole_weights():
            assert torch.equal(engine.parameters["0.weight"], engine.optimizer.masters()["0.weight"].bfloat16())
    engine.close()


class Empty(torch.nn.Linear):
    """Ends with a parameter of no elements, where its chunk ends."""

    def __init__(self) -> None:
        super().__init__(teacher.INPUTS, teacher.OUTPUTS)
        self.none = torch.nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.none.sum()


def test_a_parameter_of_no_elements_is_somebodys(tmp_path):
    """A checkpoint did not have it, and so could not be read."""
    slot = Slot("none", torch.Size([0, 3]), 64)
    assert [slot.between(start, start + 32) is not None for start in (0, 32, 64)] == [False, True, False]
    assert Slot("none", torch.Size([0, 3]), 0).between(0, 32) is not None

    class Last(Empty):
        def named_parameters(self, *args, **kwargs):  # the order of gradients is the other way around
            return iter(reversed(list(super().named_parameters(*args, **kwargs))))

    for model in (Empty, Last):
        engine = Engine(model, regression, teacher.ADAMW, Plan(memory={}), global_batch=16)
        for batch in engine.batches(teacher.data(), steps=2):
            engine.step(batch)
        engine.save(tmp_path / model.__name__)
        engine.load(tmp_path / model.__name__)
        assert "none" in engine.optimizer.known
        engine.close()
