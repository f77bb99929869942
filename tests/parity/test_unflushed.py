"""Schedules without a flush against one process that makes the same delayed updates by hand."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal import Engine, Plan
from shoal.data import Cursor
from shoal.data.loader import stack_samples
from shoal.models import GPT, LSTM, GPTConfig, LSTMConfig, MoEConfig, causal_lm
from shoal.optim.groups import decay_matrices_only
from shoal.optim.lr import cosine
from shoal.pipeline import make_schedule, stages_of, units_of
from shoal.precision import cast_floating
from shoal.training.loss import call_loss
from shoal.training.microbatches import microbatches
from tests.parity.cases import text
from tests.pipeline.versions import kept_versions
from tests.pool import RankError, reference, run_ranks

STEPS, CLIP = 9, 0.5
ADAMW = partial(torch.optim.AdamW, lr=3e-3, eps=1e-4)  # what is small does not decide by its rounding
MODELS = {
    "gpt": partial(GPT, GPTConfig(61, 12, 8, 16, 4)),
    "short": partial(GPT, GPTConfig(61, 12, 2, 16, 4)),  # each block is compiled for itself
    "lstm": partial(LSTM, LSTMConfig(61, 16, 16, 8)),
    "moe": partial(GPT, GPTConfig(61, 12, 4, 16, 4, moe=MoEConfig(4, balance_loss=0.0, capacity_factor=1.0, every=2))),
}


def engine(world, model: str, plan: dict[str, Any], batch: int = 8, microbatch: int = 2, **more: Any) -> Engine:
    options = {
        "precision": "fp64",
        "clip": CLIP,
        "schedule": cosine(STEPS, warmup=2),
        "param_groups": decay_matrices_only(0.1),
        **more,
    }
    return Engine(
        MODELS[model], causal_lm, ADAMW, Plan(**plan), world=world, global_batch=batch, microbatch=microbatch, **options
    )


def by_hand(
    world, model: str, stages: int, delays: list[int], together: bool, batch: int, microbatch: int
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms of the updates and the weights after STEPS of them: step t sees of each stage the weights after
    max(0, t - its delay) updates."""
    running = engine(world, model, {}, batch, microbatch)
    module = copy.deepcopy(running.module)
    for parameter in module.parameters():
        parameter.grad_dtype = parameter.grad = None
    units = units_of(module)
    stage_of = {
        id(p): stage
        for unit, stage in zip(units, stages_of(units, stages), strict=True)
        for p in unit.module.parameters()
    }
    parameters = dict(module.named_parameters())
    optimizer = ADAMW([{"params": [p], **decay_matrices_only(0.1)(name, p)} for name, p in parameters.items()])
    scheduler, data = cosine(STEPS, warmup=2)(optimizer), text()
    cursor = Cursor(len(data), batch, 0)
    history = [{name: p.detach().clone() for name, p in parameters.items()}]
    losses, norms = [], []
    for step in range(STEPS):
        for name, p in parameters.items():
            p.data = history[max(0, step - delays[stage_of[id(p)]])][name].clone()
        optimizer.zero_grad(set_to_none=True)
        parts = [
            call_loss(causal_lm, module, cast_floating(stack_samples([data[i] for i in ids]), torch.float64))
            for ids in microbatches(cursor.ids(step).tolist(), microbatch)
        ]
        count = sum(part.count for part in parts)
        mean = sum(part.total for part in parts) / count
        mean.backward()
        losses.append(float(mean))
        for name, p in parameters.items():
            p.data = history[step][name].clone()
        sets = (
            [list(parameters.values())]
            if together
            else [[p for p in parameters.values() if stage_of[id(p)] == s] for s in range(stages)]
        )
        norms.append([float(torch.nn.utils.clip_grad_norm_(each, CLIP)) for each in sets])
        optimizer.step()
        scheduler.step()
        history.append({name: p.detach().clone() for name, p in parameters.items()})
    return losses, norms, history[-1]


