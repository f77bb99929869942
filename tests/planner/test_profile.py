"""What parts of a model take where ranks divide them, against what their own traces and autograd say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal import Plan
from shoal.errors import UserError
from shoal.models import build, causal_lm, from_config
from shoal.planner.ask import legal_degrees
from shoal.planner.computing import CROWDED, ON_CORES, counted_again
from shoal.planner.degrees import Spread
from shoal.planner.dry_run import dry_run
from shoal.planner.kept_profiles import _read, _written
from shoal.planner.prepare import Subject
from shoal.planner.profile import WAYS, Cut, PartProfile, profile
from shoal.planner.search import Search
from shoal.planner.task import Choice, Numbers, Task
from shoal.planner.trace import trace
from shoal.precision import precision
from tests.planner.models import cluster, part, task

pytestmark = pytest.mark.fast
GPT = {"name": "gpt", "layers": 2, "d_model": 16, "heads": 2, "vocab_size": 64, "sequence": 8}
ROW = {"input_ids": torch.zeros(8, dtype=torch.int64), "labels": torch.zeros(8, dtype=torch.int64)}


def subject(table: dict = GPT) -> Subject:
    model = build(table)
    return Subject(model.factory, model.loss, ROW, 1, precision("fp32"))


def test_what_is_more_on_each_rank_does_not_grow_with_the_ranks_but_in_a_ring():
    calls = Cut(10.0, {"parts": -0.5, "tokens": 0.5, "ring": -2.0})
    assert calls.on(Spread()) == 10
    assert calls.on(Spread(parts=2)) == calls.on(Spread(parts=8)) == 12.5
    assert calls.on(Spread(tokens=4)) == 10 * (1 - 0.5 + 0.5 / 4)
    assert [calls.on(Spread(tokens=ranks, ring=True)) for ranks in (1, 2, 4)] == [10, 20, 30]
    assert Cut(10.0, {"tokens": 1.0}).on(Spread(tokens=2, ring=True)) == 5, "where no ring was traced"


EXPERTS = {
    "model_type": "mixtral", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("table", "plan"),
    [
        (GPT, Plan(tp=2, cp=2)),
        (GPT, Plan(tp=2, cp=2, context="ring")),
        ({"name": "hf", "config": EXPERTS, "num_hidden_layers": 2}, Plan(dp=2, tp=2, ep=2)),
        ({"name": "hf", "config": EXPERTS, "num_hidden_layers": 2}, Plan(dp=2, cp=2, ep=2)),
    ],
    ids=["tp-cp", "tp-ring", "tp-ep", "cp-ep"],
)
def test_what_two_ways_add_is_added(table, plan):
    """It was multiplied: the calls outside of a GPT's blocks, four and six times as many under tp and cp, were said to
    be 27 times as many under both, which are 9.5 times as many."""
    base = subject({**table, "heads": 4} if table is GPT else table)
    own = trace(replace(base, plan=plan))
    parts = profile(base, {"parts": (2,), "tokens": (2,), "ring": (2,), "experts": (2,)}).parts
    spread = Spread.of(plan)
    for known, seen in zip(parts, own.parts, strict=True):
        assert known.calls.on(spread) == pytest.approx(seen.calls)
        assert known.kernels.on(spread) == pytest.approx(seen.kernels)
        assert known.products.on(spread) == pytest.approx(seen.products)
        if known.is_block:
            assert known.touched.on(spread) == pytest.approx(seen.touched, rel=0.03)
            assert known.fused.on(spread) == pytest.approx(seen.fused, rel=0.03)
            assert known.saved.on(spread) == pytest.approx(seen.saved, rel=0.01)


@pytest.mark.parametrize(
    ("what", "plan"),
    [("parts", Plan(tp=2)), ("tokens", Plan(cp=2)), ("ring", Plan(cp=2, context="ring"))],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_two_ranks_take_what_was_traced_of_two(what, plan):
    """More operations than of the whole block, which were left out: a ring's was predicted to take a third of them."""
    whole, own = trace(subject()), trace(replace(subject(), plan=plan))
    parts = profile(subject(), {what: (2,)}).parts
    for known, alone, seen in zip(parts, whole.parts, own.parts, strict=True):
        spread = Spread.of(plan)
        assert known.calls.on(spread) == pytest.approx(seen.calls)
        assert known.touched.on(spread) == pytest.approx(seen.touched)
        if known.is_block:
            assert seen.calls > 1.5 * alone.calls


