"""Tensor parallel on its own: spans, rules, cut models and logits against the whole ones."""

from __future__ import annotations

from functools import partial
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.comm import Group, World
from shoal.comm.silent import Silent
from shoal.data import stack_samples
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.models import GPT, Bert, BertConfig, GPTConfig, causal_lm, from_config
from shoal.module.build import Built, build
from shoal.parallel.tensor import Region, ShardedLogits, check_rules, cut_among, cuts_of, kind_of, rules_for
from shoal.parallel.tensor.between import mixes_features
from shoal.parallel.tensor.rules import check_pattern, matches
from shoal.parallel.tensor.spans import even, heads
from shoal.plan import Plan
from tests.parity.cases import LLAMA, MIXTRAL, text
from tests.pool import run_ranks

SIZE = {"vocab_size": 61, "sequence": 12, "layers": 2, "d_model": 32, "heads": 4}
GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
GPT2 |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 8}
PHI3 = {**LLAMA, "model_type": "phi3", "pad_token_id": 0}
ARIA = {**LLAMA, "model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}
MODELS = {
    "gpt": partial(GPT, GPTConfig(**SIZE)),
    "gpt-all-tokens": partial(GPT, GPTConfig(**SIZE)),
    "gpt-rotary": partial(
        GPT, GPTConfig(**SIZE, positions="rotary", mlp="swiglu", norm="rmsnorm", kv_heads=2, tied=False)
    ),
    "bert": partial(Bert, BertConfig(**SIZE, dropout=0.0)),
    "llama": lambda: from_config(LLAMA)(),
    "mixtral": lambda: from_config(MIXTRAL)(),
    "aria": lambda: from_config(ARIA)(),  # experts [experts, in, out]
    "gpt2": lambda: from_config(GPT2)(),
    "qwen3": lambda: from_config(QWEN3)(),
}


# spans


@given(st.integers(1, 60), st.integers(1, 12))
def test_even_spans_cover_a_dim_once(length, ranks):
    if length < ranks:
        with pytest.raises(UserError, match=f"take tp = {length} or less"):
            even(length, ranks, 0)
        return
    spans = [even(length, ranks, rank) for rank in range(ranks)]
    assert [row for span in spans for row in range(span.start, span.stop)] == list(range(length))
    assert max(span.length for span in spans) - min(span.length for span in spans) <= 1


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([4, 8, 16]))
def test_spans_of_heads_cover_them_once_and_sharers_have_one_head_together(number, ranks, size):
    if ranks > number * size:
        return
    if ranks > number and size % (ranks // number):
        with pytest.raises(UserError, match="cannot share"):
            heads(number, size, ranks, 0)
        return
    spans = [heads(number, size, ranks, rank) for rank in range(ranks)]
    assert [row for span in spans for row in range(span.start, span.stop)] == list(range(number * size))
    for rank, span in enumerate(spans):
        first = rank - rank % span.sharers
        together = spans[first : first + span.sharers]
        assert sum(each.length for each in together) == (size if span.sharers > 1 else span.length)
        assert span.sharers == 1 or together[0].start % size == 0


def test_heads_that_do_not_come_out_even_are_refused():
    with pytest.raises(UserError, match="6 heads of 8 rows, which tp = 4"):
        heads(6, 8, 4, 0)


# models


def filled(built: Built) -> nn.Module:
    """The module of `built` with real values."""
    done: dict[int, nn.Parameter] = {}
    module = built.module
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) not in done:
            done[id(parameter)] = nn.Parameter(built.value(name, parameter).clone())
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, done[id(parameter)])
    for prefix, owner_module in module.named_modules():
        for name, buffer in list(owner_module._buffers.items()):
            if buffer is not None:
                owner_module._buffers[name] = built.value(f"{prefix}.{name}".lstrip("."), buffer)
    return module


def objective(module: nn.Module) -> torch.Tensor:
    total, _, *auxiliary = causal_lm(module, stack_samples(text()[:4]))
    return total + sum(auxiliary[0].values()) if auxiliary else total


def region_of(world) -> Region:
    return Region(world.group("tp", list(range(world.size))), partial(world.group, "tp-sharers"))


