"""The longest row that fits: what of a model grows with it, and that it fits when it is asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.models import build, from_config
from shoal.pipeline.units import units_of
from shoal.planner import kept_profiles
from shoal.planner.ask import numbers_of
from shoal.planner.explain import fits, longest
from shoal.planner.longer import longer
from shoal.planner.positions import Positions, positions_of
from shoal.planner.prepare import Subject
from shoal.planner.profile import Profile, profile
from shoal.planner.task import Task
from shoal.precision import precision
from tests.planner.models import MIB, cluster

GPT = {"name": "gpt", "layers": 1, "d_model": 64, "heads": 4, "vocab_size": 65}
GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
OPT = {"model_type": "opt", "vocab_size": 61, "max_position_embeddings": 16, "hidden_size": 16, "ffn_dim": 16,
       "num_hidden_layers": 1, "num_attention_heads": 2, "word_embed_proj_dim": 16}  # fmt: skip


def row(tokens: int) -> dict[str, Tensor]:
    return {key: torch.zeros(tokens, dtype=torch.int64) for key in ("input_ids", "labels")}


def gpt(tokens: int, **others: Any) -> Any:
    return build({**GPT, "sequence": tokens, **others})


class Places(nn.Module):
    """Positions of its own, beside matrices that are as wide by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.norm = nn.Embedding(31, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.places = nn.Parameter(torch.zeros(1, 16, 4), requires_grad=False)


@pytest.mark.parametrize(
    ("factory", "found"),
    [
        (gpt(16).factory, [(16, 64, True)]),
        (gpt(16, positions="rotary").factory, []),
        (from_config(GPT2), [(32, 16, True)]),
        (from_config(OPT), [(18, 16, True)]),
        (lambda: nn.Sequential(Places(), nn.Linear(16, 16)), [(16, 4, False)]),
    ],
)
def test_tables_of_positions_are_told_from_others(factory: Any, found: list[tuple[int, int, bool]]) -> None:
    module = factory()
    assert [each[1:] for each in positions_of(module, units_of(module), row(16))] == found


def test_a_table_grows_where_it_is_too_short() -> None:
    """Of two ranks that cut the rest of its part, each has all of it."""
    found = profile(Subject(gpt(16).factory, gpt(16).loss, row(16), 1, precision("fp32")), {"parts": (2,)})
    own = profile(Subject(gpt(64).factory, gpt(64).loss, row(64), 1, precision("fp32")), {"parts": (2,)})
    four = longer(found, 4.0)
    assert four.parameters == own.parameters == found.parameters + 48 * 64
    for name in ("weights", "trained", "largest"):
        for mine, its in zip(four.parts, own.parts, strict=True):
            one, other = getattr(mine, name), getattr(its, name)
            assert one.value == other.value and one.shares.get("parts", 0.0) == pytest.approx(other.shares["parts"])
    assert longer(replace(found, positions=(found.positions[0]._replace(rows=64),)), 4.0).parameters == found.parameters


def test_kept_profiles_know_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_profiles, "folder", lambda: tmp_path)
    subject = Subject(gpt(16).factory, gpt(16).loss, row(16), 1, precision("fp32"))
    made = kept_profiles.kept("gpt", subject, {}, partial(profile, subject, {}))
    again = kept_profiles.kept("gpt", subject, {}, lambda: pytest.fail("it is traced again"))
    assert again == made and again.positions == (Positions("position_embedding", 16, 64, True),) and again.tokens == 16


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_longest_row_fits_and_one_that_is_a_little_longer_does_not(positions: str) -> None:
    """With learned positions it was a fifth too long."""

    def traced(tokens: int) -> Profile:
        made = gpt(tokens, positions=positions)
        return profile(Subject(made.factory, made.loss, row(tokens), 1, precision("fp32")), {})

    numbers = numbers_of(precision("fp32"), partial(torch.optim.AdamW, lr=1e-3))
    own = cluster(1, 1, memory=40 * MIB)
    host = replace(own.hosts[0], device=replace(own.hosts[0].device, flops={"fp32": 1e13}))
    asked = Task(traced(512), replace(own, hosts=(host,)), 1, numbers, legal={})
    times, more = longest(asked)
    assert not more
    for tokens, enough in ((round(512 * times * 0.97), True), (round(512 * times * 1.05), False)):
        assert fits(replace(asked, profile=traced(tokens))) == enough
