"""Weights that are whole only while they are used: ZeRO 3 where ranks share no memory. Threads of one process have
none."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal import Engine, Plan, UserError
from shoal.comm import World
from shoal.comm.simulation import simulate_world
from shoal.models import regression
from shoal.training.loop import callers_loss
from tests.exchange import teacher
from tests.pool import apart, run_ranks

WIDTH = 32


class Mixed(nn.Module):
    """Layers that run in a chain, a weight that is used by two of them, attention that reads its child's weight itself,
    one frozen layer.

    `recompute`: blocks run under non-reentrant (False) or reentrant (True) checkpointing, or plainly (None).
    """

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.recompute = recompute
        self.inward = nn.Linear(teacher.INPUTS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.outward = nn.Linear(WIDTH, teacher.OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inward(x)
        for block in self.blocks:
            h = h + (block(h) if self.recompute is None else checkpoint(block, h, use_reentrant=self.recompute))
        h = self.frozen(h) * self.scale
        h = h + self.attention(h[:, None], h[:, None], h[:, None])[0][:, 0]
        return self.outward(h + torch.nn.functional.linear(x, self.inward.weight))  # the first layer's weight once more


def train(world: World, zero: int, model=Mixed, steps: int = 4, chunk_bytes: int = 4096, **plan) -> tuple:
    """Losses, norms, the final weights and the loss over all samples; then what moved, where weights pass."""
    torch.set_num_threads(1)
    running = Engine(
        model, regression, teacher.ADAMW,
        Plan(dp=world.size, zero=zero, exchange={"name": "allreduce", "chunk_bytes": chunk_bytes}, **plan),
        global_batch=16, microbatch=2, dropout="fused", clip=1.0, world=world,
    )  # fmt: skip
    try:
        results = [running.step(batch) for batch in running.batches(teacher.data(), steps=steps)]
        evaluation = running.evaluate(teacher.data()).loss
        with running.whole_weights():
            weights = {name: parameter.detach().clone() for name, parameter in running.parameters.items()}
        moved = None
        if running.parts.gather is not None:
            executor = running.parts.gather.executor
            moved = (
                executor.most,
                executor.bytes_in,
                [chunk.nbytes_whole for chunk in running.parts.chunks if chunk.passes],
            )
        return [r.loss for r in results], [r.grad_norm for r in results], weights, evaluation, moved
    finally:
        running.close()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("recompute", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_the_numbers_are_those_of_whole_weights(size, recompute):
    """With 3 ranks one has fewer microbatches than the others."""
    model = partial(Mixed, recompute)
    passing, whole = simulate_world(size, train, 3, model), simulate_world(size, train, 0, model)
    for ours, theirs in zip(passing, whole, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
        assert ours[1] == pytest.approx(theirs[1], rel=1e-4)
        torch.testing.assert_close(ours[2], theirs[2], rtol=1e-3, atol=1e-4)
        assert ours[3] == pytest.approx(theirs[3], rel=1e-5)
        most, _, sizes = ours[4]
        assert most < sum(sizes), "not all weights were there at once"
        if recompute is None:
            assert most <= 3 * max(sizes)


def test_compiled_blocks_run_as_one():
    passing, whole = simulate_world(2, partial(train, compile="aot_eager"), 3), simulate_world(2, train, 0)
    assert passing[0][0] == pytest.approx(whole[0][0], rel=1e-5)
    torch.testing.assert_close(passing[0][2], whole[0][2], rtol=1e-3, atol=1e-4)


def between_steps(world: World) -> tuple[bool, bool, str, list[float]]:
    """Whether parameters show NaN between steps, and are themselves inside `whole_weights`; then a step that fails, and
    those after it."""
    running = teacher.engine(world, "allreduce", zero=3)
    try:
        batches = running.batches(teacher.data(), steps=3)
        losses = [running.step(next(batches)).loss]
        blank = all(parameter.isnan().all() for parameter in running.module.parameters())
        with running.whole_weights():
            whole = all(parameter.isfinite().all() for parameter in running.module.parameters())
        failing = running.module.register_forward_hook(_fail)
        batch = next(batches)
        with pytest.raises(ZeroDivisionError) as failure:
            running.step(batch)
        failing.remove()
        losses += [running.step(batch).loss, running.step(next(batches)).loss]
        return bool(blank), bool(whole), str(failure.value), losses
    finally:
        running.close()


def _fail(*_: object) -> None:
    raise ZeroDivisionError("in the forward")


def test_between_steps_parameters_are_blank_and_after_an_error_all_goes_on():
    for blank, whole, failure, losses in simulate_world(2, between_steps):
        assert blank and whole and failure == "in the forward"
        assert losses == pytest.approx(simulate_world(2, teacher.train, "allreduce")[0].losses[:3], rel=1e-5)


class OtherWays(nn.Module):
    """Another layer runs on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.layers = nn.ModuleList(nn.Linear(teacher.INPUTS, teacher.OUTPUTS) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[self.rank](x)


class FurtherOn(OtherWays):
    """One rank has another layer to run, behind those of both."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        return first + self.layers[1](x) if self.rank else first


class Again(OtherWays):
    """One rank runs its first layer once more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x) + self.layers[1](x)
        return first + self.layers[0](x) if self.rank else first


