"""Optimizers over flat storage: the bits of the optimizer over the parameters, in weights and in state, whatever is
left out when."""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.errors import UserError
from shoal.optim.fused import BLOCK, FlatOptimizer, flatten, fuse, refusal

SHAPES = ((7, 9), (5,), (), (0,), (33,), (2, 3, 4), (1,))


class Lion(torch.optim.Optimizer):
    """A custom elementwise optimizer with a Python count, a count in the group, and state that is bound anew
    (`rebind`)."""

    def __init__(self, params, lr=1e-2, weight_decay=0.0, rebind=False):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "rebind": rebind, "updates": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["updates"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("exp_avg", torch.zeros_like(p))
                state["n"] = state.get("n", 0) + 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = (0.9 * state["exp_avg"] + 0.1 * p.grad).sign() / (state["n"] + group["updates"])
                p.sub_(group["lr"] * update)
                if group["rebind"]:
                    state["exp_avg"] = 0.99 * state["exp_avg"] + 0.01 * p.grad
                else:
                    state["exp_avg"].mul_(0.99).add_(p.grad, alpha=0.01)


class NormalisedSGD(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / p.grad.norm())


class NoisySGD(Lion):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * (p.grad + torch.randn_like(p)))


class NeedsClosure(Lion):
    def step(self, closure=None):
        return super().step(closure())


