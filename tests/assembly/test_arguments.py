"""Arguments of a wrong kind: refused before anything is built, with a remedy that works when it is taken."""

from __future__ import annotations

import re
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import shoal
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.mesh import Mesh

pytestmark = pytest.mark.fast


class Rows:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), index / 8)}


def loss(model: nn.Module, mb: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model(mb["x"]).square().sum(), torch.tensor(len(mb["x"]))


def net() -> nn.Module:
    return nn.Linear(4, 1)


def engine(**changed: Any) -> Engine:
    given = {"model": net, "loss": loss, "optimizer": partial(torch.optim.SGD, lr=0.1), "global_batch": 4}
    return Engine(**{**given, **changed})


def test_an_option_of_a_group_that_the_optimizer_has_not_is_named():
    with pytest.raises(UserError, match=r'"weigth_decay", which is no option of SGD.*Did you mean "weight_decay"'):
        engine(param_groups=lambda name, parameter: {"weigth_decay": 0.1})
    with pytest.warns(UserWarning, match=r'"name", which is no option of SGD .*engine\.optimizer\.torch\.param_groups'):
        engine(param_groups=lambda name, parameter: {"name": name, "initial_lr": 0.1}).close()


def trains(**changed: Any) -> bool:
    made = engine(**changed)
    out = made.step(next(made.batches(Rows())))
    made.close()
    return out.loss > 0


ready = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=3e-3, betas=(0.8, 0.9))

WITH_REMEDY = {
    "a ready optimizer": ("optimizer", ready, "partial(torch.optim.AdamW, lr=0.003, betas=(0.8, 0.9))"),
    "a ready optimizer whose only group has its own options": (
        "optimizer",
        torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "momentum": 0.9}], lr=0.1),
        "partial(torch.optim.SGD, lr=0.1, momentum=0.9)",
    ),
    "an optimizer that asks for the loss": (
        "optimizer",
        partial(torch.optim.LBFGS, lr=0.1),
        "partial(torch.optim.AdamW, lr=3e-4)",
    ),
    "an optimizer's name": ("optimizer", "adamw", "partial(torch.optim.AdamW, lr=3e-4)"),
    "a plan as text": ("plan", "dp=1, zero=2", "shoal.Plan(dp=1, zero=2)"),
    "a plan as a table": ("plan", {"dp": 1, "exchange": "allreduce"}, "shoal.Plan(dp=1, exchange='allreduce')"),
    "a number of ranks": ("plan", 1, "shoal.Plan(dp=1)"),
    "a schedule's name": ("schedule", "cosine", "shoal.optim.lr.cosine(total=1000, warmup=100)"),
    "a ready schedule": (
        "schedule",
        torch.optim.lr_scheduler.StepLR(ready, 1),
        "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)",
    ),
    "a dtype": ("precision", torch.bfloat16, "'bf16'"),
    "no clipping": ("clip", 0, "None"),
    "a batch as text": ("global_batch", "4", None),
    "half a sample": ("microbatch", 1.5, None),
    "a yes": ("seed", True, None),
    "a model's name": ("model", "gpt", None),
    "a factory that returns nothing": ("model", lambda: None, None),
    "a loss's name": ("loss", "mse", None),
    "a number of ranks as world": ("world", 2, None),
}


@pytest.mark.parametrize(("argument", "value", "remedy"), WITH_REMEDY.values(), ids=WITH_REMEDY)
def test_the_message_names_the_argument_and_its_remedy_works(argument: str, value: Any, remedy: str | None) -> None:
    with pytest.raises(UserError) as refused:
        engine(**{argument: value})
    assert str(refused.value).startswith(argument)
    if remedy is not None:
        assert remedy in str(refused.value)
        assert trains(**{argument: eval(remedy, {"partial": partial, "torch": torch, "shoal": shoal})})


