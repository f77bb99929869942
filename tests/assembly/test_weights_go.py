"""The weights that a model was built with go once the engine has its own, however it was built."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from shoal import Engine, Plan
from shoal.comm import World
from shoal.models import GPT, GPTConfig, causal_lm
from tests.parity.cases import text
from tests.pool import run_ranks

SIZE = {"vocab_size": 61, "sequence": 12, "layers": 2, "d_model": 32, "heads": 4}


def weights_left(world: World, plan: dict[str, Any], ready: bool) -> tuple[str, int, int]:
    """How the model was built, how many weights it had, and how many of them are there after a step."""
    seen: list[ref[torch.Tensor]] = []

    def built() -> nn.Module:
        module = GPT(GPTConfig(**SIZE))
        float(module.head.weight.sum())  # no record is made of a constructor that reads a number
        seen.extend(ref(parameter) for parameter in module.parameters())
        return module

    adamw = partial(torch.optim.AdamW, lr=1e-3)
    engine = Engine(built() if ready else built, causal_lm, adamw, Plan(**plan), global_batch=4, world=world)
    try:
        engine.step(next(iter(engine.batches(text(), steps=1))))
        gc.collect()
        return engine.build_note, len(seen), sum(each() is not None for each in seen)
    finally:
        engine.close()


@pytest.mark.parametrize("ready", [False, True], ids=["factory", "ready"])
@pytest.mark.parametrize("plan", [{"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2}], ids=str)
def test_the_weights_that_were_built_go(plan, ready):
    for how, number, left in run_ranks(weights_left, 2, plan, ready):
        assert how != "recorded" and number > 10 and left == 0