optim = torch.optim
FACTORIES: dict[str, Callable] = {
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": partial(optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adam foreach": partial(optim.Adam, lr=0.01, foreach=True),
    "adamw": partial(optim.AdamW, lr=0.01),
    "rmsprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "rmsprop without eps": partial(optim.RMSprop, lr=0.01, eps=0.0),
    "adagrad": partial(optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "adadelta": partial(optim.Adadelta, lr=1.0),
    "nadam": partial(optim.NAdam, lr=0.01),
    "radam": partial(optim.RAdam, lr=0.01),
    "adamax": partial(optim.Adamax, lr=0.01),
    "asgd": partial(optim.ASGD, lr=0.01, t0=2),
    "rprop": partial(optim.Rprop, lr=0.01),
    "lion": partial(Lion, lr=0.01),
    "lion rebinding": partial(Lion, lr=0.01, rebind=True),
}


class Pair:
    """The same parameters twice, plain and flat, with the same gradients."""

    def __init__(
        self, factory, shapes: Sequence[tuple] = SHAPES, block: int | None = 16, groups: int = 1, dtype=torch.float32
    ):
        self.generator = torch.Generator().manual_seed(1)
        start = [torch.randn(shape, generator=self.generator).to(dtype) for shape in shapes]
        self.plain, self.mine = ([nn.Parameter(value.clone()) for value in start] for _ in range(2))
        named = {str(index): parameter for index, parameter in enumerate(self.mine)}
        options = [{"weight_decay": 0.01 * index} if index else {} for index in range(groups)]
        self.chunks = flatten(named, {name: int(name) % groups for name in named})
        self.optimizer = factory([{"params": self.plain[i::groups], **extra} for i, extra in enumerate(options)])
        mine = [{"params": self.mine[i::groups], **extra} for i, extra in enumerate(options)]
        self.flat = FlatOptimizer(factory, mine, self.chunks, named, block)

    def step(self, left_out: Sequence[int] = ()) -> None:
        for index, (one, other) in enumerate(zip(self.plain, self.mine, strict=True)):
            gradient = torch.randn(one.shape, generator=self.generator).to(one.dtype)
            one.grad, other.grad = (None, None) if index in left_out else (gradient, gradient.clone())
        self.optimizer.step()
        self.flat.step()

    def assert_equal(self) -> None:
        for one, other in zip(self.plain, self.mine, strict=True):
            assert torch.equal(one, other)
            if not one.numel():
                continue  # its state holds nothing but counts, those of its neighbour
            mine, other_state = self.optimizer.state.get(one, {}), self.flat.state.get(other, {})
            assert list(mine) == list(other_state)
            for key, value in mine.items():
                if isinstance(value, torch.Tensor):
                    assert value.shape == other_state[key].shape
                    assert value.dtype == other_state[key].dtype
                    assert torch.equal(value, other_state[key])
                else:
                    assert value == other_state[key]
        for chunk in self.chunks:
            used = torch.zeros(chunk.size, dtype=torch.bool)
            for slot in chunk.slots:
                used[slot.offset : slot.offset + slot.numel] = True
            assert not chunk.master[~used].any()


@pytest.mark.fast
@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("block", [16, None])
def test_bits_of_the_optimizer_over_the_parameters(name, block):
    pair = Pair(FACTORIES[name], block=block)
    for _ in range(4):
        pair.step()
        pair.assert_equal()


@pytest.mark.fast
def test_fp64_and_groups():
    pair = Pair(FACTORIES["adam"], groups=2, dtype=torch.float64)
    assert len(pair.chunks) == 2
    for _ in range(3):
        pair.step()
    pair.assert_equal()
    assert pair.mine[0].dtype == torch.float64


@pytest.mark.parametrize("name", ["momentum", "adamw", "nadam", "adagrad", "lion", "lion rebinding"])
@settings(max_examples=15)
@given(
    steps=st.lists(st.sets(st.integers(0, len(SHAPES) - 1)), min_size=1, max_size=5),
    block=st.sampled_from([8, 50, 1000]),
)
def test_parameters_without_a_gradient_are_left_alone(name, steps, block):
    pair = Pair(FACTORIES[name], block=block)
    for left_out in steps:
        pair.step(sorted(left_out))
        pair.assert_equal()


@pytest.mark.fast
def test_pieces_are_cut_only_where_histories_part():
    pair = Pair(FACTORIES["adamw"], shapes=[(16,)] * 6, block=1000)

    def pieces():
        return [(piece.start, piece.stop) for piece in pair.flat._chunks[0].pieces]

    pair.step()
    assert pieces() == [(0, 96)]
    pair.step([2, 3])
    assert pieces() == [(0, 32), (32, 64), (64, 96)]
    pair.step()
    pair.step([2, 3])
    assert pieces() == [(0, 32), (32, 64), (64, 96)]
    assert [int(pair.flat.state[p]["step"]) for p in pair.mine] == [4, 4, 2, 2, 4, 4]
    pair.assert_equal()


@pytest.mark.fast
@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("source", ["flat", "plain"])
def test_state_goes_on_from_either(name, source):
    """A checkpoint of the flat optimizer is one of the optimizer over the parameters, also when histories have
    parted."""
    first = Pair(FACTORIES[name])
    for left_out in ((), (1, 4), ()):
        first.step(left_out)
    saved = copy.deepcopy((first.flat if source == "flat" else first.optimizer).state_dict())
    second = Pair(FACTORIES[name], block=24)
    second.generator.set_state(first.generator.get_state())
    for values, parameters in ((first.plain, second.plain), (first.mine, second.mine)):
        for value, parameter in zip(values, parameters, strict=True):
            parameter.data.copy_(value.data)
    second.optimizer.load_state_dict(saved)
    second.flat.load_state_dict(saved)
    for pair in (first, second):
        pair.step()
        pair.step([0, 4])
    first.assert_equal()
    second.assert_equal()
    assert all(torch.equal(one, other) for one, other in zip(first.mine, second.mine, strict=True))


@pytest.mark.fast
def test_state_of_a_parameter_is_a_view_of_its_chunks():
    pair = Pair(FACTORIES["adamw"])
    pair.step()
    averages = [pair.flat.state[p]["exp_avg"] for p in pair.mine if p.numel()]
    assert len({average.untyped_storage().data_ptr() for average in averages}) == 1
    pair.step()
    assert torch.equal(averages[0], pair.optimizer.state[pair.plain[0]]["exp_avg"])


@pytest.mark.fast
def test_a_schedule_and_changed_options_reach_the_update():
    pair = Pair(FACTORIES["lion"])
    schedules = [optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (pair.optimizer, pair.flat)]
    for _ in range(3):
        pair.step()
        for schedule in schedules:
            schedule.step()
    pair.assert_equal()
    assert pair.flat.param_groups[0]["lr"] == 0.00125
    assert pair.flat.param_groups[0]["updates"] == pair.optimizer.param_groups[0]["updates"] == 3


@pytest.mark.fast
def test_gradients_that_are_views_of_the_chunk_are_not_copied(monkeypatch):
    pair = Pair(FACTORIES["adamw"])
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *_: pytest.fail("copied"))
    slots = {slot.name: slot for slot in pair.chunks[0].slots}
    for index, (one, other) in enumerate(zip(pair.plain, pair.mine, strict=True)):
        slot = slots[str(index)]
        other.grad = slot.view(pair.chunks[0].grad)
        other.grad.fill_(0.5)
        one.grad = torch.full_like(one, 0.5)
    pair.optimizer.step()
    pair.flat.step()
    pair.assert_equal()


