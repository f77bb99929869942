"""Forwards that write to weights: numbers are those of one process, or it is refused by name."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from shoal import Engine, Plan, UserError
from shoal.comm.simulation import simulate_world
from shoal.doors.model import Model
from shoal.models import build, regression
from tests.exchange import teacher
from tests.pool import RankError, run_ranks

WIDTH = 24
SGD = partial(torch.optim.SGD, lr=0.05)


class Rescales(nn.Module):
    """Halves a weight as it comes to evaluate, and doubles it as it comes to train, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(teacher.INPUTS, WIDTH), nn.Linear(WIDTH, teacher.OUTPUTS)
        self.is_halved = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training == self.is_halved:
            self.is_halved = not self.training
            with torch.no_grad():
                self.outward.weight.mul_(2 if self.training else 0.5)
        return self.outward(self.inward(x).tanh()) * (1 if self.training else 2)


class Averages(nn.Module):
    """Renews an average of its first layer in each forward in training mode, in one of several ways."""

    def __init__(self, way: str = "in place") -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(teacher.INPUTS, WIDTH), nn.Linear(WIDTH, teacher.OUTPUTS)
        self.average = nn.Linear(teacher.INPUTS, WIDTH, bias=False).requires_grad_(False)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine, new = self.average.weight, self.inward.weight.detach()
        if self.training and self.way == "in place":
            with torch.no_grad():
                mine.lerp_(new, 0.5)
        elif self.training and self.way == "data":
            mine.data.lerp_(new, 0.5)
        elif self.training:
            mine.data = torch.lerp(mine, new, 0.5)
        return self.outward((self.inward(x) + self.average(x)).tanh())


class AveragesBuffer(Averages):
    """Keeps the average as the refusals say."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.average.weight.detach()
        del self.average
        self.register_buffer("average", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average.lerp_(self.inward.weight.detach(), 0.5)
        return self.outward((self.inward(x) + torch.nn.functional.linear(x, self.average)).tanh())


class FirstValues(nn.Sequential):
    """Takes its bias from the first microbatch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "is_begun"):
            self.is_begun = True
            self[0].bias.data.copy_(-torch.nn.functional.linear(x, self[0].weight).mean(0))
        return super().forward(x)


def firsts() -> nn.Module:
    return FirstValues(nn.Linear(teacher.INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, teacher.OUTPUTS))