def cut_and_whole(world, name: str) -> tuple[float, float, dict[str, float], int, dict]:
    """Loss whole and cut, the largest difference of each gradient as a part of it, parameters kept, and what the engine
    would save."""
    whole = filled(build(MODELS[name], 0))
    expected = objective(whole)
    expected.backward()
    built = build(MODELS[name], 0)
    own = {"": "whole"} if name.endswith("all-tokens") else {}
    sliced = cut_among(built, region_of(world), rules_for(built.module, own))
    module = filled(sliced.built)
    loss = objective(module)
    loss.backward()
    reference, worst = dict(whole.named_parameters()), {}
    for key, parameter in module.named_parameters():
        assert tuple(parameter.shape) == sliced.layouts[key].own_shape
        if "tp" in sliced.layouts[key].reduce:
            world.group("tp", list(range(world.size))).all_reduce(parameter.grad)
        wanted = sliced.layouts[key].own_part(reference[key].grad)
        worst[key] = float((parameter.grad - wanted).abs().max() / (wanted.abs().max() + 1e-6))
    weights = {key: (sliced.layouts[key], parameter.detach()) for key, parameter in module.named_parameters()}
    return expected.item(), loss.item(), worst, sum(p.numel() for p in module.parameters()), weights


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_cut_model_computes_what_the_whole_one_does(name, size):
    answers = run_ranks(cut_and_whole, size, name)
    whole = dict(filled(build(MODELS[name], 0)).named_parameters())
    for expected, loss, worst, _, _ in answers:
        assert loss == pytest.approx(expected, rel=1e-6)
        assert max(worst.values()) < 1e-5, worst
    assert len({loss for _, loss, *_ in answers}) == 1, "all ranks have the same bits"
    for key, value in whole.items():  # nothing is lost, and nothing kept twice but what all ranks have
        together = torch.full_like(value, torch.nan)
        layouts = [weights[key][0] for *_, weights in answers]
        for *_, weights in answers:
            layout, own = weights[key]
            layout.put_into(together, own)
        assert torch.equal(together, value)
        assert layouts[0].alike or sum(each[4][key][1].numel() for each in answers) == value.numel()
    matrices = sum(value.numel() for value in whole.values() if value.dim() > 1)
    assert (
        max(kept for *_, kept, _ in answers)
        < sum(map(torch.numel, whole.values())) - matrices * (size - 1) / size * 0.85
    )


def three_products(world, frozen: bool, sequence: bool) -> tuple[int, int, float, bool]:
    """Sums and gathers that ranks make for one tensor in three products, forward and in all; the error of its gradient;
    whether what entered is kept when the tensor has gone."""
    region, rows = region_of(world), 4 // world.size
    region.sequence = sequence
    torch.manual_seed(0)
    given = torch.randn(2, 6, 8)
    region.leave_first(given)
    x, weights = region.own_tokens(given).requires_grad_(), torch.randn(3, 4, 8, requires_grad=not frozen)

    def calls() -> int:
        return sum(used.calls for flow, used in world.ledger.traffic.items() if flow.purpose == "activations")

    before, same = calls(), x * 1
    parts = [F.linear(region.enter(same), weight[world.rank * rows :][:rows]) for weight in weights]
    entered = ref(region.enter(same))
    forward = calls() - before
    torch.cat(parts, -1).square().sum().backward()
    whole = given.requires_grad_()
    torch.cat([F.linear(whole, weight) for weight in weights], -1).square().sum().backward()
    error = float((x.grad - region.own_tokens(whole.grad)).abs().max())
    del same, parts
    return forward, calls() - before, error, entered() is not None


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_what_enters_for_several_products_enters_once(frozen, sequence):
    for forward, both, error, kept in run_ranks(three_products, 2, frozen, sequence):
        assert forward == sequence and both == 1 + sequence and error < 1e-5 and not kept


