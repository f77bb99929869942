"""The engine as a user meets it: cursor, results, save and load, export, iterables, errors, derivatives."""

from __future__ import annotations

import gc
import importlib
import json
import math
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from shoal import lr
from shoal.comm import World
from shoal.engine import Engine
from shoal.errors import CheckpointError, TrainingError, UserError
from shoal.models import GPT, GPTConfig, causal_lm, regression
from shoal.plan import Plan
from tests.parity.cases import CASES, SAMPLES, engine, text, vectors
from tests.pool import run_ranks

verifying = importlib.import_module("shoal.checkpoint.verify")
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def small(**options) -> Engine:
    return Engine(lambda: nn.Linear(10, 3), regression, ADAMW, **{"global_batch": 4, **options})


# Resume


def train_saving(world, case: str, precision: str, directory: str, before: int, after: int) -> list[float]:
    """Trains `before` steps and saves, then makes a new engine, loads and trains `after` more; the losses of all."""
    data, losses = CASES[case].data(), []
    for steps in (before, after):
        running = engine(case, precision, 1, world=world)
        if losses:
            assert running.load(directory) == {"note": "mine"}
        losses += [running.step(batch).loss for batch in running.batches(data, steps=steps)]
        running.save(directory, extra={"note": "mine"}, wait=steps == before)
        running.close()
    return losses


@pytest.mark.parametrize(
    ("case", "precision"),
    [("gpt-rotary-dropout", "fp32"), ("resnet-batchnorm", "fp64"), ("tied", "bf16"), ("unused-frozen", "fp32")],
)
def test_resume_continues_the_same_losses(case, precision, tmp_path):
    whole = run_ranks(train_saving, 2, case, precision, str(tmp_path / "whole"), 9, 0)
    cut = run_ranks(train_saving, 2, case, precision, str(tmp_path / "cut"), 4, 5)
    assert cut == whole, "the same bits"


def continue_from(world, case: str, precision: str, directory: str, steps: int) -> list[float]:
    running = engine(case, precision, 1, world=world)
    running.load(directory)
    assert running.step_index == 9
    return [running.step(batch).loss for batch in running.batches(CASES[case].data(), steps=steps)]


def load_damaged(world, directory: str) -> list[str]:
    path, said = Path(directory) / "step-00000002", []
    running = small(world=world, plan=Plan(dp=2, zero=1))
    before = running.parameters["weight"].detach().clone()
    for load in (path, Path(directory) / "step-00000007"):
        with pytest.raises(CheckpointError) as refused:
            running.load(load)
        said.append(str(refused.value))
    assert running.step_index == 0 and torch.equal(running.parameters["weight"], before)
    return said