def test_a_model_that_only_a_ring_can_divide_is_divided():
    """Of three heads, which two ranks cannot share, all was counted on each rank."""
    odd = subject({**GPT, "d_model": 24, "heads": 3})
    (*_, block) = (each for each in profile(odd, dict.fromkeys(WAYS, (2,))).parts if each.is_block)
    assert "tokens" not in block.products.shares
    assert block.products.on(Spread(tokens=2, ring=True)) == block.products.value / 2


def test_tensors_that_a_block_keeps_are_counted_as_autograd_packs_them():
    blocks = [each for each in profile(subject(), {}).parts if each.is_block]
    module = build(GPT).factory()
    ((_, block),) = [each for each in module.named_modules() if each[0] == "blocks.0"]
    packed = list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: packed.append(each) or each, lambda each: each):
        block(torch.ones(1, 8, 16, requires_grad=True))
    assert [each.packed.on(Spread()) for each in blocks] == [len(packed)] * 2
    assert isinstance(block, nn.Module) and len(packed) > 15


def test_each_tensor_that_is_kept_has_its_hook_where_a_block_runs_again():
    asked, nothing = task(), Cut(0.0, {})
    own = replace(part("block", 0.0, 0.0, 0.0), touched=nothing, calls=nothing)
    device = replace(asked.cluster.hosts[0].device, launch=1e-3, on_host=True)

    def again(tensors: float, crowd: float = 1.0) -> float:
        kept, on = replace(own, packed=Cut(tensors, {})), replace(device, crowd=crowd)
        return counted_again([kept], Spread(), 1, on, asked.numbers, False)[0]

    assert again(5) - again(2) == pytest.approx(3 * ON_CORES.selecting * 1e-3)
    assert again(0) == pytest.approx(ON_CORES.block * 1e-3)
    assert again(5, 2.0) == pytest.approx(CROWDED * again(5))


@pytest.mark.parametrize("what", ["parts", "tokens", "ring"])
def test_what_three_ranks_divide_is_what_two_do(what):
    """As many shares, and messages: where two ranks do not come out even, three are traced."""
    row = {key: torch.zeros(12, dtype=torch.int64) for key in ROW}
    even = replace(subject({**GPT, "heads": 6, "d_model": 24, "vocab_size": 66, "sequence": 12}), sample=row)
    two, three = (profile(even, {what: (ranks,)}) for ranks in (2, 3))
    field = "parts" if what == "parts" else "tokens"
    for known, seen in zip(two.parts, three.parts, strict=True):
        for name in ("products", "attention", "saved", "weights", "trained", *["calls"] * seen.is_block):
            for ranks in (2, 3):
                on = Spread(**{field: ranks}, ring=what == "ring")
                assert getattr(seen, name).on(on) == pytest.approx(getattr(known, name).on(on), rel=0.06), name
        assert {each.operation: each.payload for each in seen.messages} == pytest.approx(
            {each.operation: each.payload for each in known.messages}, rel=0.01
        )
        assert [each.calls for each in seen.messages] == [each.calls for each in known.messages]


def test_heads_that_two_ranks_cannot_share_are_traced_among_those_that_are_pinned():
    """Three of three: all was counted on each rank, and nothing sent."""
    odd = subject({**GPT, "d_model": 24, "heads": 3})
    assert "3 heads" in profile(odd, {"parts": (2,)}).refused["parts"]
    found = profile(odd, {"parts": (2, 3)})
    (*_, block) = (each for each in found.parts if each.is_block)
    assert found.refused["parts"] == "" and block.messages
    assert block.products.on(Spread(parts=3)) == pytest.approx(block.products.value / 3)


