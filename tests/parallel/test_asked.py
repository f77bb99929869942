"""What plan.cp asks of a model and its loss: rows of ranks are those of one process, or the engine says what is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Engine, Plan, auto_plan
from shoal.errors import UserError
from shoal.models import GPT, GPTConfig, causal_lm, masked_lm
from tests.pool import reference, run_ranks
from tests.zoo.entry import Microbatch, cross_entropy
from tests.zoo.test_auto import machine

VOCABULARY, TOKENS = 61, 8
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MINIMAX: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "block_size": 4,
}


def of_transformers(kind: str, automatic: str, **fields: Any) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **fields})
    return getattr(transformers, automatic).from_config(config)


FACTORS: dict[str, Any] = {
    "dynamic": {"factor": 2.0},
    "longrope": {"original_max_position_embeddings": 4, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]},
}
"""Of frequencies that follow the longest position of a row, where that is above 4."""


roberta = partial(of_transformers, "roberta", "AutoModelForMaskedLM")
llama = partial(of_transformers, "llama", "AutoModelForCausalLM", num_key_value_heads=2)
gpt = partial(GPT, GPTConfig(VOCABULARY, TOKENS, layers=1, d_model=16, heads=2))


def rows() -> list[dict[str, Tensor]]:
    """Rows whose ends are the padding's number, which RoBERTa leaves out of its positions."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (8, TOKENS + 1), generator=draw)
    ids[::2, -2:] = 1
    halves = torch.arange(TOKENS) // 3
    return [
        {"input_ids": row[:-1], "labels": row[1:].masked_fill(row[1:] == 1, -100), "document_ids": halves}
        for row in ids
    ]


def padded() -> list[dict[str, Tensor]]:
    """The same, of which the last two tokens are padding."""
    ends = torch.arange(TOKENS) >= 6
    return [
        {**row, "labels": row["labels"].masked_fill(ends, -100), "attention_mask": (~ends).long()} for row in rows()
    ]


def packed() -> list[dict[str, Tensor]]:
    """The same rows, of three documents each, which their positions show."""
    return [{**row, "position_ids": (torch.arange(TOKENS) + at) % 3} for at, row in enumerate(rows())]


class ByHand(nn.Module):
    """Attention of one head that calls no function which could be stood in for."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.words(input_ids)
        return self.head((x @ x.mT).softmax(-1) @ x)


class Prefix(ByHand):
    """Tokens of the first half of a row see each other, and all see what comes before them."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.words(input_ids)
        at = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        seen = (at[:, None] <= at[..., None]) | (at < TOKENS // 2)[:, None]
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, seen[:, None])
        return self.head(y.transpose(1, 2).flatten(2))


class Joined(ByHand):
    """Learned tokens before each row, as prompt tuning has them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(3, 16))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = torch.cat([self.before.expand(len(input_ids), -1, -1), self.words(input_ids)], 1)
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(y)[:, 3:]


class Beside(ByHand):
    """Attention over learned tokens, which all ranks have, by them and by those of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(5, 16))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x, memory = self.words(input_ids), self.memory.expand(len(input_ids), -1, -1)
        for_rows, own = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in (x, memory))
        own = F.scaled_dot_product_attention(own, own, own)
        x = x + F.scaled_dot_product_attention(for_rows, own, own).transpose(1, 2).flatten(2)
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.head(y.transpose(1, 2).flatten(2))


class Elsewhere(ByHand):
    """Causal attention, and behind it what brings tokens together once more, by `way`; `gated`: through a gate that
    begins as nothing."""

    def __init__(self, way: Callable[[Tensor], Tensor], gated: bool = False) -> None:
        super().__init__()
        self.way, self.gate = way, nn.Parameter(torch.zeros(16)) if gated else 1.0

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.words(input_ids)
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x + y + self.gate * self.way(y))


ELSEWHERE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda y: y.mean(1, keepdim=True),
    "shift": lambda y: F.pad(y, (0, 0, 1, -1)),
    "later": lambda y: y.roll(-1, 1),
    "scan": lambda y: y.cumsum(1),
    "turned": lambda y: y.flip(1),
    "convolution": lambda y: F.conv1d(F.pad(y.mT, (2, 0)), torch.ones(16, 1, 3, dtype=y.dtype), groups=16).mT,
    "batch": lambda y: y - y.mean((0, 1)),
}
"""By the name of a way."""