def test_a_checkpoint_given_by_its_name_is_verified_on_the_first_rank_for_all(tmp_path):
    """A flipped bit in a number is found by the hash alone: it would be loaded as another weight."""
    running = small()
    for batch in running.batches(vectors(), steps=2):
        running.step(batch)
    running.save(tmp_path)
    file = next((tmp_path / "step-00000002").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[data.index(running.parameters["weight"].detach().numpy().tobytes()) + 3] ^= 1
    file.write_bytes(data)
    for damaged, missing in run_ranks(load_damaged, 2, str(tmp_path)):
        assert f"{file}: contents changed since the save" in damaged
        assert f"load the directory {tmp_path}" in damaged
        assert "step-00000007: manifest.json is missing" in missing


@pytest.mark.fast
def test_what_was_just_verified_is_not_read_again(tmp_path, monkeypatch):
    hashed: list[Path] = []
    whole = verifying._problem
    monkeypatch.setattr(verifying, "_problem", lambda file, *more: hashed.append(file) or whole(file, *more))
    small().save(tmp_path)
    path = tmp_path / "step-00000000"
    files = sorted(file for file in path.iterdir() if file.name != "manifest.json")
    small().load(tmp_path)
    assert sorted(hashed) == files
    small().load(path)
    assert sorted(hashed) == files, "known to be sound"
    files[-1].write_bytes(files[-1].read_bytes())
    small().load(path)
    assert sorted(hashed) == sorted(files * 2), "written since"


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("case", ["gpt", "resnet-batchnorm"])
def test_resume_on_another_number_of_ranks(case, size, tmp_path):
    run_ranks(train_saving, 2, case, "fp64", str(tmp_path), 9, 0)
    expected = run_ranks(continue_from, 2, case, "fp64", str(tmp_path), 5)[0]
    assert run_ranks(continue_from, size, case, "fp64", str(tmp_path), 5)[0] == pytest.approx(expected, rel=1e-9)


def test_a_checkpoint_of_one_precision_loads_under_another(tmp_path):
    first = engine("gpt", "bf16", 1)
    for batch in first.batches(text(), steps=3):
        first.step(batch)
    first.save(tmp_path)
    second = engine("gpt", "fp32", 1)
    second.load(tmp_path)
    for name, value in first.optimizer.parameters.items():
        assert torch.equal(second.optimizer.parameters[name], value), "masters are fp32 in both"


@pytest.mark.fast
def test_a_scheduler_with_number_keys_resumes(tmp_path):
    """Its milestones are a Counter of step numbers, which JSON makes texts."""
    falling = partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[3, 5])
    rates = []
    for cut in (False, True):
        running, mine = small(schedule=falling), []
        for batch in running.batches(vectors(), steps=7):
            mine.append(running.step(batch).lr[0])
            if cut and batch.step == 1:
                running.save(tmp_path)
                running = small(schedule=falling)
                running.load(tmp_path)
        rates.append(mine)
    assert rates[0] == rates[1] == pytest.approx([1e-2] * 3 + [1e-3] * 2 + [1e-4] * 2)


@pytest.mark.fast
def test_another_global_batch_is_warned_of(tmp_path):
    small().save(tmp_path)
    with pytest.warns(UserWarning, match="global_batch = 8 is used from here on.*trained with 4.*exactly once"):
        small(global_batch=8).load(tmp_path)


@pytest.mark.fast
def test_a_parameter_moved_out_of_its_chunk_is_noticed(tmp_path):
    running = small()
    running.module.weight.data = torch.zeros(3, 10)
    with pytest.raises(UserError, match="weight is no longer a view of its chunk"):
        running.save(tmp_path)


def drift(world, directory: str) -> dict[str, torch.Tensor]:
    running = small(world=world, plan=Plan(dp=2, exchange="none"))
    for batch in running.batches(CASES["mlp-dropout"].data(), steps=3):
        running.step(batch)
    own = running.parameters["weight"].detach().clone()
    running.save(directory)
    exported = load_file(running.export(Path(directory) / "export") / "model.safetensors")["weight"]
    assert torch.equal(running.parameters["weight"], own), "afterwards each replica is itself again"
    fresh = small(world=World.single())
    fresh.load(directory)
    return {"own": own, "exported": exported, "loaded": fresh.parameters["weight"].detach().clone()}


def test_of_replicas_that_drift_the_mean_is_saved_and_exported(tmp_path):
    first, second = run_ranks(drift, 2, str(tmp_path))
    assert not torch.equal(first["own"], second["own"])
    mean = (first["own"] + second["own"]) / 2
    for seen in (first, second):
        torch.testing.assert_close(seen["exported"], mean, rtol=0, atol=1e-7)
        torch.testing.assert_close(seen["loaded"], mean, rtol=0, atol=1e-7)