@pytest.mark.fast
def test_the_inner_optimizer_sees_blocks_on_the_cpu():
    pair = Pair(FACTORIES["adamw"], shapes=[(BLOCK + 16,), (BLOCK,)], block=None)
    assert [p.numel() for p in pair.flat._inner.param_groups[0]["params"]] == [BLOCK, BLOCK, 16]


@pytest.mark.fast
@pytest.mark.parametrize("name", FACTORIES)
def test_elementwise_optimizers_are_taken(name):
    assert refusal(FACTORIES[name], [{"params": [nn.Parameter(torch.zeros(3))]}]) is None


@pytest.mark.fast
@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (optim.LBFGS, "LBFGS steps along one direction"),
        (optim.Adafactor, "Adafactor keeps second moments by rows"),
        (optim.Muon, "Muon makes the update of a matrix orthogonal"),
        (optim.SparseAdam, "SparseAdam takes sparse gradients"),
        (partial(optim.AdamW, fused=True), r"AdamW\(fused=True\) has torch's fused kernel"),
        (NormalisedSGD, "NormalisedSGD gives other bits"),
        (NoisySGD, "NoisySGD gives other bits"),
        (NeedsClosure, "NeedsClosure failed when tried out"),
    ],
)
def test_others_are_refused_by_name(factory, says):
    before = torch.get_rng_state()
    with pytest.raises(UserError, match=says):
        fuse(factory)([nn.Parameter(torch.zeros(3, 3))])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.fast
def test_options_decide_too():
    """The same class is elementwise or not by what its group says."""

    class Either(NormalisedSGD):
        def step(self, closure=None):
            (Lion if self.param_groups[0]["weight_decay"] else NormalisedSGD).step(self, closure)

    parameter = nn.Parameter(torch.zeros(3))
    assert refusal(Either, [{"params": [parameter], "weight_decay": 0.1}]) is None
    assert "other bits" in (refusal(Either, [{"params": [parameter]}]) or "")


@pytest.mark.fast
def test_any_training_loop():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    plain, fused = model(), model()
    factory = partial(optim.RMSprop, lr=0.01)
    optimizers = [factory(plain.parameters()), fuse(factory)(fused.parameters())]
    for step in range(4):
        inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        for network, optimizer in zip((plain, fused), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss = optimizer.step(lambda network=network, inputs=inputs: _backward(network(inputs).square().mean()))
            assert loss > 0
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(plain(inputs), fused(inputs))


def _backward(loss):
    loss.backward()
    return loss.item()


@pytest.mark.fast
def test_groups_of_a_training_loop():
    network = nn.Linear(4, 4)
    fused = fuse(partial(optim.NAdam, lr=0.01))([{"params": [network.weight], "lr": 0.5}, {"params": [network.bias]}])
    assert [group["lr"] for group in fused.param_groups] == [0.5, 0.01]
    with pytest.raises(UserError, match="no further parameters"):
        fused.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.fast
def test_no_parameters_are_refused():
    with pytest.raises(UserError, match="no parameters"):
        fuse(optim.RMSprop)([])


@pytest.mark.fast
def test_a_sparse_gradient_is_refused_by_name():
    table = nn.Embedding(4, 3, sparse=True)
    fused = fuse(partial(optim.RMSprop, lr=0.01))(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UserError, match="parameter 0 has a sparse gradient"):
        fused.step()