class Encoder(nn.Module):
    """A model that no table knows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(61, 16, padding_idx=3)
        self.wide, self.gain, self.narrow = nn.Linear(16, 40), nn.Linear(1, 1), nn.Linear(40, 16)
        self.out = nn.Linear(16, 61)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        h = self.wide(self.words(input_ids)).relu()
        h = self.gain(h.unsqueeze(-1)).squeeze(-1)  # the same layer for each of this rank's columns
        return self.out(self.narrow(h).tanh())


RULES = {"words": "vocabulary", "wide": "column", "gain": "inside", "narrow": "row", "out": "head"}


def users_rules(world) -> tuple[float, float, dict[str, float]]:
    whole = filled(build(Encoder, 0))
    objective(whole).backward()
    built = build(Encoder, 0)
    sliced = cut_among(built, region_of(world), rules_for(built.module, RULES))
    module = filled(sliced.built)
    loss = objective(module)
    loss.backward()
    reference = dict(whole.named_parameters())
    off = {
        key: float((parameter.grad - sliced.layouts[key].own_part(reference[key].grad)).abs().max())
        for key, parameter in module.named_parameters()
    }
    return objective(whole).item(), loss.item(), off


def test_a_users_own_rules():
    for expected, loss, off in run_ranks(users_rules, 3):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert max(off.values()) < 1e-4, off


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("blocks.*.mlp.upp", 'Did you mean "blocks.*.mlp.up"?'),
        ("blocks.3.mlp.upp", 'Did you mean "blocks.3.mlp.up"?'),
        ("block.11.mlp.up", 'Did you mean "blocks.11.mlp.up"?'),
        ("blocks.12.mlp.up", "There are blocks.0 to blocks.11."),
        ("blocks.13", "There are blocks.0 to blocks.11."),
        ("blocks.*.qkv", 'Did you mean "blocks.*.**.qkv"?'),
        ("**.attention.qvk", 'Did you mean "**.attention.qkv"?'),
        ("mlp.up", 'Did you mean "**.mlp.up"?'),
        ("layers.*.mlp.up", 'Did you mean "blocks.*.mlp.up"?'),
        ("blocks.3.mlp.up.weight", 'Did you mean "blocks.3.mlp.up"?'),
        ("quite.another", ""),
    ],
)
def test_what_may_be_meant_has_the_numbers_that_were_written(pattern: str, said: str):
    with torch.device("meta"):
        names = [name for name, _ in GPT(GPTConfig(61, 12, layers=12, d_model=32, heads=4)).named_modules()]
    with pytest.raises(UserError) as failure:
        check_pattern("tensor_rules", pattern, names)
    assert str(failure.value).partition("any number of them).")[2].strip() == said


def silent(size: int) -> Region:
    """Of the first of `size` ranks, where nothing is sent."""
    return Region(Group.of(Silent(0, size)), lambda ranks: Group.of(Silent(0, len(ranks))))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"wide": "colunm"}, 'Did you mean "column"'),
        ({"wides": "column"}, 'no module of such a name .* Did you mean "wide"'),
        ({"*.wide": "column"}, "no module of such a name"),
        ({"**wide": "column"}, r"\*\* stands for whole parts"),
        ({"words": "column"}, "is for nn.Linear: it is a Embedding"),
        ({"wide": "vocabulary"}, "is for nn.Embedding"),
        ({"wide": "qkv"}, "says how many heads"),
        ({"wide": "attention"}, "keeps no number of heads"),
        ({"wide": "experts"}, "experts are cut where"),
    ],
)
def test_rules_that_do_not_fit_say_so(rules, message):
    with pytest.raises(UserError, match=message):
        built = build(Encoder, 0)
        check_rules(built.module, rules or {})
        cut_among(built, silent(2), rules_for(built.module, rules))


def test_a_class_of_somebody_else_with_the_name_of_ours_has_not_its_rules():
    """Nothing was cut, and the gradients of all ranks were added up as if each had those of its own tokens."""
    theirs = type("GPT", (Encoder,), {})()
    assert rules_for(theirs) == {} and rules_for(build(MODELS["gpt"], 0).module)[""] == "sequence"


def test_tokens_are_dealt_out_by_an_embedding_or_all_ranks_have_all():
    module = build(MODELS["gpt"], 0).module
    with pytest.raises(UserError, match=r'no rule names one of GPT: name it, or give tensor_rules={"": "whole"}'):
        cuts_of(module, 2, {"token_embedding": "whole", "head": "whole"})
    assert kind_of("", cuts_of(module, 2, {"token_embedding": "whole", "head": "whole", "": "whole"}).rules) == "whole"


def test_heads_among_which_ranks_do_not_divide_are_refused_with_what_would_do():
    built = build(MODELS["gpt"], 0)
    with pytest.raises(
        UserError, match=r"4 heads, which do not come out even among tp = 16 ranks: take one of \[1, 2, 4\]"
    ):
        cut_among(built, silent(16), rules_for(built.module))


def test_a_plan_of_transformers_that_is_not_known_is_told():
    module = build(MODELS["llama"], 0).module
    module._tp_plan = {**module.tp_plan, "lm_head": "sideways"}
    with pytest.raises(UserError, match="cuts lm_head as 'sideways'"):
        rules_for(module)


def test_a_users_rule_is_asked_before_a_plan_that_is_not_known():
    module = build(MODELS["llama"], 0).module
    module._tp_plan = {**module.tp_plan, "lm_head": "sideways"}
    rules = rules_for(module, {"lm_head": "head"})
    assert kind_of("lm_head", rules) == "head" and kind_of("model.layers.1.mlp.down_proj", rules) == "row"


@pytest.mark.parametrize(
    ("pattern", "there", "not_there"),
    [
        ("*.attention", ["a.attention"], ["attention", "a.b.attention", "a.attention.out"]),
        ("**.attention", ["attention", "a.attention", "a.b.attention"], ["", "a.attention.out", "self_attention"]),
        ("a.**.out", ["a.out", "a.b.out", "a.b.c.out"], ["out", "b.out", "a.b.out.c"]),
        ("a.*.b", ["a.0.b"], ["a.b", "a.0.1.b"]),
        ("a.*_proj", ["a.q_proj"], ["a.proj", "a.b.q_proj"]),
        ("blocks.**", ["blocks", "blocks.0", "blocks.0.mlp.up"], ["", "block"]),
        ("", [""], ["a"]),
    ],
)
def test_a_star_is_one_part_of_a_name_and_two_are_any_number(pattern, there, not_there):
    assert all(matches(pattern, name) for name in there) and not any(matches(pattern, name) for name in not_there)


def test_a_table_shows_what_each_layer_became():
    built = build(MODELS["gpt-rotary"], 0)
    sliced = cut_among(
        built, silent(2), rules_for(built.module, {"": "whole", "*.1.mlp.down": "whole", "*.1.mlp.*": "whole"})
    )
    rows = [" ".join(line.split()) for line in str(sliced.layers).splitlines()]
    assert rows[0] == "layer kind whole on a rank"
    assert "token_embedding vocabulary 61 x 32 31 x 32" in rows
    assert "blocks.*.attention attention 4 x 2 2 x 1 2 layers" in rows
    assert "blocks.*.attention.qkv qkv 64 x 32 32 x 32 2 layers" in rows
    assert [row for row in rows if "mlp.down" in row] == [
        "blocks.*.mlp.down row 32 x 128 32 x 64",
        "blocks.*.mlp.down whole 32 x 128 32 x 128",
    ], "of two layers one is not as the other"


# logits


def logits_of(
    world, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, ShardedLogits, torch.Tensor, torch.Tensor]:
    """Logits [5, 7], the same cut, whole ones of which gradients are asked, and targets with one that is ignored."""
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(5, 7, generator=draw, dtype=torch.float64).mul_(3).to(dtype).requires_grad_()
    lengths = [even(7, world.size, rank).length for rank in range(world.size)]
    start = sum(lengths[: world.rank])
    local = whole.detach()[:, start : start + lengths[world.rank]].clone().requires_grad_()
    target = torch.tensor([0, 6, -100, 3, 4])
    return whole, ShardedLogits(local, lengths, region_of(world)), local, target


def losses(world, reduction: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """By each way to a loss: its value, the one of whole logits, and by how much gradients differ, first and second
    ones."""
    results = []
    for way in ("cross_entropy", "nll", "smoothed", "unknown"):
        whole, cut, local, target = logits_of(world)
        values = []
        for logits, leaf in ((whole, whole), (cut, local)):
            match way:
                case "cross_entropy":
                    value = F.cross_entropy(logits.float().to(torch.float64), target, reduction=reduction)
                case "nll":
                    value = F.nll_loss(F.log_softmax(logits, -1), target, reduction=reduction)
                case "smoothed":
                    value = F.cross_entropy(logits, target, reduction=reduction, label_smoothing=0.1)
                case "unknown":
                    value = torch.sin(logits).square().mean(0)
            weights = torch.arange(1.0, 1 + value.numel(), dtype=torch.float64).view(value.shape)
            (first,) = torch.autograd.grad((value * weights).sum(), leaf, create_graph=True)
            values.append((value.detach(), first))
        start = sum(cut._lengths[: world.rank])
        mine = values[0][1][:, start : start + local.shape[1]]
        (second,) = torch.autograd.grad(values[0][1].square().sum(), whole)
        (cut_second,) = torch.autograd.grad(values[1][1].square().sum(), local)
        results.append(
            (
                values[1][0] - values[0][0],
                values[1][1] - mine,
                (cut_second - second[:, start : start + local.shape[1]]) if way != "unknown" else torch.zeros(1),
            )
        )
    return [tuple(each.detach() for each in row) for row in results]


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_losses_of_cut_logits_and_their_gradients(size, reduction):
    for rows in run_ranks(losses, size, reduction):
        for value, first, second in rows[:2]:
            assert max(float(each.abs().max()) for each in (value, first, second)) < 1e-6
        for value, first, _ in rows[2:]:
            assert max(float(value.abs().max()), float(first.abs().max())) < 1e-12


def tangents(world) -> tuple[float, float]:
    whole, cut, local, target = logits_of(world)
    change = torch.randn(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    start = sum(cut._lengths[: world.rank])
    _, expected = torch.func.jvp(lambda x: F.cross_entropy(x, target), (whole.detach(),), (change,))
    _, found = torch.func.jvp(
        lambda x: F.cross_entropy(ShardedLogits(x, cut._lengths, cut._region), target),
        (local.detach(),),
        (change[:, start : start + local.shape[1]].contiguous(),),
    )
    return float(expected), float(found)


def test_forward_mode_passes_through_cut_logits():
    for expected, found in run_ranks(tangents, 3):
        assert found == pytest.approx(expected, rel=1e-9)


def looks(world) -> None:
    whole, cut, _, _ = logits_of(world, torch.bfloat16)
    assert cut.shape == whole.shape and cut.size(-1) == 7 and cut.dim() == cut.ndim == 2
    assert (
        cut.dtype == torch.bfloat16
        and cut.float().dtype == torch.float32
        and cut.is_floating_point()
        and cut.requires_grad
    )
    three = cut.view(5, 1, 7)
    assert isinstance(three, ShardedLogits) and three.shape == (5, 1, 7)
    assert isinstance(three.flatten(0, -2), ShardedLogits) and three.view(-1, 7).shape == (5, 7)
    for shape in ((7, 5), (-1,), (35,), (1, 35)):
        assert torch.equal(cut.view(*shape), whole.view(*shape))
    assert torch.equal(three.flatten(), whole.flatten()) and torch.equal(cut.argmax(-1), whole.argmax(-1))
    assert isinstance(cut[1:3], ShardedLogits) and torch.equal(cut[1:3].whole(), whole[1:3])
    mask = torch.tensor([True, False, True, False, True])
    assert torch.equal(cut[mask].whole(), whole[mask]) and isinstance(cut[None], ShardedLogits)
    three, picked = cut.view(5, 1, 7), torch.tensor([0, 6, 3])
    assert torch.equal(three[mask.view(5, 1), picked], whole.view(5, 1, 7)[mask.view(5, 1), picked])
    for index in ((slice(None), 2), (..., 3), (slice(None), slice(1, 4)), (torch.tensor([0, 2]), torch.tensor([1, 5]))):
        assert torch.equal(cut[index], whole[index])
    assert torch.equal((cut * 2.0 / 3).tanh().whole(), (whole * 2.0 / 3).tanh())
    assert torch.equal(torch.softmax(cut.float(), -1), whole.float().softmax(-1)) and torch.equal(cut + 1, whole + 1)
    assert torch.equal(cut == cut, whole == whole) and torch.equal(1 - cut, 1 - whole) and len(cut) == 5
    assert torch.equal(F.log_softmax(cut.detach(), 0), F.log_softmax(whole.detach(), 0))
    for change in (
        lambda: cut.div_(2.0),
        lambda: torch.relu_(cut),
        lambda: cut.__setitem__(0, 1.0),
        lambda: cut.register_hook(print),
    ):
        with pytest.raises(UserError, match=r"take logits = logits.clone\(\) before"):
            change()
    copied = cut.clone()
    copied[:, 3] = 0.0
    assert torch.equal(copied.div_(2.0)[:, 4:], whole[:, 4:] / 2.0)
    before = world.ledger.total().payload
    assert getattr(cut, "logits", None) is None and not hasattr(cut, "aux_loss"), "as a loss asks"
    assert world.ledger.total().payload == before, "nothing is gathered for that"


def test_cut_logits_look_like_whole_ones():
    run_ranks(looks, 3)


# CLIP: two towers and no head


def clip() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    words = {"vocab_size": 61, "max_position_embeddings": 16, "eos_token_id": 60, **tower}
    config = transformers.CLIPConfig(
        text_config=words, vision_config={"image_size": 16, "patch_size": 8, **tower}, projection_dim=16
    )
    return transformers.CLIPModel(config)


def contrast(model: nn.Module, mb: dict) -> tuple[torch.Tensor, torch.Tensor]:
    count = len(mb["input_ids"])
    logits = model(input_ids=mb["input_ids"], pixel_values=mb["pixel_values"]).logits_per_text
    return torch.nn.functional.cross_entropy(logits, torch.arange(count), reduction="sum"), torch.tensor(count)


def of_pairs(world, tp: int) -> list[tuple[float, float]]:
    draw = torch.Generator().manual_seed(0)
    ends = torch.tensor([60])
    pairs = [
        {
            "input_ids": torch.cat([torch.randint(0, 60, (7,), generator=draw), ends]),
            "pixel_values": torch.randn(3, 16, 16, generator=draw),
        }
        for _ in range(4)
    ]
    engine = Engine(clip, contrast, partial(torch.optim.SGD, lr=1e-2), Plan(tp=tp), global_batch=4, world=world)
    results = [engine.step(batch) for batch in engine.batches(pairs, steps=3)]
    engine.close()
    return [(result.loss, result.grad_norm) for result in results]


def test_the_towers_of_clip_are_cut():
    expected = of_pairs(World.single("cpu"), 1)
    for results in run_ranks(of_pairs, 2, 2):
        assert [pytest.approx(each, rel=1e-4) for each in results] == expected


def test_an_activation_that_is_trained_sums_its_gradients_beside_layers_that_are_cut():
    """xIELU of Apertus learns two numbers, of which each rank would have trained its own."""
    model = build(from_config({**LLAMA, "model_type": "apertus"}), 0).module
    rules = cuts_of(model, 2, None).rules
    assert kind_of("model.layers.0.mlp.act_fn", rules) == "inside" and kind_of("model.norm", rules) == "whole"


SPARSE = {
    **LLAMA,
    "model_type": "gemma3n_text",
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 60,
    "activation_sparsity_pattern": [0.5, 0.0],
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "pad_token_id": 0,
}


def test_a_layer_stays_whole_whose_activation_takes_all_features_together():
    """The plan of Gemma 3n cuts it, and each rank would take the cutoff of its own features."""
    rules = cuts_of(build(from_config(SPARSE), 0).module, 2, None).rules
    names = ["gate_proj", "up_proj", "down_proj"]
    assert {kind_of(f"model.layers.0.mlp.{name}", rules) for name in names} == {"whole"}
    assert [kind_of(f"model.layers.1.mlp.{name}", rules) for name in names] == ["column", "column", "row"]
    assert kind_of("model.layers.0.self_attn.q_proj", rules) == "column"


class Between(nn.Module):
    """What lies between a column and its row is `between`; what is behind the row is no matter."""

    def __init__(self, between, packed=False):
        super().__init__()
        self.up, self.down = nn.Linear(4, 16 if packed else 8), nn.Linear(8, 4)
        self.between = between
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return torch.tanh(x + self.down(self.dropout(self.between(self.up(x)))))


@pytest.mark.parametrize(
    ("between", "packed", "mixes"),
    [
        (torch.relu, False, False),
        (lambda x: x[..., : x.shape[-1] // 2] * x[..., x.shape[-1] // 2 :], True, False),
        (lambda x: torch.relu(x - x.mean(-1, keepdim=True)), False, True),
        (lambda x: x / x.square().sum(-1, keepdim=True), False, True),
        (lambda x: x.view(-1, 8), False, False),  # does not run on other sizes: not judged
    ],
)
def test_what_lies_between_a_column_and_its_row_is_asked_by_numbers(between, packed, mixes):
    module = Between(between, packed)
    kinds = {"up": "packed" if packed else "column", "down": "row"}
    before = torch.get_rng_state()
    assert mixes_features(module, kinds) is mixes
    assert module.training and module.up.weight.shape[1] == 4 and torch.equal(torch.get_rng_state(), before)
    with torch.device("meta"):
        assert mixes_features(module, kinds) is mixes


class TwoNames(Between):
    """Its activation has two names."""

    def __init__(self, between):
        super().__init__(torch.relu)
        self.first = self.between = nn.Module()
        self.between.forward = between


def test_an_activation_of_two_names_is_asked_too():
    kinds = {"up": "column", "down": "row"}
    assert mixes_features(TwoNames(lambda x: x - x.mean(-1, keepdim=True)), kinds)
    assert not mixes_features(TwoNames(torch.relu), kinds)


def test_a_plan_that_leaves_out_what_is_trained_between_a_column_and_its_row_is_not_taken():
    model = build(from_config(LLAMA), 0).module
    assert cuts_of(model, 2, None).found is None
    model.model.layers[0].mlp.act_fn = nn.PReLU(64)
    assert cuts_of(model, 2, None).found is not None