@pytest.mark.fast
def test_loading_says_what_does_not_fit(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint to load"):
        small().load(tmp_path)
    running = small()
    running.save(tmp_path)
    other = Engine(lambda: nn.Linear(10, 4), regression, ADAMW, global_batch=4)
    with pytest.raises(CheckpointError, match=r"model.bias has shape \(3,\), the model wants \(4,\)"):
        other.load(tmp_path)


@pytest.mark.fast
def test_a_damaged_newest_checkpoint_is_named_and_passed_over(tmp_path):
    running = small()
    for batch in running.batches(vectors(), steps=2):
        running.step(batch)
        running.save(tmp_path)
    newest = max(tmp_path.glob("step-*/*.distcp"))
    newest.write_bytes(newest.read_bytes()[:-100])
    again = small()
    with pytest.warns(UserWarning, match="step-00000002: .*step-00000001 is used|step-00000001 is used: step-00000002"):
        again.load(tmp_path)
    assert again.step_index == 1


# Results and data


@pytest.mark.fast
def test_batches_are_those_of_the_cursor_and_the_last_of_an_epoch_is_short():
    running = small(global_batch=9)
    seen = [(batch.step, batch.epoch, len(batch.ids)) for batch in running.batches(vectors(), epochs=2)]
    assert [size for _, _, size in seen] == [9, 9, 9, 9, 5] * 2 and [epoch for _, epoch, _ in seen] == [0] * 5 + [1] * 5
    ids = [i for batch in running.batches(vectors(), epochs=1) for i in batch.ids]
    assert sorted(ids) == list(range(SAMPLES)) and ids != sorted(ids)
    assert next(iter(small(global_batch=9, seed=1).batches(vectors()))).ids != tuple(ids[:9])


@pytest.mark.fast
def test_results_are_those_of_the_global_batch():
    options = {"global_batch": 4, "clip": 1e-3, "schedule": lr.constant(warmup=1)}
    running = Engine(lambda: nn.Linear(10, 3), regression, partial(torch.optim.SGD, lr=10.0), **options)
    before = [parameter.detach().clone() for parameter in running.module.parameters()]
    batch = next(iter(running.batches(vectors())))
    with torch.no_grad():
        mb = batch.load(batch.ids)
        expected = (running.module(mb["inputs"]) - mb["targets"]).square().mean().item()
    out = running.step(batch)
    assert out.loss == pytest.approx(expected, rel=1e-6) and out.tokens == 12 and out.step == 0
    assert out.lr == (5.0,) and out.grad_norm > 0.1 and 0 < out.seconds < 10
    moved = torch.cat(
        [(now.detach() - then).flatten() for now, then in zip(running.module.parameters(), before, strict=True)]
    )
    assert float(moved.norm()) == pytest.approx(5.0 * 1e-3, rel=1e-3), "clipped"


@pytest.mark.fast
def test_state_that_is_not_laid_out_as_its_parameter_loses_no_bit(tmp_path):
    def adafactor() -> Engine:
        return Engine(lambda: nn.Linear(10, 3), regression, partial(torch.optim.Adafactor, lr=0.1), **options)

    options = {"global_batch": 4, "precision": "fp64"}
    running, other = adafactor(), adafactor()
    for batch in running.batches(vectors(), steps=3):
        running.step(batch)
    running.save(tmp_path)
    other.load(tmp_path)
    states = [each.optimizer.state_tensors() for each in (running, other)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert {value.dtype for value in states[1].values()} == {value.dtype for value in states[0].values()}


def test_how_many_checkpoints_are_kept_is_said_at_each_save(tmp_path):
    running, kept = small(), []
    for batch, keep in zip(running.batches(vectors()), [1, 3, 3, 3, 2], strict=False):
        running.step(batch)
        running.save(tmp_path, keep=keep)
        kept.append(sorted(int(path.name[-1]) for path in tmp_path.glob("step-*")))
    assert kept == [[1], [1, 2], [1, 2, 3], [2, 3, 4], [4, 5]]
    with pytest.raises(UserError, match="keep = 0: give the number of newest checkpoints to keep, at least 1"):
        running.save(tmp_path, keep=0)
    with pytest.raises(UserError, match=r"extra is not JSON data: .*Tensor.*are saved by engine.state"):
        running.save(tmp_path, extra={"best": torch.zeros(1)})


def test_a_batch_of_another_step_is_refused():
    running = small()
    stream = running.batches(vectors())
    next(stream)
    with pytest.raises(UserError, match="this batch is of step 1, the engine is at step 0"):
        running.step(next(stream))


class Stream:
    """An iterable whose samples cannot be asked for by number."""

    def __init__(self) -> None:
        self.reads = 0

    def __iter__(self):
        for sample in vectors()[:10]:
            self.reads += 1
            yield sample


def train_stream(world, directory: str, resume: bool):
    running, stream = small(world=world, seed=3), Stream()
    if resume:
        running.load(directory)
    losses = [running.step(batch).loss for batch in running.batches(stream, epochs=2)] if resume else []
    if not resume:
        for batch in running.batches(stream, epochs=2):
            losses.append(running.step(batch).loss)
            if batch.step == 3:
                running.save(directory)
    return losses, stream.reads


def train_stream_by_steps(world):
    running, stream = small(world=world), Stream()
    first = [running.step(batch).step for batch in running.batches(stream, steps=2)]
    return first + [running.step(batch).step for batch in running.batches(stream, steps=2)], stream.reads


def test_steps_of_an_iterable_take_no_sample_too_many():
    (steps, reads), _ = run_ranks(train_stream_by_steps, 2)
    assert steps == [0, 1, 2, 3] and reads == 14, "4 + 4 + the last 2 of the epoch, then 4 of the next"


def test_an_iterable_is_read_by_one_rank_and_its_place_is_saved(tmp_path):
    (losses, reads), (same, none) = run_ranks(train_stream, 2, str(tmp_path), False)
    assert losses == same and len(losses) == 6 and reads == 20 and none == 0
    resumed = run_ranks(train_stream, 3, str(tmp_path), True)
    assert resumed[0][0] == pytest.approx(losses[4:], rel=1e-6)


@pytest.mark.parametrize("first", [vectors, Stream])
def test_an_iterable_begins_where_other_data_end(first):
    running = small()
    steps = [running.step(batch).step for batch in running.batches(first(), steps=2)]
    stream = Stream()
    steps += [running.step(batch).step for batch in running.batches(stream, steps=2)]
    steps += [running.step(batch).step for batch in running.batches(vectors(), steps=1)]
    assert steps + [running.step(batch).step for batch in running.batches(stream, steps=1)] == [0, 1, 2, 3, 4, 5]
    assert stream.reads == 10


def test_a_batch_of_an_iterable_that_was_not_trained_is_not_lost(tmp_path):
    """A loop that looks at the step before it trains, here and after a load."""
    whole = train_stream(World.single("cpu"), str(tmp_path / "whole"), False)[0]
    running, stream, losses = small(seed=3), Stream(), []
    for batch in running.batches(stream):
        if running.step_index == 2:
            running.save(tmp_path)
            break
        losses.append(running.step(batch).loss)
    other = small(seed=3)
    other.load(tmp_path)
    for each, data in ((running, stream), (other, Stream())):
        assert losses + [each.step(batch).loss for batch in each.batches(data, epochs=2)] == whole


class Counting(nn.Module):
    """Keeps a moving average and a counter that are nobody's BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 3)
        self.register_buffer("average", torch.zeros(10))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest_rank", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.lerp_(x.detach().mean(0), 0.5)
        self.calls.add_(1)
        return self.linear(x)


def train_counting(world):
    running = Engine(Counting, regression, ADAMW, global_batch=6, microbatch=2, world=world)
    for batch in running.batches(vectors(), steps=1):
        running.step(batch)
        means = [batch.load(batch.ids[i : i + 2])["inputs"].mean(0) * 0.5 for i in (0, 2, 4)]
    return running.module.average, int(running.module.calls), means


def test_buffers_that_a_forward_changes_are_equal_after_a_step():
    """Rank 0 runs two of three microbatches, with halved means m: those of one process."""
    for average, calls, (m0, m1, m2) in run_ranks(train_counting, 2):
        torch.testing.assert_close(average, (m0 / 2 + m1) / 2 + m2)
        assert calls == 3


# Errors


class Explodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine, self.bad = nn.Linear(10, 8), nn.Linear(8, 3)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bad(self.fine(x)) * self.factor


def explode(world):
    running = Engine(Explodes, regression, ADAMW, global_batch=4, world=world)
    data = vectors()
    for batch in running.batches(data):
        before = running.module.bad.weight.detach().clone()
        if batch.step == 2 and world.rank == world.size - 1:
            running.module.factor = math.nan
        try:
            running.step(batch)
        except TrainingError as error:
            return str(error), torch.equal(before, running.module.bad.weight)
    raise AssertionError("it trained on")


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_that_is_not_finite_stops_every_rank_with_the_weights_unharmed(size):
    for message, unharmed in run_ranks(explode, size):
        assert message.startswith(
            "step 2: the loss is nan; first parameter with a gradient that is not finite: bad.bias (4 of 4)"
        )
        assert unharmed


@pytest.mark.fast
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.ones(()), "loss returned a tensor of shape (): return (sum, count)"),
        ((torch.ones(3), 1), "loss returned (a tensor of shape (3,), a int): both must be single numbers"),
        ((torch.ones(()), 1, {"z": torch.ones(2)}), "loss returned a tensor of shape (2,) as auxiliary loss z"),
    ],
)
def test_a_loss_that_breaks_its_contract_is_told(result, message):
    running = Engine(lambda: nn.Linear(10, 3), lambda model, mb: result, ADAMW, global_batch=4)
    with pytest.raises(UserError) as error:
        running.step(next(iter(running.batches(vectors()))))
    assert message in str(error.value)


@pytest.mark.fast
def test_an_error_in_the_users_model_carries_the_shapes():
    running = Engine(lambda: nn.Linear(9, 3), regression, ADAMW, global_batch=4, microbatch=2)
    with pytest.raises(RuntimeError) as error:
        running.step(next(iter(running.batches(vectors()))))
    assert error.value.__notes__ == ["after 0 steps, in microbatch 1 of 2 on this rank: inputs (2, 10), targets (2, 3)"]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 0}, "global_batch = 0"),
        ({"microbatch": 9}, "microbatch = 9: give 1 to global_batch (4)"),
        ({"precision": "bf61"}, 'Did you mean "bf16"?'),
        ({"dropout": "keyd"}, 'dropout = "keyd"'),
        ({"plan": Plan(schedule="1f1bb")}, 'plan.schedule = "1f1bb" is none of gpipe'),
        ({"plan": Plan(dp=2)}, "needs pp 1 x dp 2 x cp 1 x tp 1 = 2 ranks, but 1 were started: dp = 1 works here"),
    ],
)
def test_what_does_not_fit_together_is_refused(options, message):
    with pytest.raises(UserError) as error:
        small(**options)
    assert message in str(error.value)


@pytest.mark.fast
def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(UserError, match="nothing to train"):
        Engine(lambda: nn.Linear(2, 2).requires_grad_(False), regression, ADAMW, global_batch=1)


# Export, compile, derivatives


@pytest.mark.parametrize("case", ["gpt", "llama", "tied"])
def test_export_loads_in_transformers_with_the_same_logits(case, tmp_path):
    from transformers import AutoModelForCausalLM

    running = engine(case, "fp32", 1)
    for batch in running.batches(text(), steps=2):
        running.step(batch)
    running.export(tmp_path)
    ids = torch.stack([row["input_ids"] for row in text()[:3]])
    running.module.eval()
    with torch.no_grad():
        ours, theirs = running.module(ids), AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
    torch.testing.assert_close(getattr(ours, "logits", ours), theirs, rtol=1e-4, atol=1e-5)


class OfAHub(nn.Linear):
    """As mixins of other libraries make them."""

    def save_pretrained(self, directory: str) -> None:
        raise NotImplementedError


@pytest.mark.fast
@pytest.mark.parametrize("kind", [nn.Linear, OfAHub])
def test_export_of_any_other_model_is_plain_safetensors(tmp_path, kind):
    running = Engine(lambda: kind(10, 3), regression, ADAMW, global_batch=4)
    running.export(tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], running.module.weight)
    assert json.loads((tmp_path / "model.json").read_text())["class"].endswith(kind.__name__)


@pytest.mark.fast
def test_an_export_leaves_alone_what_lies_beside_it(tmp_path):
    own = tmp_path / "out.tmp" / "notes"
    own.parent.mkdir()
    own.write_text("mine")
    Engine(lambda: nn.Linear(10, 3), regression, ADAMW, global_batch=4).export(tmp_path / "out")
    assert own.read_text() == "mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "out.tmp"]


@pytest.mark.fast
def test_an_export_removes_what_a_loader_would_read_of_an_earlier_one(tmp_path):
    earlier = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json"]
    others = ["tokenizer.json", "notes/adapter_config.json", "weights.safetensors"]
    (tmp_path / "notes").mkdir()
    for name in earlier + others:
        (tmp_path / name).write_text("of before")
    Engine(lambda: nn.Linear(10, 3), regression, ADAMW, global_batch=4).export(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"model.safetensors", "model.json", *others}


def test_a_backend_that_torch_does_not_have_is_refused():
    with pytest.raises(
        UserError, match=r"plan.compile = '../../x' is no backend of torch.compile \(.*inductor.*Give one of them"
    ):
        engine("mlp-dropout", "fp32", 1, plan=Plan(compile="../../x"))


@pytest.mark.parametrize("case", ["gpt-rotary-dropout", "mlp-dropout"])
def test_compiled_blocks_give_the_numbers_of_eager_ones(case):
    data = CASES[case].data()
    losses = []
    for compile in (False, "aot_eager"):
        running = engine(case, "fp64", 1, plan=Plan(compile=compile))
        losses.append([running.step(batch).loss for batch in running.batches(data, steps=6)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


def test_blocks_share_one_compilation():
    """Four blocks and many steps: nothing about a layer's name, a key or a step may end in a guard."""
    torch._dynamo.reset()
    factory = lambda: GPT(GPTConfig(vocab_size=61, sequence=12, layers=4, d_model=16, heads=2, dropout=0.1))  # noqa: E731
    running = Engine(factory, causal_lm, ADAMW, Plan(compile="aot_eager"), global_batch=4, microbatch=2)
    batches = running.batches(text())
    running.step(next(batches))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            running.step(next(batches))


def derivatives(world):
    running = engine("gpt", "fp64", 1, world=world)
    objective = running.objective(next(iter(running.batches(text()))))
    weights = {name: value.detach() for name, value in running.parameters.items()}
    draw = torch.Generator().manual_seed(0)
    direction = {name: torch.randn(value.shape, generator=draw, dtype=torch.float64) for name, value in weights.items()}
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel of the CPU has no derivative in forward mode
        value, slope = torch.func.jvp(objective, (weights,), (direction,))
        gradient, product = torch.func.jvp(torch.func.grad(objective), (weights,), (direction,))
    return value, slope, gradient, product


def gradient_of_a_short_batch(world):
    running = Engine(
        lambda: nn.Linear(10, 3), regression, ADAMW, global_batch=2, microbatch=1, precision="fp64", world=world
    )
    weights = {name: value.detach() for name, value in running.parameters.items()}
    return torch.func.grad(running.objective(next(iter(running.batches(vectors())))))(weights)["weight"]


def test_an_objective_leaves_no_statistics_behind():
    """A function of the parameters: ranks that had other microbatches had other statistics after it."""
    model = lambda: nn.Sequential(nn.BatchNorm1d(10), nn.Linear(10, 3))  # noqa: E731
    running = Engine(model, regression, ADAMW, global_batch=8, microbatch=4)
    before = {name: value.clone() for name, value in running.module.named_buffers()}
    objective = running.objective(next(iter(running.batches(vectors()))))
    weights = {name: value.detach() for name, value in running.parameters.items()}
    assert torch.func.grad_and_value(objective)(weights)[1] == objective(weights)
    assert all(torch.equal(value, before[name]) for name, value in running.module.named_buffers())


def test_an_objective_leaves_a_layer_of_two_names_its_weights():
    layer = nn.Linear(10, 10)
    running = Engine(nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(10, 3)), regression, ADAMW, global_batch=8)
    own = list(running.module.parameters())
    weights = {name: value.detach().clone() for name, value in running.parameters.items()}
    torch.func.grad(running.objective(next(iter(running.batches(vectors())))))(weights)
    assert all(each is before for each, before in zip(running.module.parameters(), own, strict=True))


class Block(nn.Module):
    """Finds its weight, and a view of it without a gradient, by name, or where it keeps them besides."""

    def __init__(self, place: str, p: float) -> None:
        super().__init__()
        self.layer, self.place, self.p = nn.Linear(10, 10), place, p
        self.found, self.view = [self.layer.weight], self.layer.weight.detach().t()
        if place == "buffer":
            self.register_buffer("seen", self.layer.weight.detach().t(), persistent=False)

    def forward(self, x):
        weight, seen = self.layer.weight, self.layer.weight.detach().t()
        if self.place != "name":
            weight, seen = self.found[0], self.seen if self.place == "buffer" else self.view
        dropped = F.dropout(self.layer(x).tanh(), self.p)
        return dropped @ torch.cat([weight[:5], weight[5:]]) + x @ seen


class Blocks(nn.Module):
    def __init__(self, place: str, reentrant: bool | None = None, p: float = 0.0) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(place, p), Block(place, p)]), nn.Linear(10, 3)
        self.reentrant = reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.head(self.blocks[1](self.blocks[0](x)))
        x = x.detach().requires_grad_()  # the reentrant one has gradients of weights only beside one of an input
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def with_decay(model, mb):
    total, count = regression(model, mb)
    return total + sum(each.square().sum() for each in model.parameters()), count