def trained(
    world, model: str, plan: dict[str, Any], batch: int, microbatch: int, **more: Any
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    running = engine(world, model, plan, batch, microbatch, **more)
    results = [running.step(each) for each in running.batches(text(), steps=STEPS)]
    running.parts.runner.flush()
    weights = {name: value.detach().clone() for name, value in running.optimizer.parameters.items()}
    seen = {name: value.detach().clone() for name, value in running.parameters.items()}
    if running.plan.zero == 0:
        assert all(torch.equal(weights[name], seen[name]) for name in weights)
    losses, norms = [result.loss for result in results], [result.grad_norm for result in results]
    running.close()
    return losses, norms, seen


ROWS: list[tuple[str, dict[str, Any], int, int]] = [
    ("gpt", {"pp": 2, "schedule": "2bw"}, 8, 2),
    ("gpt", {"pp": 4, "schedule": "2bw"}, 4, 2),  # fewer microbatches than stages
    ("gpt", {"pp": 2, "dp": 2, "schedule": "2bw"}, 8, 2),
    ("gpt", {"pp": 2, "dp": 2, "zero": 1, "schedule": "2bw", "shares": [3, 1]}, 8, 2),
    ("gpt", {"pp": 2, "schedule": "2bw", "recompute": {"name": "blocks", "full": 1, "selective": [1]}}, 8, 2),
    ("short", {"pp": 2, "schedule": "2bw", "compile": "aot_eager"}, 8, 2),
    ("lstm", {"pp": 4, "schedule": "2bw"}, 8, 2),
    ("moe", {"pp": 2, "dp": 2, "schedule": "2bw"}, 8, 2),
    ("lstm", {"pp": 2, "schedule": "pipedream"}, 2, 2),
    ("lstm", {"pp": 4, "schedule": "pipedream"}, 2, 2),
    ("lstm", {"pp": 4, "schedule": {"name": "pipedream", "vertical_sync": True}}, 2, 2),
    ("lstm", {"pp": 2, "dp": 2, "schedule": "pipedream"}, 4, 2),
]


@pytest.mark.parametrize(("model", "plan", "batch", "microbatch"), ROWS)
def test_delayed_updates_are_those_made_by_hand(model, plan, batch, microbatch):
    together, pp = plan["schedule"] == "2bw", plan["pp"]
    vertical = not together and isinstance(plan["schedule"], dict)
    delays = [1] * pp if together else [pp - 1 - (0 if vertical else stage) for stage in range(pp)]
    losses, norms, weights = reference(by_hand, 1, model, pp, delays, together, batch, microbatch)[0]
    found = reference(trained, Plan(**plan).size, model, plan, batch, microbatch)
    for rank, (ours, seen_norms, own) in enumerate(found):
        assert ours == pytest.approx(losses, rel=1e-9)
        late, stage = (1 if together else pp - 1 - rank * pp // len(found)), rank * pp // len(found)
        expected = [row[0 if together else stage] for row in norms]
        assert seen_norms[late:] == pytest.approx(expected[: STEPS - late], rel=1e-9) and all(
            n != n for n in seen_norms[:late]
        )
        for name, value in own.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-8, atol=1e-10, msg=name)
    assert {name for _, _, own in found for name in own} == set(weights)


def interrupted(
    world,
    model: str,
    plan: dict[str, Any],
    batch: int,
    microbatch: int,
    directory: Path,
    at: int,
    going_on: dict[str, Any] | None = None,
) -> list[float]:
    """Trains `at` steps, saves, goes on in another engine."""
    first = engine(world, model, plan, batch, microbatch)
    losses = [first.step(each).loss for each in first.batches(text(), steps=at)]
    first.save(directory)
    first.evaluate(text()[:4])
    losses.append(first.step(next(first.batches(text()))).loss)  # the one that saved goes on as if it had not
    first.close()
    second = engine(world, model, going_on or plan, batch, microbatch)
    second.load(directory)
    losses += [second.step(each).loss for each in second.batches(text(), steps=STEPS - at)]
    second.close()
    return losses


@pytest.mark.parametrize(
    ("model", "plan", "batch", "going_on"),
    [
        ("gpt", {"pp": 2, "schedule": "2bw"}, 8, None),
        ("gpt", {"pp": 4, "schedule": "2bw"}, 8, {"pp": 2, "dp": 2, "schedule": "2bw", "zero": 1}),
        ("gpt", {"pp": 2, "dp": 2, "zero": 1, "schedule": "2bw"}, 8, None),
        ("lstm", {"pp": 4, "schedule": "pipedream"}, 2, None),
        ("lstm", {"pp": 4, "schedule": {"name": "pipedream", "vertical_sync": True}}, 2, None),
    ],
)
def test_a_checkpoint_has_the_versions_that_are_still_needed(model, plan, batch, going_on, tmp_path):
    size = Plan(**plan).size
    whole = reference(trained, size, model, plan, batch, 2)[0][0]
    found = run_ranks(interrupted, size, model, plan, batch, 2, tmp_path, 4, going_on)[0]
    assert found[:4] == whole[:4] and found[4] == whole[4]
    if going_on is None:
        assert found[5:] == whole[4:], "to the bit"
    else:
        assert found[5:] == pytest.approx(whole[4:], rel=1e-9)


def onwards(world, directory: Path) -> tuple[list[float], list[float], list[float]]:
    delayed = engine(world, "gpt", {"pp": 2, "schedule": "2bw"})
    for each in delayed.batches(text(), steps=3):
        delayed.step(each)
    delayed.save(directory)
    delayed.close()
    found = []
    for schedule in ("1f1b", "gpipe"):
        flushed = engine(world, "gpt", {"pp": 2, "schedule": schedule})
        flushed.load(directory)
        found.append([flushed.step(each).loss for each in flushed.batches(text(), steps=2)])
        flushed.save(directory / schedule)
        flushed.close()
    back = engine(world, "gpt", {"pp": 2, "schedule": "2bw"})
    back.load(directory / "1f1b")  # which has no versions: the newest one is taken until there are some
    found.append([back.step(each).loss for each in back.batches(text(), steps=2)])
    back.close()
    return found[0], found[1], found[2]


def test_checkpoints_load_across_schedules(tmp_path):
    flushed, gpipe, back = run_ranks(onwards, 2, tmp_path)[0]
    assert flushed == gpipe and len(back) == 2 and all(loss > 0 for loss in back)


@pytest.mark.parametrize(
    ("model", "plan", "more", "message"),
    [
        ("gpt", {"pp": 2, "schedule": "pipedream"}, {"batch": 2}, "some of them share weights"),
        ("lstm", {"pp": 2, "schedule": "pipedream"}, {}, "make global_batch = microbatch x dp"),
        ("lstm", {"pp": 2, "schedule": "pipedream"}, {"batch": 2, "precision": "fp16"}, "the loss scale is of all"),
        ("lstm", {"pp": 2, "dp": 2, "zero": 2, "schedule": "2bw"}, {}, "plan.zero = 2 keeps no whole gradient"),
        ("lstm", {"pp": 2, "schedule": {"name": "2bw", "every": 2}}, {}, "no parameter every"),
        (
            "lstm",
            {"pp": 2, "schedule": {"name": "pipedream", "vertical_sync": 1}},
            {},
            "vertical_sync is true or false",
        ),
        ("lstm", {"pp": 2, "schedule": "2bw"}, {"precision": {"name": "bf16", "master": "split"}}, "masters that rest"),
    ],
)
def test_what_needs_a_flush_is_said(model, plan, more, message):
    options = {"batch": 8, "microbatch": 2, **more}
    with pytest.raises(RankError, match=message):
        run_ranks(partial(trained, **options), Plan(**plan).size, model, plan)


def overflowing(world, plan: dict[str, Any]) -> tuple[list[bool], list[float], bool]:
    """fp16 with a scale that is too large at first."""
    precision = {"name": "fp16", "initial_scale_power": 24}
    running = engine(world, "lstm", plan, 8, 2, precision=precision)
    results = [running.step(each) for each in running.batches(text(), steps=STEPS)]
    running.parts.runner.flush()
    finite = all(bool(value.isfinite().all()) for value in running.parameters.values())
    running.close()
    return [result.skipped for result in results], [result.loss for result in results], finite


def test_an_overflow_skips_the_update_on_all_stages_alike():
    found = run_ranks(overflowing, 2, {"pp": 2, "schedule": "2bw"})
    (skipped, losses, finite), (others, their_losses, their_finite) = found
    assert skipped == others and losses == their_losses and any(skipped) and not all(skipped[1:])
    assert finite and their_finite


def seen_versions(world) -> bool:
    """Each forward and its backward see the same weights."""
    running = engine(world, "lstm", {"pp": 4, "schedule": "pipedream"}, 2, 2)
    seen: list[tuple[str, float]] = []
    own = next(iter(running.parameters.values()))
    bind = running.parts.versions.bind

    def watched(number: int) -> None:
        bind(number)
        seen.append(("bound", float(own.detach().sum())))

    running.parts.versions.bind = watched
    interpreter = running.parts.runner._pipeline.interpreter
    do = interpreter.do
    forwards: list[float] = []

    def done(action: Any, *args: Any) -> None:
        if action.kind == "F":
            forwards.append(float(own.detach().sum()))
        if action.kind == "B":
            assert forwards.pop(0) == float(own.detach().sum())
        do(action, *args)

    interpreter.do = done
    sums = set()
    for each in running.batches(text(), steps=STEPS):
        running.step(each)
        sums.add(float(own.detach().sum()))
    running.parts.runner.flush()
    assert not forwards and len(sums) > 1
    running.close()
    return True


def test_forward_and_backward_of_a_microbatch_see_the_same_version():
    assert all(run_ranks(seen_versions, 4))


def test_as_many_versions_are_kept_as_the_schedule_needs():
    for stages in (2, 4, 8):
        assert kept_versions(make_schedule("pipedream", stages, 3 * stages)) == [
            stages - stage for stage in range(stages)
        ]


def called_between(world, plan: dict[str, Any], calls: bool) -> list[float]:
    running = engine(world, "lstm", plan)
    model, tokens, found = running.model, torch.stack([text()[0]["input_ids"]]), []
    for each in running.batches(text(), steps=STEPS):
        found.append(running.step(each).loss)
        if calls and each.step % 2:
            with torch.no_grad():
                assert model(tokens).isfinite().all()
    running.close()
    return found


@pytest.mark.parametrize("plan", [{"pp": 2, "schedule": "2bw"}, {"pp": 2}])
def test_the_model_may_be_kept_and_called_between_steps(plan):
    alone, called = (run_ranks(called_between, 2, plan, calls) for calls in (False, True))
    assert alone == called


class Counts(LSTM):
    """Its forward writes to a buffer that is saved."""

    def __init__(self, cfg: LSTMConfig) -> None:
        super().__init__(cfg)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward(*args, **kwargs)


def counting(world, plan: dict[str, Any]) -> float:
    model = partial(Counts, MODELS["lstm"].args[0])  # type: ignore[attr-defined]
    running = Engine(model, causal_lm, ADAMW, Plan(**plan), world=world, global_batch=8, microbatch=2, precision="fp64")
    found = [running.step(each).loss for each in running.batches(text(), steps=2)]
    running.close()
    return found[-1]


def test_buffers_that_replicas_would_agree_on_are_refused():
    run_ranks(counting, 2, {"pp": 2, "schedule": "2bw"})  # nobody to agree with
    with pytest.raises(RankError, match="writes to a buffer of the model"):
        run_ranks(counting, 4, {"dp": 2, "pp": 2, "schedule": "2bw"})