BEYOND = {
    "clip": [2**64, 10**400, -1, nan, -inf],
    "clip_value": [2**64, 10**400, -1, nan],
    "global_batch": [2**63, 10**400, 0, -1],
    "microbatch": [2**63, 0, -1],
    "norms_every": [2**63, -1],
    "seed": [2**70, -(2**63), 10**400],
    "sync_bn": ["no", None],
    "keep_gradients": ["no"],
    "collate": [3],
    "param_groups": [{"weight": {"lr": 1.0}}],
    "tensor_rules": [3, ["**.attention"]],
    "precision": [{"name": "fp16", "loss_scale_window": 2**64}, {"name": "fp16", "min_loss_scale": nan}],
    "plan": [shoal.Plan(exchange={"name": "topk", "ratio": nan}), shoal.Plan(memory={"device": 2**70})],
}


@pytest.mark.parametrize("argument", BEYOND)
def test_a_value_beyond_the_bounds_of_a_job_is_refused_by_the_name_of_the_argument(argument: str) -> None:
    for value in BEYOND[argument]:
        with pytest.raises(UserError, match=rf"^{argument}\b"):
            engine(**{argument: value})


def test_an_infinite_clip_clips_nothing() -> None:
    assert trains(clip=inf, clip_value=inf)


def test_whole_numbers_of_numpy_are_numbers() -> None:
    import numpy as np

    assert trains(global_batch=np.int64(4), clip=np.float32(1.0))


def test_what_a_step_and_an_evaluation_take() -> None:
    made = engine()
    loader = DataLoader(Rows(), batch_size=4)  # type: ignore[arg-type]
    for wrong in ({"x": torch.zeros(4, 4)}, Rows(), next(iter(loader))):
        with pytest.raises(UserError, match=r"for batch in engine\.batches\(dataset\): engine\.step\(batch\)"):
            made.step(wrong)  # type: ignore[arg-type]
    for dataset in (loader, None, 3):
        with pytest.raises(UserError, match=r"loader\.dataset" if dataset is loader else "is no dataset"):
            next(made.batches(dataset))
    for dataset in (loader, iter([1])):
        with pytest.raises(UserError, match=r"loader\.dataset" if dataset is loader else "is no dataset"):
            made.evaluate(dataset)
    batch = next(made.batches(loader.dataset))
    assert made.step(batch).tokens == 4
    with pytest.raises(UserError, match="of step 0, the engine is at step 1"):
        made.step(batch)
    assert made.evaluate(loader.dataset).tokens == 8
    made.close()


def test_what_a_person_sees_of_the_objects(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab" * 50)
    text = shoal.open_text(tmp_path / "a.txt", sequence=10, validation=0, cache_dir=tmp_path)
    made = engine(plan=shoal.Plan(dp=1, zero=1))
    batch = next(made.batches(Rows()))
    out = made.step(batch)
    assert repr(text.train) == 'PackedText(10 rows of 10 tokens, attend="row")'
    assert repr(text).startswith("TextData(train=PackedText(10 rows")
    assert repr(batch) == "Batch(step=0, epoch=0, 4 samples)"
    world = f"World(rank 0 of 1 on {made.world.host}, cpu)"
    assert repr(made.world) == world
    assert repr(made) == f"Engine(Linear of 5 parameters, Plan(zero=1), fp32, step 1, {world})"
    assert re.fullmatch(
        rf"StepResult\(step=0, loss={out.loss:.4f}, grad_norm=[\d.]+, tokens=4, seconds=[\d.e-]+\)", repr(out)
    )
    assert repr(Mesh(shoal.Plan(dp=2, tp=2), 3, 4)) == "Mesh(dp 1 of 2, tp 1 of 2)"
    made.close()


def test_the_names_of_an_engine_are_the_documented_ones() -> None:
    """A new one needs a row in the guide, an internal one an underscore or a place in `engine.parts`."""
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    table = guide.partition("All that an engine has")[2].partition("\n\n**")[0]
    made = engine()
    public = {name for name in dir(made) if not name.startswith("_")}
    assert public == set(re.findall(r"`engine\.(\w+)`", table))
    assert made.parts.mesh.size("dp") == 1 and made.parts.chunks and made.parts.tier is None and made.parts.lag == 0
    assert made.parts.rounds() == []
    made.close()


def test_a_stream_that_a_loader_reads_in_the_background_is_an_iterable() -> None:
    """`batch_size=None` cuts no batches: it gives samples."""
    made = engine()
    assert made.step(next(made.batches(DataLoader(Rows(), batch_size=None)))).tokens == 4  # type: ignore[arg-type]
    made.close()