def at_other_weights(model, loss, plan: Plan | None = None) -> list[torch.Tensor]:
    """The loss and its gradients at weights that are not the engine's."""
    running = Engine(model, loss, ADAMW, plan, global_batch=8, microbatch=4, precision="fp64")
    with running.whole_weights():
        weights = {name: 1.5 * value.detach().clone() for name, value in running.parameters.items()}
    objective = running.objective(next(iter(running.batches(vectors()))))
    for value in weights.values():
        value.requires_grad_()
    loss = objective(weights)
    loss.backward()
    running.close()
    return [loss.detach(), *(value.grad for value in weights.values())]


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (partial(Blocks, "list"), Plan()),
        (partial(Blocks, "buffer"), Plan()),
        (partial(Blocks, "list"), Plan(memory={})),
        (partial(Blocks, "list"), Plan(recompute="full", compile="aot_eager")),
        (partial(Blocks, "list", reentrant=False), Plan()),
        (partial(Blocks, "name", reentrant=True), Plan()),
    ],
    ids=["list", "buffer", "memory", "recompute", "checkpoint", "reentrant"],
)
def test_an_objective_has_its_weights_wherever_the_model_has_them(model, plan):
    """A list, or a forward that backward runs again, had the engine's own, silently."""
    torch.testing.assert_close(
        at_other_weights(model, regression, plan), at_other_weights(partial(Blocks, "name"), regression)
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_objective_drops_the_same_where_backward_runs_a_forward_again(reentrant):
    """It has its weights there too: both are put around what torch.utils.checkpoint runs again."""
    found, wanted = (at_other_weights(partial(Blocks, "name", each, 0.5), regression) for each in (reentrant, None))
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(wanted[0], at_other_weights(partial(Blocks, "name"), regression)[0])


def test_an_objective_has_its_weights_where_a_loss_asks_the_model_for_them():
    running = Engine(lambda: nn.Linear(10, 3), with_decay, ADAMW, global_batch=8, precision="fp64")
    weights = {name: 2 * value.detach() for name, value in running.parameters.items()}
    batch = next(iter(running.batches(vectors())))
    rows = batch.load(batch.ids)

    def by_hand(weights):
        output = F.linear(rows["inputs"].double(), weights["weight"], weights["bias"])
        total, count = regression(lambda _: output, rows)
        return (total + sum(each.square().sum() for each in weights.values())) / count

    found = torch.func.grad_and_value(running.objective(batch))(weights)
    torch.testing.assert_close(found, torch.func.grad_and_value(by_hand)(weights))


def test_a_rank_without_a_microbatch_takes_part_in_derivatives():
    reference = run_ranks(gradient_of_a_short_batch, 1)[0]
    for ours in run_ranks(gradient_of_a_short_batch, 3):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [2, 3])