def its_own(model: nn.Module, mb: Microbatch, **more: Any) -> tuple[Tensor, Tensor]:
    """The mean loss that a model of transformers computes of its labels, as a sum."""
    count = (mb["labels"] != -100).sum()
    return model(input_ids=mb["input_ids"], labels=mb["labels"], **more).loss * count, count


def shifted_before(model: nn.Module, mb: Microbatch) -> tuple[Tensor, Tensor]:
    return its_own(model, mb, shift_labels=mb["labels"])


def shifted_here(model: nn.Module, mb: Microbatch) -> tuple[Tensor, int]:
    logits, ids = model(input_ids=mb["input_ids"]).logits[:, :-1], mb["input_ids"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum"), ids.numel()


def shifted_by(shift: Callable[[Tensor], Tensor], model: nn.Module, mb: Microbatch) -> tuple[Tensor, Tensor]:
    labels = shift(mb["input_ids"])
    logits = model(input_ids=mb["input_ids"]).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def padded_and_shifted(ids: Tensor) -> Tensor:
    """As transformers does."""
    return F.pad(ids, (0, 1), value=-100)[:, 1:]


def rolled(ids: Tensor) -> Tensor:
    return ids.roll(-1, 1)


def by_rows(model: nn.Module, mb: Microbatch) -> tuple[Tensor, int]:
    return causal_lm(model, mb)[0], len(mb["labels"])


def of_classes(model: nn.Module, mb: Microbatch) -> tuple[Tensor, Tensor]:
    """Of a model that gives each row one result."""
    logits = model(input_ids=mb["input_ids"]).logits
    return logits.square().sum(), torch.tensor(logits.numel())


def without_documents(model: nn.Module, mb: Microbatch) -> Any:
    return causal_lm(model, {key: mb[key] for key in ("input_ids", "labels")})


def last_channels(model: nn.Module, mb: Microbatch) -> tuple[Tensor, Tensor]:
    """Picks rows and channels, and all tokens."""
    logits = model(input_ids=mb["input_ids"]).logits[..., -20:][:1][:, :, None][:, 0:TOKENS, 0]
    return logits.square().sum(), torch.tensor(logits.numel() / TOKENS)


def by_positions(model: nn.Module, mb: Microbatch) -> tuple[Tensor, Tensor]:
    return cross_entropy(model(input_ids=mb["input_ids"], position_ids=mb["position_ids"]).logits, mb["labels"])


def all_seen(model: nn.Module, mb: Microbatch) -> tuple[Tensor, Tensor]:
    """Where a mask is given, models of transformers do not look for documents in positions."""
    seen = torch.ones_like(mb["input_ids"])
    logits = model(mb["input_ids"], seen, position_ids=mb["position_ids"]).logits
    return cross_entropy(logits, mb["labels"])


def own_mask(model: nn.Module, mb: Microbatch) -> tuple[Tensor, Tensor]:
    """Finds the padding by itself, which the last rank alone has."""
    return cross_entropy(model(input_ids=mb["input_ids"], attention_mask=mb["input_ids"] != 1).logits, mb["labels"])


LOSSES: dict[str, Callable[..., Any]] = {
    "by positions": by_positions,
    "all seen": all_seen,
    "own mask": own_mask,
    "causal": causal_lm,
    "masked": masked_lm,
    "own": its_own,
    "before": shifted_before,
    "here": shifted_here,
    "pad": partial(shifted_by, padded_and_shifted),
    "roll": partial(shifted_by, rolled),
    "rows": by_rows,
    "classes": of_classes,
    "without documents": without_documents,
    "channels": last_channels,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "roberta": roberta,
    "llama": llama,
    "opt": partial(of_transformers, "opt", "AutoModelForCausalLM", ffn_dim=24, word_embed_proj_dim=16, dropout=0.0),
    "minimax": partial(of_transformers, "minimax", "AutoModelForCausalLM", **MINIMAX),
    "esm": partial(of_transformers, "esm", "AutoModelForMaskedLM", mask_token_id=2, token_dropout=True),
    "esm without": partial(of_transformers, "esm", "AutoModelForMaskedLM", mask_token_id=2),
    "gemma2": partial(of_transformers, "gemma2", "AutoModelForCausalLM", head_dim=8, num_key_value_heads=2),
    "gpt oss": partial(of_transformers, "gpt_oss", "AutoModelForCausalLM", head_dim=8, num_key_value_heads=2),
    "classes": partial(of_transformers, "llama", "AutoModelForSequenceClassification", num_key_value_heads=2),
    "gpt": gpt,
    "prefix": Prefix,
    "joined": Joined,
    "beside": Beside,
    "by hand": ByHand,
}
MODELS |= {way: partial(Elsewhere, function) for way, function in ELSEWHERE.items()}
MODELS["gated"] = partial(Elsewhere, ELSEWHERE["shift"], True)
MODELS |= {
    kind: partial(llama, max_position_embeddings=4, rope_parameters={"rope_type": kind, "rope_theta": 10.0, **factors})
    for kind, factors in FACTORS.items()
}


def made(world: Any, model: str, loss: str, plan: dict[str, Any]) -> Engine:
    return Engine(
        MODELS[model],
        LOSSES[loss],
        partial(torch.optim.SGD, lr=0.1),
        Plan(**plan),
        global_batch=4,
        microbatch=2,
        precision="fp32" if model == "minimax" else "fp64",
        world=world,
        buffers="averaged" if model == "longrope" else "exact",
    )


def trained(
    world: Any, model: str, loss: str, plan: dict[str, Any], data: Callable[[], list[dict[str, Tensor]]] = rows
) -> list[float] | str:
    """The losses of three steps, or what is refused."""
    engine = None
    try:
        engine = made(world, model, loss, plan)
        return [float(engine.step(batch).loss) for batch in engine.batches(data(), steps=3)]
    except UserError as refusal:
        return str(refusal)
    finally:
        if engine is not None:
            engine.close()


def without_a_mask(world: Any) -> list[float]:
    engine = made(world, "llama", "causal", {"cp": 2})
    data = [{key: value for key, value in row.items() if key != "attention_mask"} for row in padded()]
    return [float(engine.step(batch).loss) for batch in engine.batches(data, steps=3)]


@pytest.mark.parametrize("context", ["ulysses", "ring"])
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ("roberta", "masked"),
        ("roberta", "own"),
        ("llama", "before"),
        ("llama", "channels"),
        ("esm without", "masked"),
        ("gpt", "without documents"),
        ("beside", "causal"),
        *((kind, "causal") for kind in FACTORS),
    ],
)
def test_rows_of_two_ranks_are_those_of_one_process(model: str, loss: str, context: str) -> None:
    """RoBERTa counts positions from behind the number of its padding; labels that are shifted already may be given, and
    documents in the batch of which the loss does not tell the model are none."""
    whole = reference(trained, 1, model, loss, {})[0]
    assert not isinstance(whole, str), whole
    for found in run_ranks(trained, 2, model, loss, {"cp": 2, "context": context}):
        assert found == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("context", ["ulysses", "ring"])
