"""ZeRO: chunks cut among the replicas. Numbers are those of one process (tests/parity); here what is kept where, saved
and refused."""

from __future__ import annotations

import itertools
import warnings
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from shoal import Engine, Plan, TrainingError, UserError
from shoal.comm.simulation import simulate_world
from shoal.exchange.named import ALGORITHMS
from tests.exchange import teacher
from tests.parity.cases import CASES, gathered
from tests.parity.cases import engine as parity_engine
from tests.parity.covering import in_turn, thinned
from tests.pool import apart, reference, run_ranks

NADAM = partial(torch.optim.NAdam, lr=3e-3)  # not fused in torch: it runs over flat pieces
STEPS = 8
EXCHANGES = {
    "hierarchical": {"name": "hierarchical", "ranks_per_host": 1},
    "adasum": {"name": "adasum", "of": "gradients"},
}

Stage = int | str
"""plan.zero; "hosts": 3, each rank as if on a host of its own; "hybrid": 2, each two ranks share a copy of the
state."""


def plan_of(world, zero: Stage) -> Plan:
    named = {"hosts": {"zero": 3}, "hybrid": {"zero": 2, "shard": 2}}
    return Plan(dp=world.size, **(named[zero] if isinstance(zero, str) else {"zero": zero}))


def make(world, zero: Stage, precision: str, optimizer=None, case: str = "tied") -> Engine:
    if zero == "hosts":
        world = apart(world)
    more = {} if optimizer is None else {"optimizer": optimizer}
    chosen = CASES[case]
    if optimizer is None:
        return parity_engine(case, precision, 1, world=world, plan=plan_of(world, zero))
    return Engine(
        chosen.factory, chosen.loss, plan=plan_of(world, zero), global_batch=12, microbatch=3, precision=precision,
        clip=0.8, world=world, **more,
    )  # fmt: skip