def test_jvp_and_hessian_vector_products_equal_one_process(size):
    value, slope, gradient, product = run_ranks(derivatives, 1)[0]
    for ours in run_ranks(derivatives, size):
        torch.testing.assert_close(ours, (value, slope, gradient, product), rtol=1e-9, atol=1e-12)
    inner = sum((gradient[name] * d).sum() for name, d in direction_like(gradient).items())
    assert slope == pytest.approx(float(inner), rel=1e-9), "the slope is the gradient in that direction"


def direction_like(weights):
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(value.shape, generator=draw, dtype=torch.float64) for name, value in weights.items()}


@pytest.mark.fast
def test_fused_dropout_trains_and_is_repeatable():
    losses = []
    for _ in range(2):
        running = engine("mlp-dropout", "fp32", 1, dropout="fused")
        losses.append([running.step(batch).loss for batch in running.batches(vectors(), steps=3)])
    assert losses[0] == losses[1]


@pytest.mark.fast
@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adamax, torch.optim.NAdam]
)
def test_any_torch_optimizer_trains_and_resumes(optimizer, tmp_path):
    data, losses = vectors(), []
    for cut in (False, True):
        running, mine = (
            Engine(lambda: nn.Linear(10, 3), regression, partial(optimizer, lr=1e-3), global_batch=8, clip=0.1),
            [],
        )
        for batch in running.batches(data, steps=6):
            mine.append(running.step(batch).loss)
            if cut and batch.step == 2:
                running.save(tmp_path)
                running = Engine(
                    lambda: nn.Linear(10, 3), regression, partial(optimizer, lr=1e-3), global_batch=8, clip=0.1
                )
                running.load(tmp_path)
        losses.append(mine)
    assert losses[0] == losses[1]