@pytest.mark.parametrize(
    ("model", "loss"),
    [("llama", "by positions"), ("llama", "all seen"), ("roberta", "by positions"), ("opt", "by positions")],
)
def test_documents_that_positions_show_count_where_the_model_masks_by_them(model: str, loss: str, context: str) -> None:
    """Of transformers, RoBERTa and OPT look for none; Llama does, where it is given no mask."""
    whole = reference(trained, 1, model, loss, {}, packed)[0]
    assert not isinstance(whole, str), whole
    for found in run_ranks(trained, 2, model, loss, {"cp": 2, "context": context}, packed):
        assert found == pytest.approx(whole, rel=1e-6)


def test_tokens_joined_to_a_row_are_refused_in_stages_too() -> None:
    """Nothing is tried before the first step there."""
    for found in run_ranks(trained, 4, "joined", "causal", {"cp": 2, "pp": 2}):
        assert "causal attention is over the tokens of a rank and others joined to them" in found


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        ("roberta", "own mask", "takes no attention_mask"),
        ("llama", "own", "is given labels, which it shifts by a token"),
        ("llama", "here", "the loss picks tokens by their place in a row"),
        ("llama", "pad", "the loss picks tokens by their place in a row, or moves them"),
        ("llama", "roll", "the loss picks tokens by their place in a row, or moves them"),
        ("llama", "rows", "the loss counts 2, the rows of the microbatch"),
        ("classes", "classes", "LlamaForSequenceClassification gives (2, 2), a result for each row"),
        ("joined", "causal", "attention of Joined is over the tokens of a rank and others joined to them"),
        ("prefix", "causal", "attention has a mask that looks causal to some of the ranks"),
        ("minimax", "causal", "has layers of kind linear_attention"),
        ("esm", "masked", "set token_dropout = False"),
        ("gemma2", "causal", "without soft-capping of logits (attn_logit_softcapping = 50.0). Take plan.cp = 1"),
        ("gpt oss", "causal", "without what this model adds. Take plan.cp = 1"),
        *(
            (way, "causal", "in Elsewhere the result of a token depends on other tokens")
            for way in (*ELSEWHERE, "gated")
        ),
    ],
)
def test_what_looks_at_neighbours_elsewhere_than_in_attention_is_refused(model: str, loss: str, message: str) -> None:
    answers = run_ranks(trained, 2, model, loss, {"cp": 2})
    assert all(isinstance(each, str) and message in each for each in answers), answers