def train(
    world, zero: Stage, precision: str, optimizer=None, save: Path | None = None, load: Path | None = None
) -> tuple:
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
@pytest.mark.parametrize("stage", [1, 2])
def test_two_ranks_compute_the_bits_of_two_replicas(precision, optimizer, stage):
    """Sums of two have one order, updates are elementwise: masters and state are the replicas' to the last bit. torch's
    unfused kernels round the last few elements of a tensor, and only those, another way: with NAdam that is elsewhere,
    by the last bit."""
    cut = run_ranks(train, 2, stage, precision, optimizer)[0]
    whole = reference(train, 2, 0, precision, optimizer)[0]
    # Stage 2 adds up the ranks' sums microbatch by microbatch: another order where a rank has several.
    exact = 1e-5 if optimizer is NADAM or stage == 2 else 0
    if stage == 2 and precision == "bf16":
        exact = 2e-3
    assert cut[0] == pytest.approx(whole[0], rel=exact, abs=0)
    for ours, theirs in zip(cut[1:], whole[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=exact, atol=exact)


CHANGES = [
    ((3, 1), (2, 0)),
    ((2, 0), (3, 1)),
    ((2, 1), (4, 2)),
    ((1, 0), (2, 1)),
    ((3, 2), (2, 2)),
    ((3, "hosts"), (4, "hybrid")),
    ((4, "hybrid"), (3, 1)),
    ((2, 1), (2, "hosts")),
]
OPTIMIZERS = {"adamw": None, "nadam": NADAM}
KINDS = list(itertools.product(("fp32", "bf16"), OPTIMIZERS))


@pytest.mark.parametrize(("change", "kind"), thinned(list(itertools.product(CHANGES, KINDS)), in_turn(CHANGES, KINDS)))
def test_a_checkpoint_goes_on_under_another_cut(change, kind, tmp_path):
    """Saved by as many ranks with that stage, read by others: the masters and state read are those of the checkpoint,
    bit by bit."""
    ((size, zero), (other_size, other_zero)), (precision, optimizer) = change, (kind[0], OPTIMIZERS[kind[1]])
    whole = run_ranks(train, size, zero, precision, optimizer, tmp_path)[0]
    half = run_ranks(read, other_size, other_zero, precision, optimizer, tmp_path)[0]
    back = run_ranks(read, 1, 0, precision, optimizer, tmp_path)[0]
    for ours, theirs in zip(half[1:], back[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert half[0] == back[0], "options and counts of the groups"
    rest = run_ranks(train, other_size, other_zero, precision, optimizer, None, tmp_path)[0]
    assert rest[0] == pytest.approx(whole[0][STEPS // 2 :], rel=1e-5 if precision == "fp32" else 2e-3)


def read(world, zero: Stage, precision: str, optimizer, directory: Path) -> tuple:
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
        return (
            (options, sorted(counts)),
            masters,
            {key: gathered(running, each) for key, each in sorted(elements.items())},
        )
    finally:
        running.close()


def held(world, zero: int) -> tuple[int, int, int, bool]:
    """Bytes of optimizer state, of masters beside the data and of gradients kept; whether the weights are one memory
    for all ranks."""
    running = make(world, zero, "bf16")
    running.step(next(running.batches(CASES["tied"].data())))
    state = sum(value.nbytes for value in running.optimizer.state_tensors().values() if value.dim())
    masters = sum(chunk.owned.master.nbytes for chunk in running.parts.chunks)
    gradients = sum((chunk.owned if chunk.borrows else chunk).gradient.nbytes for chunk in running.parts.chunks)
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
    return state, masters, gradients, common


@pytest.mark.parametrize("stage", [1, 2])
def test_each_rank_keeps_its_part(stage):
    [(state, masters, gradients, _)] = run_ranks(held, 1, 0)
    each = run_ranks(held, 4, stage)
    assert sum(part for part, _, _, _ in each) == state
    assert all(part <= state / 4 * 1.05 + 1024 for part, _, _, _ in each)
    assert all(part <= masters / 4 * 1.05 + 1024 for _, part, _, _ in each)
    share = 1 if stage == 1 else 1 / 4
    assert all(gradients * share <= part <= gradients * share * 1.05 + 1024 for _, _, part, _ in each)
    assert all(common for _, _, _, common in each), "ranks of one host share one copy of the weights"


@cache
def whole_chunks(size: int, name: str) -> list[teacher.Trace]:
    return simulate_world(size, teacher.train, EXCHANGES.get(name, name))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_common_memory_weights_are_gathered(stage):
    """Threads of one process have none: there the gather is an operation of the transport. Ranks have 3, 3 and 2
    microbatches."""
    sharded = simulate_world(3, partial(teacher.train, zero=stage), "allreduce")
    replicated = whole_chunks(3, "allreduce")
    for ours, theirs in zip(sharded, replicated, strict=True):
        assert ours.losses == pytest.approx(theirs.losses, rel=0 if stage == 1 else 1e-5)
        torch.testing.assert_close(
            ours.weights, theirs.weights, rtol=0 if stage == 1 else 1e-4, atol=0 if stage == 1 else 1e-4
        )


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


@pytest.mark.parametrize(
    ("name", "stage"),
    [(name, 1) for name in ("fp16", "bytegrad", "powersgd", "topk", "adasum", "delayed", "hierarchical")]
    + [(name, stage) for name in ("fp16", "bytegrad", "powersgd", "topk", "hierarchical") for stage in (2, 3)],
)
def test_gradients_may_travel_as_they_like(name, stage):
    """Any algorithm that leaves replicas equal: the same as with whole chunks. Rows of a codec are those of the chunk,
    which is a little longer where it is cut; stage 2 rounds every microbatch."""
    sharded = simulate_world(2, partial(teacher.train, zero=stage), EXCHANGES.get(name, name))
    replicated = whole_chunks(2, name)
    for ours, theirs in zip(sharded, replicated, strict=True):
        if name == "hierarchical" or (stage == 1 and name != "bytegrad"):
            assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
            assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)
        assert ours.losses == sharded[0].losses
        assert ours.losses[-1] < min(1.2 * theirs.losses[-1], theirs.losses[0]), "it learns as well"


def test_what_does_not_go_together_is_refused():
    apart = ["qadam", "onebit_adam", "decentralized", "local_sgd", "diloco", "async_average", "none", "islands"]
    assert set(apart) < set(ALGORITHMS)
    for name in apart:
        with pytest.raises(UserError, match=f'"{name}" does not go with plan.zero = 1: '):
            simulate_world(2, partial(teacher.train, zero=1), name)
    for name in ("adasum", "delayed"):
        with pytest.raises(
            UserError, match=f'"{name}" does not go with plan.zero = 2: it works on the whole gradient of a step'
        ):
            simulate_world(2, partial(teacher.train, zero=2), name)


class Counting(torch.optim.Optimizer):
    """Keeps a count that is not a tensor, as many third-party optimizers do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    parameter.sub_(parameter.grad, alpha=group["lr"] / state["count"])


def counts(world, zero: int, directory: Path, steps: int) -> dict[str, int]:
    """Trains on, saves; the counts by parameter."""
    running = make(world, zero, "fp32", Counting)
    if steps > 2:
        running.load(directory)
    for batch in running.batches(CASES["tied"].data(), steps=2):
        running.step(batch)
    running.save(directory)
    found = {name: running.optimizer.torch.state[each]["count"] for name, each in running.optimizer.parameters.items()}
    running.close()
    return found


def test_state_that_is_no_tensor_is_in_checkpoints_of_all_owners(tmp_path):
    run_ranks(counts, 2, 1, tmp_path, 2)
    for found in run_ranks(counts, 3, 1, tmp_path, 4):
        assert set(found.values()) <= {4}


def unusual(world, zero: int) -> list[float]:
    """A group of one small parameter, an empty one, and an optimizer over flat storage: most ranks own nothing of the
    first group."""

    class Unusual(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))
            self.nothing = torch.nn.Parameter(torch.empty(3, 0))
            self.body = torch.nn.Linear(12, 4)

        def forward(self, x):
            return self.body(x) * self.scale + self.nothing.sum()

    running = Engine(
        Unusual, teacher.regression, NADAM, Plan(dp=world.size, zero=zero), global_batch=16, microbatch=2, world=world,
        param_groups=lambda name, _: {"weight_decay": 0.1} if name == "scale" else {},
    )  # fmt: skip
    losses = [running.step(batch).loss for batch in running.batches(teacher.data(), steps=5)]
    running.close()
    return losses


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_own_nothing_of_a_group(stage):
    whole = reference(unusual, 4, 0)
    for ours, theirs in zip(run_ranks(unusual, 4, stage), whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def not_finite(world) -> str:
    """A weight of the last stretch goes bad on its owner; everybody names it."""
    running = make(world, 1, "fp32")
    batches = running.batches(CASES["tied"].data())
    running.step(next(batches))
    name = "token_embedding.weight"
    running.world.everyone.barrier()
    if world.rank == 0:
        with torch.no_grad():
            running.parameters[name][0, 0] = float("nan")
    running.world.everyone.barrier()
    try:
        for batch in batches:
            running.step(batch)
    except TrainingError as error:
        return str(error)
    return "no error"


def test_the_report_of_what_is_not_finite_is_the_same_for_all_owners():
    first, *others = run_ranks(not_finite, 3)
    assert (
        "first parameter with a gradient that is not finite" in first
        and "weights already not finite: token_embedding.weight" in first
    )
    assert all(other == first for other in others)


class Lamb(torch.optim.Optimizer):
    """Adam's direction, as long as the weight itself: it needs the norm of the whole weight."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["m"], state["v"], state["norms"] = (
                            torch.zeros_like(p),
                            torch.zeros_like(p),
                            torch.zeros(2),
                        )
                    state["m"].lerp_(p.grad, 1 - group["betas"][0])
                    state["v"].lerp_(p.grad.square(), 1 - group["betas"][1])
                    direction = state["m"] / (state["v"].sqrt() + 1e-6)
                    state["norms"].copy_(torch.stack([p.norm(), direction.norm()]))
                    p.sub_(direction * (p.norm() / (direction.norm() + 1e-6)), alpha=group["lr"])


class Matrices(torch.nn.Module):
    """Weights only, as Muon takes them; one is much larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [teacher.INPUTS, 40, 7, 9, teacher.OUTPUTS]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


WHOLE = {"muon": partial(torch.optim.Muon, lr=1e-2), "adafactor": partial(torch.optim.Adafactor, lr=1e-2), "lamb": Lamb}


def of_matrices(world, name: str, zero: Stage, directory: Path, steps: int) -> tuple:
    """Trains on from what is in `directory`, if there is something, and saves; losses, masters, whether a parameter was
    cut, elements of padding."""
    torch.set_num_threads(1)
    running = Engine(
        Matrices, teacher.regression, WHOLE[name], plan_of(world, zero), global_batch=16, microbatch=4,
        world=apart(world) if zero == "hosts" else world, clip=0.5,
    )  # fmt: skip
    if steps > 4:
        running.load(directory)
    losses = [running.step(batch).loss for batch in running.batches(teacher.data(), steps=steps - running.step_index)]
    running.save(directory)
    masters = gathered(running, {key: value.detach() for key, value in running.optimizer.parameters.items()})
    cut = any(slot.whole is not None for slot in running.optimizer.slots.values())
    running.close()
    return losses, masters, cut


CUTS = [(2, 1), (3, 2), (3, 3), (3, "hosts"), (4, "hybrid")]


@pytest.mark.parametrize(("cut", "name"), thinned(list(itertools.product(CUTS, WHOLE)), in_turn(CUTS, list(WHOLE))))
def test_optimizers_of_whole_matrices_get_whole_parameters(cut, name, tmp_path):
    """Trained on with another number of owners, too: their state is that of the parameters."""
    size, zero = cut
    whole = [run_ranks(of_matrices, 1, name, 0, tmp_path / "whole", steps)[0] for steps in (4, 8)]
    first = run_ranks(of_matrices, size, name, zero, tmp_path / "cut", 4)[0]
    second = run_ranks(of_matrices, 5 - size if size < 4 else 3, name, 1, tmp_path / "cut", 8)[0]
    assert not first[2] and not second[2]
    assert first[0] + second[0] == pytest.approx(whole[0][0] + whole[1][0], rel=1e-3)
    for key, value in whole[1][1].items():
        torch.testing.assert_close(second[1][key], value, rtol=1e-2, atol=1e-3)


class Together(torch.optim.SGD):
    """Divides all gradients by the norm of all."""

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.div_(norm)
        return super().step(closure)


def test_an_optimizer_that_looks_at_all_parameters_is_refused():
    with pytest.raises(UserError, match="Together updates parameters by what it sees of the others"):
        simulate_world(2, partial(teacher.train, zero=1, optimizer=Together), "allreduce")