def test_a_loss_that_returns_tensors_is_learned_in_bf16():
    cfg = GPTConfig(vocab_size=257, sequence=16, layers=1, d_model=16, heads=2)
    data = [{"input_ids": torch.arange(16), "labels": torch.arange(1, 17)}] * 8

    def loss(model, mb):
        logits = model(mb["input_ids"])
        each = F.cross_entropy(logits.flatten(0, 1), mb["labels"].flatten(), reduction="sum")
        return each, (mb["labels"] != -100).sum()

    optimizer, options = partial(torch.optim.AdamW, lr=3e-3), {"global_batch": 4, "microbatch": 2, "precision": "bf16"}
    running = Engine(lambda: GPT(cfg), loss, optimizer, Plan(dp=1), **options, seed=0)
    losses = [running.step(batch).loss for batch in running.batches(data, steps=30)]
    running.close()
    assert losses[0] > losses[-1] + 0.5


@pytest.mark.parametrize("plan", [Plan(), Plan(recompute="full"), Plan(memory={}), Plan(compile="aot_eager")], ids=str)
def test_nothing_of_an_engine_outlives_it(plan):
    """Hooks on parameters would keep all of it, memory shared among ranks included."""
    running = engine("gpt", "fp32", 1, plan=plan)
    running.step(next(running.batches(CASES["gpt"].data())))
    running.close()
    kept = [weakref.ref(each) for each in (running, running.module, running.parts.chunks[0])]
    del running
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3