AWAY: dict[str, Any] = {"cp": 2, "zero": 3, "memory": {"chunk": "4KiB"}}
"""Weights come for the look as for a step, and go again."""


def gone_on(world: Any, folder: Path, saved: dict[str, Any], plan: dict[str, Any]) -> list[float]:
    """The losses of three steps, after the first of which the run is saved and goes on under another plan."""
    found = []
    for number, its in enumerate((saved, plan)):
        engine = made(world, "llama", "causal", its)
        if number:
            engine.load(folder / "one")
        for batch in engine.batches(rows(), steps=1 + number):
            found.append(float(engine.step(batch).loss))
        if not number:
            engine.save(folder / "one")
        engine.close()
    return found


@pytest.mark.parametrize("saved", [{"cp": 2, "zero": 3}, {"dp": 2}], ids=str)
def test_the_look_before_the_first_step_leaves_weights_of_chunks_and_of_checkpoints_as_they_are(
    saved: dict[str, Any], tmp_path: Path
) -> None:
    whole = reference(trained, 1, "llama", "causal", {})[0]
    assert run_ranks(gone_on, 2, tmp_path, saved, {**AWAY, "recompute": "full"}) == [pytest.approx(whole, rel=1e-6)] * 2


def test_where_weights_are_away_what_looks_at_neighbours_is_refused_as_well() -> None:
    answers = run_ranks(trained, 2, next(iter(ELSEWHERE)), "causal", AWAY)
    assert all("in Elsewhere the result of a token depends on other tokens" in each for each in answers), answers


def test_rows_that_are_padded_at_their_ends_need_no_mask_where_attention_is_causal() -> None:
    """As the error says where there is one."""
    masked = reference(trained, 1, "llama", "causal", {}, padded)[0]
    for answer in run_ranks(trained, 2, "llama", "causal", {"cp": 2}, padded):
        assert isinstance(answer, str) and "where attention is causal, leave it out" in answer
    for found in run_ranks(without_a_mask, 2):
        assert found == pytest.approx(masked, rel=1e-6)


def asked(world: Any, model: str, loss: str, sample: dict[str, Tensor]) -> str:
    """What `auto_plan` says where cp is pinned."""
    with pytest.raises(UserError) as refusal:
        auto_plan(
            MODELS[model], LOSSES[loss], partial(torch.optim.SGD, lr=0.1), sample, global_batch=4,
            pins={"cp": 2}, cluster=machine(2), world=world,
        )  # fmt: skip
    return str(refusal.value)


@pytest.mark.parametrize(
    ("model", "loss", "sample", "message"),
    [
        ("gemma2", "causal", rows()[0], "without soft-capping of logits"),
        ("by hand", "causal", rows()[0], "called no torch.nn.functional"),
        ("llama", "here", rows()[0], "the loss picks tokens by their place"),
        ("llama", "causal", padded()[0], "leave it out and pad rows at their ends"),
    ],
    ids=["soft-capping", "attention by hand", "loss", "padding"],
)
def test_the_planner_gives_no_plan_that_the_first_step_would_refuse(
    model: str, loss: str, sample: dict[str, Tensor], message: str
) -> None:
    assert message in run_ranks(asked, 1, model, loss, sample)[0]