class Doubles(nn.Module):
    """Has its last layer compute in fp64, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(teacher.INPUTS, WIDTH), nn.Linear(WIDTH, teacher.OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outward.double()(self.inward(x).tanh().double()).float()


def made(world, model, precision: str = "fp32", buffers: str = "exact", **plan) -> Engine:
    torch.set_num_threads(1)
    how = {"global_batch": 16, "microbatch": 4, "precision": precision, "buffers": buffers, "dropout": "fused"}
    return Engine(model, regression, SGD, Plan(dp=world.size, **plan), world=world, **how)


def train(world, model, evaluates: bool = False, steps: int = 3, **how) -> list[float]:
    running = made(world, model, **how)
    try:
        losses = []
        for batch in running.batches(teacher.data(), steps=steps):
            losses.append(running.step(batch).loss)
            if evaluates:
                losses.append(running.evaluate(teacher.data()).loss)
        return losses
    finally:
        running.close()


ELSEWHERE = {
    "two ranks": (2, {}),
    "gathered": (2, {"zero": 3}),
    "offloaded": (1, {"memory": {"device": "1GB"}}),
    "masters": (1, {"precision": "bf16"}),
}
WRITES = {
    **{way: (partial(Averages, way), "average.weight") for way in ("in place", "data", "bound anew")},
    "first values": (firsts, "0.bias"),
}


@pytest.mark.parametrize("where", ELSEWHERE)
@pytest.mark.parametrize("what", WRITES)
def test_a_write_that_others_would_not_have_is_refused(where, what):
    """Each of these had other losses than one process, and said nothing."""
    (size, how), (model, name) = ELSEWHERE[where], WRITES[what]
    with pytest.raises(UserError, match=rf"a forward writes to the weight {name}.*take one rank in fp32"):
        simulate_world(size, partial(train, **how), model)


@pytest.mark.parametrize("where", ["two ranks", "gathered", "offloaded"])
def test_what_is_kept_in_a_buffer_trains(where):
    size, how = ELSEWHERE[where]
    (one,) = simulate_world(1, train, AveragesBuffer)
    losses = simulate_world(size, partial(train, buffers="averaged", **how), AveragesBuffer)[0]
    if size == 1:
        assert losses == pytest.approx(one, rel=1e-5)
    assert losses[0] == pytest.approx(one[0], rel=0.02), "ranks renew it side by side"


@pytest.mark.parametrize("model", [partial(Averages, "bound anew"), Doubles], ids=["values", "form"])
def test_a_trace_for_matrices_that_are_cut_leaves_weights_where_they_were(model):
    """What it was run on for a moment had been bound elsewhere then, where no initial values are known."""
    with pytest.raises(UserError, match=r"a forward (writes to|gives) the weight"):
        simulate_world(2, parts, model)


def parts(world, model) -> None:
    torch.set_num_threads(1)
    running = Engine(model, regression, SGD, Plan(tp=2), global_batch=16, microbatch=4, dropout="fused", world=world)
    try:
        running.step(next(running.batches(teacher.data(), steps=1)))
    finally:
        running.close()


@pytest.mark.parametrize("zero", [1, 3])
def test_weights_in_one_memory_are_written_by_nobody(zero):
    """Each rank would write to what all of them share."""
    with pytest.raises(RankError, match="a forward writes to the weight average"):
        run_ranks(partial(train, zero=zero), 2, Averages)


class Follows(nn.Module):
    """A block with an average of its layer, which each forward renews."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.average = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.average.weight.lerp_(self.layer.weight, 0.5)
        return x + (self.layer(x) + self.average(x).detach()).tanh()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(teacher.INPUTS, WIDTH), nn.Linear(WIDTH, teacher.OUTPUTS)
        self.blocks = nn.ModuleList(Follows() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inward(x)
        for block in self.blocks:
            h = block(h)
        return self.outward(h)


def test_a_block_that_is_computed_again_writes_to_no_weight():
    """It wrote twice."""
    assert len(simulate_world(1, train, Blocks)[0]) == 3
    with pytest.raises(UserError, match=r"a forward writes to the weight blocks.*plan.recompute runs"):
        simulate_world(1, partial(train, recompute="full"), Blocks)


class InBlocks(nn.Module):
    """Renews a table that it reads, whose only stage is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.inward, self.outward = nn.Linear(teacher.INPUTS, WIDTH), nn.Linear(WIDTH, teacher.OUTPUTS)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inward(x)
        if self.training:
            with torch.no_grad():
                self.table.lerp_(h.mean(0), 0.5)
        for block in self.blocks:
            h = h + block(h - self.table).tanh()
        return self.outward(h)


def test_stages_write_to_no_weight():
    """A stage runs a forward more, by which is found out what travels."""
    with pytest.raises(UserError, match=r"a forward writes to the weight table"):
        simulate_world(2, staged, InBlocks)


def staged(world, model) -> list[float]:
    torch.set_num_threads(1)
    running = Engine(model, regression, SGD, Plan(pp=2), global_batch=16, microbatch=4, dropout="fused", world=world)
    try:
        return [running.step(batch).loss for batch in running.batches(teacher.data(), steps=2)]
    finally:
        running.close()


@pytest.mark.parametrize("where", [*ELSEWHERE, "one process"])
def test_an_evaluation_that_writes_is_refused(where):
    """One process too would save weights of evaluation mode. A rank without the stretch knows the chunk alone."""
    size, how = ELSEWHERE.get(where, (1, {}))
    name = "outward.(weight|bias, or one of the 3 others up to inward.weight)"
    with pytest.raises(UserError, match=rf"without gradients writes to the weight {name}, and.*rescale_every = 0"):
        simulate_world(size, partial(train, evaluates=True, **how), Rescales)


class Merges(nn.Module):
    """Adds what it has learned to a weight for evaluations, and takes it away again, as layers of loralib do."""

    def __init__(self, way: str = "in place") -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(teacher.INPUTS, WIDTH), nn.Linear(WIDTH, teacher.OUTPUTS)
        self.low, self.way, self.is_merged = nn.Parameter(torch.ones(WIDTH) / 8), way, False

    def train(self, mode: bool = True) -> Merges:
        if self.way != "off" and self.is_merged == mode:
            sign, self.is_merged = (-1 if mode else 1), not mode
            weight, row = self.outward.weight, self.low.detach()
            if self.way == "in place":
                weight.data += sign * row
            else:
                weight.data = weight.data + sign * row
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inward(x).tanh()
        return self.outward(h) + (0 if self.is_merged else (h @ self.low)[:, None])


MERGED = {**ELSEWHERE, "offloaded": (1, {"memory": {}})}


@pytest.mark.parametrize("way", ["in place", "bound anew"])
@pytest.mark.parametrize("where", MERGED)
def test_weights_that_are_merged_to_evaluate_are_refused(where, way):
    """Where weights are gathered it was an error of torch, or a loss without what was merged."""
    size, how = MERGED[where]
    with pytest.raises(UserError, match=r"weight.*layers of loralib: merge_weights = False"):
        simulate_world(size, partial(train, evaluates=True, **how), partial(Merges, way))
    plain = simulate_world(size, partial(train, evaluates=True, **how), partial(Merges, "off"))[0]
    one = simulate_world(1, partial(train, evaluates=True), Merges)[0]
    assert plain == pytest.approx(one, rel=0.01 if where == "masters" else 1e-5), "one process merges"


def own_loop(world, way: str, zero: int) -> None:
    engine = made(world, partial(Merges, way), zero=zero)
    model = Model(engine)
    try:
        model.eval()
    finally:
        engine.close()


@pytest.mark.parametrize("zero", [0, 3])
def test_a_loop_of_the_callers_merges_nothing_either(zero):
    simulate_world(2, own_loop, "off", zero)
    with pytest.raises(UserError, match="layers of loralib: merge_weights = False"):
        simulate_world(2, own_loop, "in place", zero)


def rwkv(every: int) -> nn.Module:
    from transformers import RwkvConfig, RwkvForCausalLM

    config = RwkvConfig(
        vocab_size=32, hidden_size=16, attention_hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        context_length=8, rescale_every=every, use_cache=False,
    )  # fmt: skip
    return RwkvForCausalLM(config)


def next_token(model: nn.Module, microbatch) -> tuple[torch.Tensor, int]:
    ids = microbatch["ids"]
    logits = model(ids).logits[:, :-1]
    labels = ids[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"), labels.numel()


def of_rwkv(world, every: int, zero: int) -> list[float]:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(1)
    data = [{"ids": torch.randint(32, (8,), generator=draw)} for _ in range(16)]
    plan = Plan(dp=world.size, zero=zero)
    running = Engine(partial(rwkv, every), next_token, SGD, plan, global_batch=8, microbatch=2, world=world)
    try:
        losses = []
        for batch in running.batches(data, steps=3):
            losses += [running.step(batch).loss, running.evaluate(data).loss]
        return losses
    finally:
        running.close()


def test_rwkv_of_transformers_does_what_the_refusal_says():
    with pytest.raises(UserError, match=r"config.rescale_every = 0"):
        simulate_world(2, of_rwkv, 2, 3)
    (one,), two = simulate_world(1, of_rwkv, 0, 0), simulate_world(2, of_rwkv, 0, 3)
    assert two[0] == pytest.approx(one, rel=1e-5)


def checkpointed(world, directory) -> tuple[list[float], list[float], bool]:
    """Losses of five steps, and of the last three after a checkpoint; whether the average is in the chunks."""
    straight = train(world, partial(Averages, "bound anew"), steps=5)
    running = made(world, partial(Averages, "bound anew"))
    for batch in running.batches(teacher.data(), steps=2):
        running.step(batch)
    running.save(directory)
    chunk = next(chunk for chunk in running.parts.chunks if not chunk.trainable)
    has = bool((chunk.slots[0].view(chunk.data) == running.module.average.weight).all())
    running.close()
    running = made(world, partial(Averages, "bound anew"))
    running.load(directory)
    losses = [running.step(batch).loss for batch in running.batches(teacher.data(), steps=3)]
    running.close()
    return straight[2:], losses, has


def test_what_one_process_binds_anew_is_in_its_checkpoint(tmp_path):
    ((straight, resumed, has),) = simulate_world(1, checkpointed, tmp_path)
    assert resumed == straight and has


class Clamps(nn.Module):
    """Binds a weight that is trained to clamped values of it, before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(teacher.INPUTS, WIDTH), nn.Linear(WIDTH, teacher.OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.outward.weight.data = self.outward.weight.data.clamp(-0.1, 0.1)
        return self.outward(self.inward(x).tanh())


def test_a_weight_that_one_process_binds_anew_is_trained():
    """Its update was made where the module did not look any more."""
    torch.manual_seed(0)
    (ours,) = simulate_world(1, partial(train, steps=4), Clamps)
    (model,) = simulate_world(1, initial)
    optimizer, data, losses = SGD(model.parameters()), teacher.data(), []
    (order,) = simulate_world(1, ids)
    for step in order:
        optimizer.zero_grad()
        total = 0.0
        for start in range(0, 16, 4):
            some = [data[i] for i in step[start : start + 4]]
            microbatch = {key: torch.stack([each[key] for each in some]) for key in some[0]}
            sums = regression(model, microbatch)
            (sums[0] / (16 * teacher.OUTPUTS)).backward()
            total += float(sums[0])
        losses.append(total / (16 * teacher.OUTPUTS))
        optimizer.step()
    assert ours == pytest.approx(losses, rel=1e-5)


def initial(world) -> nn.Module:
    running = made(world, Clamps)
    model = Clamps()
    model.load_state_dict({name: value.clone() for name, value in running.module.state_dict().items()})
    running.close()
    return model


def ids(world) -> list[list[int]]:
    running = made(world, Clamps)
    order = [list(batch.ids) for batch in running.batches(teacher.data(), steps=4)]
    running.close()
    return order


@pytest.mark.parametrize("how", [{}, {"memory": {"device": "1GB"}}], ids=["resident", "offloaded"])
def test_a_weight_of_another_form_is_refused(how):
    with pytest.raises(UserError, match=r"the weight outward\.(weight|bias)"):
        simulate_world(1, partial(train, **how), Doubles)


def write_whole(world) -> list[float]:
    running = made(world, Averages, zero=3)
    try:
        with pytest.raises(UserError, match=r"inward.*written inside engine.whole_weights"), running.whole_weights():
            running.module.inward.weight.data.zero_()
        with running.whole_weights():
            return [float(running.module.inward.weight.detach().abs().sum())]
    finally:
        running.close()


def test_weights_that_are_gathered_to_be_read_are_not_written():
    assert all(total > 0 for (total,) in simulate_world(2, write_whole))


def losses_of_gpt(**options: object) -> list[float]:
    """Losses of four steps of two microbatches."""
    model = build({"name": "gpt", "layers": 4, "d_model": 32, "heads": 2, "vocab_size": 64, "sequence": 16})
    tokens = torch.randint(0, 64, (16, 17), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]
    running = Engine(model.factory, model.loss, SGD, Plan(**options), global_batch=4, microbatch=2)  # type: ignore[arg-type]
    try:
        return [running.step(batch).loss for batch in running.batches(rows, steps=4)]
    finally:
        running.close()


@pytest.mark.parametrize("recompute", ["selective", {"name": "blocks", "full": "0", "selective": "1-3"}], ids=str)
def test_copies_that_go_in_the_middle_of_a_block_that_is_computed_again_are_none_of_its_operations(recompute):
    """Of so small a budget weights go as the next ones come, while backward computes a block again."""
    found = losses_of_gpt(recompute=recompute, memory={"device": "200KiB"})
    assert found == pytest.approx(losses_of_gpt(), rel=1e-6)