def go_other_ways(world: World, model: type[OtherWays], **plan) -> str:
    with pytest.raises(UserError) as failure:
        train(world, 3, partial(model, world.rank), chunk_bytes=128, **plan)
    return str(failure.value)


@pytest.mark.parametrize(
    ("model", "says"),
    [(OtherWays, "weight is in "), (FurtherOn, "none, its backward begins"), (Again, "times in a pass")],
)
def test_ranks_that_need_different_weights_are_told(model, says):
    with_shared_memory = run_ranks(partial(go_other_ways, memory={"host": 1 << 30}), 2, model)
    for message in (*simulate_world(2, go_other_ways, model), *with_shared_memory):
        assert "ranks need different weights" in message and says in message
        assert "plan.zero = 2 without plan.memory does not" in message


class Queries(nn.Module):
    """Of the input of `mix` autograd keeps the weight `queries` itself for one sample, a copy for more."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Embedding(3, WIDTH)
        self.inward, self.mix = nn.Linear(teacher.INPUTS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.outward = nn.Linear(WIDTH, teacher.OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.queries.weight.expand(len(x), -1, -1)
        return self.outward(self.inward(x) + self.mix(queries).mean(1))


def with_a_short_batch(world: World, zero: int) -> list[float]:
    torch.set_num_threads(1)
    running = Engine(
        Queries, regression, teacher.ADAMW,
        Plan(dp=world.size, zero=zero, memory={"chunk": 1024}),
        global_batch=4, microbatch=2, world=world,
    )  # fmt: skip
    try:
        samples = [teacher.data()[at] for at in range(7)]
        return [running.step(batch).loss for batch in running.batches(samples, steps=4)]
    finally:
        running.close()


def test_a_rank_with_fewer_samples_may_use_weights_in_memory_more_often():
    """The last batch of an epoch has two samples on one rank, one on the other."""
    expected = run_ranks(with_a_short_batch, 1, 0)[0]
    for losses in run_ranks(with_a_short_batch, 2, 3):
        assert losses == pytest.approx(expected, rel=1e-5)


def what_moves(world: World, steps: int) -> tuple[int, int, list[str]]:
    """Bytes that came in the last step and in the first one; the order of arrivals and uses in the last."""
    running = Engine(
        Mixed, regression, teacher.ADAMW,
        Plan(dp=world.size, zero=3, exchange={"name": "allreduce", "chunk_bytes": 4096}),
        global_batch=4, microbatch=2, dropout="fused", world=world,
    )  # fmt: skip
    seen: list[str] = []
    try:
        executor = running.parts.gather.executor
        before = []
        for batch in running.batches(teacher.data(), steps=steps):
            before.append(executor.bytes_in)
            if batch.step == steps - 1:
                _record(executor, seen)
            running.step(batch)
        return executor.bytes_in - before[-1], before[1] - before[0], seen
    finally:
        running.close()


def _record(executor, seen: list[str]) -> None:
    fetch, use = executor._fetch, executor.use

    def fetching(place):
        seen.append(f"fetch {place}")
        fetch(place)

    def using(wanted):
        wanted = frozenset(wanted)
        use(wanted)
        seen.extend(f"use {place}" for place in sorted(wanted))

    executor._fetch, executor.use = fetching, using


def test_the_next_weights_are_fetched_before_the_last_ones_are_done():
    last, first, seen = simulate_world(2, what_moves, 3)[0]
    assert 0 < last <= first, "the recorded order costs no more than on demand"
    fetches = [index for index, what in enumerate(seen) if what.startswith("fetch")]
    early = sum(seen[index + 1].split()[1] != seen[index].split()[1] for index in fetches if index + 1 < len(seen))
    assert early > len(fetches) / 2, "most are on their way while others are in use"


class Reads(nn.Module):
    """Weights that are read otherwise than by their own module's forward: scales beside children, lists of parameters,
    a child's weight given to a function, all of them in a penalty."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(_Scaled() for _ in range(3))
        self.list = nn.ParameterList(
            nn.Parameter(torch.full((teacher.INPUTS,), 0.1 * (place + 1))) for place in range(3)
        )
        self.one, self.two = nn.Linear(teacher.INPUTS, teacher.INPUTS), nn.Linear(teacher.INPUTS, teacher.INPUTS)
        self.outward = nn.Linear(teacher.INPUTS, teacher.OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        one, two = self.one.weight, self.two.weight
        x = self.two(self.one(x)) + x @ one @ two + torch.stack([each * x for each in self.list]).sum(0)
        return self.outward(x)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(teacher.INPUTS, teacher.INPUTS), nn.Tanh(), nn.Linear(teacher.INPUTS, teacher.INPUTS)
        )
        self.scale = nn.Parameter(torch.full((teacher.INPUTS,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.inner(x)


def penalised(model: nn.Module, mb: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    total, count = regression(model, mb)[:2]
    return total + 0.01 * count * sum(parameter.square().sum() for parameter in model.parameters()), count


def smooth(model: nn.Module, mb: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """With a penalty on the gradient by the inputs, as a critic has it, whose own gradient needs the weights again."""
    inputs = mb["inputs"].clone().requires_grad_()
    out = model(inputs)
    (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    return (out - mb["targets"]).square().sum() + (slope.norm(dim=1) - 1).square().sum(), out.numel()


def read(world: World, zero: int, loss, recompute: str, directory=None) -> tuple[list[float], list[float]]:
    torch.set_num_threads(1)
    running = Engine(
        Reads, loss, teacher.ADAMW,
        Plan(dp=world.size, zero=zero, recompute=recompute, exchange={"name": "allreduce", "chunk_bytes": 128}),
        global_batch=16, microbatch=2, dropout="fused", world=world,
    )  # fmt: skip
    try:
        results = [running.step(batch) for batch in running.batches(teacher.data(), steps=3)]
        if directory is not None:
            running.export(directory)
            with running.whole_weights(), running.whole_weights():
                inside = running.evaluate(teacher.data()).loss
                assert all(parameter.isfinite().all() for parameter in running.module.parameters())
            assert inside == running.evaluate(teacher.data()).loss
            with pytest.raises(UserError, match="nothing to count"):
                running.evaluate([])
        return [r.loss for r in results], [r.grad_norm for r in results]
    finally:
        running.close()


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("loss", [regression, penalised, smooth], ids=["loss", "penalised", "smooth"])
def test_weights_may_be_read_by_anybody(loss, recompute):
    passing, whole = (simulate_world(2, read, zero, loss, recompute) for zero in (3, 0))
    assert passing[0][0] == pytest.approx(whole[0][0], rel=1e-5) and passing[0][1] == pytest.approx(
        whole[0][1], rel=1e-4
    )


class _Position(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64 * WIDTH).view(64, WIDTH))

    def forward(self) -> torch.Tensor:
        return self.weight[3:4]


class Returns(nn.Module):
    """Uses what a module has returned of its weight after others have run."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.inward = _Position(), nn.Linear(teacher.INPUTS, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        self.outward = nn.Linear(WIDTH, teacher.OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        position = self.position()
        return self.outward(self.layers(self.inward(x)) + position)


def test_weights_that_a_module_returns_stay_for_its_caller():
    passing, whole = (simulate_world(2, partial(train, chunk_bytes=600), zero, Returns) for zero in (3, 0))
    assert passing[0][0] == pytest.approx(whole[0][0], rel=1e-5)
    assert passing[0][3] == pytest.approx(whole[0][3], rel=1e-5)


class Keeps(nn.Module):
    """Uses weights of others, and its own, out of a tuple, and a view of one."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(teacher.INPUTS, WIDTH), nn.Linear(WIDTH, teacher.OUTPUTS)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.kept, self.seen = (self.inward.weight, [self.scale]), self.outward.weight.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.linear(x, self.kept[0]) * self.kept[1][0]
        return self.outward(h) + 0.5 * h @ self.seen.T


def test_weights_that_a_module_keeps_beside_its_parameters_come_too():
    """They had no memory, or were what the weights had been at first."""
    passing, whole = (simulate_world(2, partial(train, chunk_bytes=64), zero, Keeps) for zero in (3, 0))
    assert passing[0][0] == pytest.approx(whole[0][0], rel=1e-5)
    assert passing[0][3] == pytest.approx(whole[0][3], rel=1e-5)


class AddsLast(nn.Linear):
    """Adds its bias to a product, as a layer does whose columns ranks divide: the gradient of the bias comes before
    backward asks for anything of the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight) + self.bias


class AddLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(teacher.INPUTS, WIDTH), nn.Linear(WIDTH, teacher.OUTPUTS)
        self.blocks = nn.ModuleList(nn.Sequential(AddsLast(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))
        self.blocks.extend(AddsLast(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inward(x)
        for block in self.blocks:
            h = h + block(h)
        return self.outward(h)


def used_together(world: World) -> int:
    """The most chunks that one moment of a step needs, of a block that is computed again two."""
    running = Engine(
        AddLast, regression, teacher.ADAMW,
        Plan(dp=world.size, zero=3, recompute="full", exchange={"name": "allreduce", "chunk_bytes": 128}),
        global_batch=16, microbatch=2, dropout="fused", world=world,
    )  # fmt: skip
    try:
        for batch in running.batches(teacher.data(), steps=2):
            running.step(batch)
        return max(map(len, running.parts.gather.executor.followed.trace))
    finally:
        running.close()


def test_a_weight_whose_gradient_has_come_already_does_not_stay_when_its_block_runs_again():
    """It stayed until the end of the backward, with those of all blocks behind."""
    assert simulate_world(2, used_together) == [2, 2]


class Detached(nn.Module):
    """A product with a weight of which no gradient is taken there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.detach()


class ReadsDetached(nn.Module):
    """Uses a weight twice, first detached. The gradient of the second use, a sum, comes before the block runs again for
    its norm; the view that the product saves then is read in its backward, the last of the block's.

    `checkpointed`: itself, or its inside alone
    """

    def __init__(self, checkpointed: str) -> None:
        super().__init__()
        self.product, self.checkpointed = Detached(), checkpointed
        more, after = ([nn.Linear(WIDTH, WIDTH)] if checkpointed == "inside" else [] for _ in range(2))
        self.inside, self.after = nn.Sequential(nn.LayerNorm(WIDTH), *more, nn.Tanh()), nn.Sequential(*after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._forward, x, use_reentrant=False) if self.checkpointed == "it" else self._forward(x)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.product(x)
        h = checkpoint(self.inside, h, use_reentrant=False) if self.checkpointed == "inside" else self.inside(h)
        return x + self.after(h) + self.product.weight.sum(0)


class WithDetached(AddLast):
    def __init__(self, checkpointed: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReadsDetached(checkpointed) for _ in range(4))


@pytest.mark.parametrize(
    "checkpointed, recompute", [("", "full"), ("", "selective"), ("it", "none"), ("inside", "full")]
)
def test_a_weight_that_is_saved_detached_stays_though_its_gradient_has_come(checkpointed, recompute):
    """It went while the rest of its block ran again, and backward found no memory behind the view."""
    model = partial(WithDetached, checkpointed)
    passing, whole = (
        simulate_world(2, partial(train, chunk_bytes=128, recompute=recompute), zero, model) for zero in (3, 0)
    )
    assert passing[0][0] == pytest.approx(whole[0][0], rel=1e-5)


def test_export_and_evaluation(tmp_path):
    from safetensors.torch import load_file

    for zero in (0, 3):
        simulate_world(2, read, zero, regression, "none", tmp_path / str(zero))
    ours, theirs = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("3", "0"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


def keep_a_graph(world: World) -> str:
    kept = []

    def loss(model, mb):
        result = regression(model, mb)
        kept.append(model(mb["inputs"]).sum())
        return result

    running = Engine(
        teacher.student,
        loss,
        teacher.ADAMW,
        Plan(dp=world.size, zero=3),
        global_batch=16,
        microbatch=8,
        dropout="fused",
        world=world,
    )
    running.step(next(running.batches(teacher.data())))
    with pytest.raises(UserError) as failure:
        kept[0].backward()
    running.close()
    return str(failure.value)


def smoothed(world: World, zero: int) -> list[float]:
    """In a loop of the caller's, whose inner backward nobody watches."""
    torch.set_num_threads(1)
    exchange = {"name": "allreduce", "chunk_bytes": 128}
    engine = Engine(
        Reads, callers_loss, teacher.SGD, Plan(dp=world.size, zero=zero, exchange=exchange), global_batch=4, world=world
    )
    loop, draw, losses = engine.loop(), torch.Generator().manual_seed(world.rank), []
    for _ in range(3):
        rows = torch.randn(2, teacher.INPUTS, generator=draw), torch.randn(2, teacher.OUTPUTS, generator=draw)
        loop.backward(smooth(loop, dict(zip(("inputs", "targets"), rows, strict=True)))[0])
        losses.append(loop.step().loss)
    engine.close()
    return losses


def test_a_loop_of_the_callers_takes_gradients_of_gradients():
    """What they keep of weights was memory that had been given back."""
    passing, whole = (simulate_world(2, smoothed, zero) for zero in (3, 0))
    assert passing[0] == pytest.approx(whole[0], rel=1e-5)


def test_a_graph_that_outlives_its_step_is_refused():
    for message in simulate_world(2, keep_a_graph):
        assert "weights of a step that is over" in message


# Parts that the model's author has compiled


class PartCompiled(nn.Module):
    """The middle is compiled as `how` says; it has a dropout layer and a layer inside a layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        middle = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)), nn.Tanh()
        )
        self.inward, self.middle = nn.Linear(teacher.INPUTS, WIDTH), middle
        self.outward = nn.Linear(WIDTH, teacher.OUTPUTS)
        if how == "wrapped":
            self.middle = torch.compile(middle, backend="aot_eager")
        elif how == "forward":
            middle.forward = torch.compile(middle.forward, backend="aot_eager")
        elif how == "in place":
            middle.compile(backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outward(self.middle(self.inward(x)))


def of_compiled_parts(world: World, how: str, **plan) -> list[float]:
    torch._dynamo.reset()
    model = partial(PartCompiled, how)
    running = Engine(
        model, regression, teacher.ADAMW, Plan(dp=world.size, **plan), global_batch=8, microbatch=2, world=world
    )
    losses = [running.step(batch).loss for batch in running.batches(teacher.data(), steps=3)]
    running.close()
    return losses


def without_and_with(world: World, plan: dict) -> list[list[float]]:
    """Losses: without compiling and with a compiled forward, whose names are the same, under `plan`; of a wrapped part
    whole and under `plan`."""
    # in processes of their own, since compiling is not for several threads
    world = apart(world) if world.size > 1 else world
    cases: list[tuple[str, dict]] = [("no", {}), ("forward", plan), ("wrapped", {}), ("wrapped", plan)]
    return [of_compiled_parts(world, how, **options) for how, options in cases]


@pytest.mark.parametrize("plan", [{"memory": {"device": "64KiB"}}, {"zero": 3}], ids=["budget", "zero 3"])
def test_weights_come_for_parts_that_are_compiled(plan):
    for plainly, forward, whole, wrapped in run_ranks(without_and_with, 2 if "zero" in plan else 1, plan):
        assert forward == pytest.approx(plainly, rel=1e-6) and wrapped == pytest.approx(whole, rel=1e-6)


def test_parts_compiled_in_place_are_refused_by_name():
    with pytest.raises(UserError, match=r"middle \(Sequential\) is compiled by compile\(\).*torch.compile\(part\)"):
        of_compiled_parts(World.single("cpu"), "in place", memory={"device": "64KiB"})
    assert len(of_compiled_parts(World.single("cpu"), "in place")) == 3