class Mixed(nn.Module):
    """A convolution and a product, each of which gives 4 x 8 x 8 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.over, self.along = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.along(self.over(x).relu())


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixed() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_convolutions_are_told_from_products_as_selective_recompute_does() -> None:
    """It keeps what these give where `save` names them; without a list they are computed again."""

    def loss(model: nn.Module, mb: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return model(mb["x"]).square().sum(), len(mb["x"])

    found = profile(Subject(Convolved, loss, {"x": torch.zeros(4, 8, 8)}, 1, precision("fp32")), {})
    assert found.parts
    for each in found.parts:
        assert each.convolved.value == each.results.value == 4 * 256 and each.attended.value == 0
        assert each.convolutions.value == 2 * 256 * 36 and each.products.value == 2 * 256 * (36 + 8)


class Beside(nn.Module):
    """A parameter that is in none of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.token = nn.Parameter(torch.zeros(1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.token
        for layer in self.layers:
            x = layer(x)
        return x


def test_parameters_beside_all_parts_are_of_the_first() -> None:
    def loss(model: nn.Module, mb: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return model(mb["x"]).square().sum(), len(mb["x"])

    found = profile(Subject(Beside, loss, {"x": torch.zeros(8)}, 1, precision("fp32")), {})
    assert [part.weights.value for part in found.parts] == [72, 64] and found.parameters == 136
    assert [part.trained.value for part in found.parts] == [72, 64]


def test_frozen_experts_have_no_gradients() -> None:
    """Of a model with adapters they were counted as if they were trained."""
    peft = pytest.importorskip("peft")
    config = {"model_type": "mixtral", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 32}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4}

    def adapted() -> nn.Module:
        return peft.get_peft_model(from_config(config)(), peft.LoraConfig(r=2, target_modules=["q_proj"]))

    row = {key: torch.zeros(16, dtype=torch.int64) for key in ("input_ids", "labels")}
    found = profile(Subject(adapted, causal_lm, row, 1, precision("fp32")), {"experts": (2,)})
    assert found.refused["experts"] == "" and sum(part.trained.value for part in found.parts) == 2 * 2 * 32
    numbers = Numbers(torch.bfloat16, 2, 4, 4, 8)
    asked = Search(Task(found, cluster(1, 2), 8, numbers, legal={"experts": 4}))
    estimate = asked.estimate(Choice(Spread(copies=2, experts=2), 4))
    assert estimate.memory["gradients"] == 4 * 2 * 2 * 32


def test_ranks_share_experts_whatever_settings_call_their_number() -> None:
    """Ernie's `moe_num_experts` was not known, so it was never planned with ep, and ep = 2 was refused."""
    config = {"model_type": "ernie4_5_moe", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 32,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 16,
              "moe_num_experts": 6, "moe_k": 2, "moe_layer_start_index": 1, "moe_num_shared_experts": 1}  # fmt: skip
    factory = from_config(config)
    row = {key: torch.zeros(16, dtype=torch.int64) for key in ("input_ids", "labels")}
    found = profile(Subject(factory, causal_lm, row, 1, precision("fp32")), {"experts": (2,)})
    assert legal_degrees(factory.args[0].to_dict(), found, 16, 2)["experts"] == 6
    assert _read(_written(found)).num_experts == 6
    assert legal_degrees({"num_experts": 6}, profile(subject(), {"experts": (2,)}), 8, 2)["experts"] == 1


@pytest.mark.parametrize(("width", "narrow"), [(32, False), (24, True)])
def test_a_width_that_experts_cannot_be_grouped_at_is_named(width: int, narrow: bool) -> None:
    """Of experts 24 wide, 12 on each of two ranks, it was said that values decide the way, and no more."""
    config = {"model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 32,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "moe_intermediate_size": width, "num_experts": 4, "num_experts_per_tok": 2}  # fmt: skip
    row = {key: torch.zeros(16, dtype=torch.int64) for key in ("input_ids", "labels")}
    own = Subject(from_config(config), causal_lm, row, 1, precision("fp32"), Plan(tp=2))
    if not narrow:
        assert dry_run(own).events
        return
    said = r"nonzero.*layers\.0\.mlp\.experts are 24 wide, 12 on each of 2 ranks along tp, no multiple of 8"
    with pytest.raises(UserError, match=said):
        dry_run(own)


@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_is_counted_where_rows_have_documents_alone(packed: bool) -> None:
    """A forward of transformers finds that positions go on, and leaves it out; of fake ones it cannot tell."""
    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
              "num_attention_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 4096}  # fmt: skip
    model = build({"name": "hf", "config": config})

    def block(tokens: int) -> PartProfile:
        row = {key: torch.zeros(tokens, dtype=torch.int64) for key in ("input_ids", "labels")}
        row |= {"position_ids": torch.arange(tokens)} if packed else {}
        found = profile(Subject(model.factory, model.loss, row, 1, precision("fp32")), {})
        return next(part for part in found.parts if part.is_block)

    more = block(2048).saved.value - 4 * block(512).saved.value
    assert more > 2048**2 - 4 * 512**2 if packed else more == 0
