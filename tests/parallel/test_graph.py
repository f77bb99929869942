"""Cuts found from a model's own graph: what is found, and that ranks then compute what one process does."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import prune

from shoal.comm.simulation import simulate_world
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.models import from_config
from shoal.module.build import build
from shoal.parallel.tensor import cut_among, cuts_of
from shoal.parallel.tensor.graph.dims import leaves, mask, new, pieces, reshape, resolve, stretches, unify
from shoal.plan import Plan
from tests.parallel.test_tensor import filled, region_of
from tests.pool import run_ranks


class Gate(nn.Module):
    """Two linear maps in one, whose halves meet."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(12, 8)

    def train(self, mode: bool = True) -> None:
        super().train(mode)  # and returns nothing, as some layers of timm

    def forward(self, x: Tensor) -> Tensor:
        gate, wide = self.up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * wide)


class Heads(nn.Module):
    """Attention by hand: one projection for all, numbers of heads kept, a norm of each head, slopes by head."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.wide = 4, 16
        self.qkv, self.out = nn.Linear(8, 48, bias=False), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]))

    def forward(self, x: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        q, k, v = (
            each.view(len(x), -1, self.heads, self.wide // self.heads).transpose(1, 2)
            for each in self.qkv(x).split(self.wide, -1)
        )
        scores = self.norm(q) @ k.transpose(-1, -2) + self.slopes[:, None, None] + bias
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(len(x), -1, self.wide))


class Channels(nn.Module):
    """Convolutions with statistics between them, one of them by channel; channels weighed by a small net."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.each = nn.Conv2d(8, 12, 1), nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.one, self.two = nn.BatchNorm2d(12), nn.GroupNorm(4, 12)
        self.less, self.more = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.narrow = nn.Conv2d(12, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.two(self.each(self.one(self.wide(x)).relu()))
        h = h * self.more(self.less(h.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return x + self.narrow(h)


class Model(nn.Module):
    """The three, between an embedding and the head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(31, 8)
        self.blocks = nn.ModuleList([Gate(), Heads(), Gate()])
        self.picture = Channels()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 31, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        for block in self.blocks:
            h = block(h)
        side = self.picture(h.transpose(1, 2)[:, :, None].expand(-1, -1, 3, -1)).mean(2).transpose(1, 2)
        return self.head(self.norm(h + side))


class Weighed(nn.Module):
    """Channels that a small net weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.less, self.more = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.more(self.less(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class Ghost(nn.Module):
    """Channels, and behind them what is made of each: two parts of a rank in one dim, which a small net weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.each = nn.Conv2d(8, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.weighed, self.narrow = Weighed(), nn.Conv2d(12, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        half = self.wide(x).relu()
        return x + self.narrow(self.weighed(torch.cat([half, self.each(half)], 1)))


class Doubled(nn.Module):
    """Two of them between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)
        self.blocks = nn.Sequential(Ghost(), Ghost())

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(ids).transpose(1, 2)[:, :, None])[:, :, 0].transpose(1, 2))


def samples() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [{"ids": torch.randint(31, (9,), generator=draw)} for _ in range(8)]


def loss(model: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, int]:
    result = model(mb["ids"])
    logits = getattr(result, "logits", result)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), mb["ids"][:, 1:].flatten(), reduction="sum"), mb["ids"][:, 1:].numel()


def made(world, plan: dict, rules: dict[str, str] | None = None, factory=Model, precision="fp64", by=None) -> Engine:
    return Engine(
        factory,
        by or loss,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        Plan(**plan),
        global_batch=4,
        microbatch=2,
        precision=precision,
        tensor_rules=rules,
        world=world,
    )


def trained(
    world, plan: dict, rules: dict[str, str] | None = None, factory=Model, precision="fp64", by=None
) -> tuple[list[float], dict, str]:
    engine = made(world, plan, rules, factory, precision, by)
    losses = [engine.step(batch).loss for batch in engine.batches(samples(), steps=3)]
    state = {name: value.clone() for name, value in engine.module.named_buffers()}
    layers = str(engine.tensor_layers)
    engine.close()
    return losses, state, layers


def rows_of(layers: str) -> list[str]:
    """The lines of a table of layers, with one blank between columns."""
    return [" ".join(line.split()) for line in layers.splitlines()]


@pytest.mark.parametrize("plan", [{"tp": 2}, {"tp": 2, "dp": 2, "zero": 3}])
def test_a_model_without_rules_is_cut_and_trains_as_on_one_process(plan):
    alone, buffers, _ = simulate_world(1, trained, {})[0]
    for losses, state, layers in simulate_world(Plan(**plan).size, trained, plan):
        assert losses == pytest.approx(alone, rel=1e-9)
        for name, value in buffers.items():
            assert torch.allclose(state[name].double(), value.double(), rtol=1e-9), name
        rows = rows_of(layers)
        assert "blocks.*.qkv column 48 x 8 24 x 8" in rows and "blocks.*.norm inside 4 4" in rows
        assert (
            "picture.each part 12 x 1 x 3 x 3 6 x 1 x 3 x 3" in rows
            and "picture.less row 4 x 12 x 1 x 1 4 x 6 x 1 x 1" in rows
        )
        assert "words vocabulary 31 x 8 16 x 8" in rows or "words vocabulary 31 x 8 15 x 8" in rows


def seeded() -> nn.Module:
    """Sets a seed, so that it is not made on fake tensors."""
    torch.manual_seed(3)
    return Model()


def trained_of_values(world, plan: dict, model: Callable[[], nn.Module] | nn.Module) -> list[float]:
    return trained(world, plan, factory=deepcopy(model))[0]  # each rank has its own


@pytest.mark.parametrize("ready", [False, True], ids=["sets a seed", "ready"])
def test_a_model_that_has_values_is_cut_as_one_that_is_recorded(ready):
    """What stays whole of a layer that is cut (the bias of a row) had lost them while the cut was looked for."""
    with torch.random.fork_rng():
        model = seeded() if ready else seeded
    alone = simulate_world(1, trained_of_values, {}, model)[0]
    for losses in simulate_world(2, trained_of_values, {"tp": 2}, model):
        assert losses == pytest.approx(alone, rel=1e-9)


def test_a_layer_on_parts_that_are_put_behind_each_other_is_confirmed_where_they_are_whole_again():
    alone, *_ = simulate_world(1, trained, {}, None, Doubled)[0]
    for losses, _, layers in simulate_world(2, trained, {"tp": 2}, None, Doubled):
        assert losses == pytest.approx(alone, rel=1e-9)
        assert "blocks.*.weighed.less row 4 x 12 x 1 x 1 4 x 6 x 1 x 1 2 layers" in rows_of(layers)


def saved(world, plan: dict, directory: Path) -> None:
    engine = made(world, plan)
    for batch in engine.batches(samples(), steps=2):
        engine.step(batch)
    engine.save(directory / "steps")
    engine.export(directory / "weights")
    engine.close()


def loaded(world, plan: dict, directory: Path) -> tuple[float, list[float]]:
    """The mean loss in evaluation and the losses of further steps, of what was saved."""
    engine = made(world, plan)
    engine.load(directory / "steps")
    found = engine.evaluate(samples()).loss, [engine.step(each).loss for each in engine.batches(samples(), steps=4)]
    engine.close()
    return found


def test_what_was_saved_of_a_cut_model_goes_on_whole_and_the_other_way_round(tmp_path):
    for name, size in (("whole", 1), ("cut", 2)):
        run_ranks(saved, size, {"tp": size}, tmp_path / name)
    whole, cut = (load_file(next((tmp_path / name / "weights").glob("*.safetensors"))) for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    for name, value in whole.items():
        assert torch.allclose(cut[name].double(), value.double(), rtol=1e-6, atol=1e-8), name
    evaluated, losses = run_ranks(loaded, 1, {}, tmp_path / "whole")[0]
    assert losses
    for size, name in ((1, "cut"), (2, "whole"), (2, "cut")):
        for found in run_ranks(loaded, size, {"tp": size}, tmp_path / name):
            assert found == (pytest.approx(evaluated, rel=1e-9), pytest.approx(losses, rel=1e-9))


def test_a_fused_layer_is_cut_in_each_of_its_parts():
    built = build(Model, 0)
    found = cuts_of(built.module, 2, None).found
    assert found.parts["blocks.1.qkv.weight"] == (0, (((0, 8), (16, 24), (32, 40)), ((8, 16), (24, 32), (40, 48))))
    assert found.parts["blocks.0.up.bias"] == (0, (((0, 6), (12, 18)), ((6, 12), (18, 24))))
    assert found.patches["blocks.1"] == {"heads": 2, "wide": 8} and found.patches["picture.two"] == {"num_groups": 2}


def test_a_rule_that_keeps_a_layer_whole_leaves_the_rest_to_be_found():
    built = build(Model, 0)
    cuts = cuts_of(built.module, 2, {"blocks.0.*": "whole"})
    assert "blocks.0.up" not in cuts.found.kinds and cuts.found.kinds["blocks.2.up"] == "column"
    assert cuts_of(built.module, 2, {"blocks.0.up": "column", "blocks.0.down": "row"}).found is None


def gradients(world) -> None:
    """Each parameter's gradient against that of the whole model."""
    whole = filled(build(Model, 0)).double()
    built = build(Model, 0)
    cuts = cuts_of(built.module, world.size, None)
    sliced = cut_among(built, region_of(world), cuts.rules, found=cuts.found)
    module = filled(sliced.built).double()
    batch = {"ids": torch.stack([each["ids"] for each in samples()])}
    for each in (whole, module):
        loss(each, batch)[0].backward()
    wanted = dict(whole.named_parameters())
    for name, parameter in module.named_parameters():
        own = sliced.layouts[name].own_part(wanted[name].grad)
        assert torch.allclose(parameter.grad, own, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_of_a_cut_model_are_those_of_the_whole_one(size):
    simulate_world(size, gradients)


class Dropping(nn.Module):
    """Dropouts of what is cut (between two layers, of weights of heads) and of what is whole, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(31, 8)
        self.body = nn.TransformerEncoderLayer(8, 2, 8, 0.2, batch_first=True)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 31)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.body(F.dropout(self.words(ids), 0.1, self.training))
        wide = F.dropout(self.up(h).relu(), 0.3, self.training)
        return self.head(F.dropout(self.down(wide), 0.2, self.training) + h)


def test_dropouts_of_what_is_cut_drop_what_one_process_drops():
    alone = simulate_world(1, trained, {}, None, Dropping)[0][0]
    for losses, _, layers in simulate_world(2, trained, {"tp": 2}, None, Dropping):
        assert losses == pytest.approx(alone, rel=1e-9)
        rows = rows_of(layers)
        assert "body.self_attn multihead 24 x 8 12 x 8" in rows and "body.linear2 row 8 x 8 8 x 4" in rows


def of_vectors(world, plan: dict) -> tuple[list[float], str]:
    """Trains a perceptron on vectors, which is traced on rows of them: those are tried first."""
    engine = Engine(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3)),
        lambda model, mb: (model(mb["x"]).square().sum(), len(mb["x"])),
        partial(torch.optim.SGD, lr=0.1),
        Plan(**plan),
        global_batch=4,
        microbatch=2,
        precision="fp64",
        world=world,
    )
    draw = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(6, generator=draw)} for _ in range(8)]
    losses = [engine.step(batch).loss for batch in engine.batches(data, steps=2)]
    layers = str(engine.tensor_layers)
    engine.close()
    return losses, layers


def test_dropouts_of_what_is_cut_count_its_dims_from_the_last():
    """The layers of a perceptron, found on [B, T, F], had no such dim of [B, F]."""
    (alone, _), *_ = simulate_world(1, of_vectors, {})
    for losses, layers in simulate_world(2, of_vectors, {"tp": 2}):
        assert losses == pytest.approx(alone, rel=1e-9)
        assert "0 column 8 x 6 4 x 6" in rows_of(layers)


class Mixing(nn.Module):
    """The result of a dropout layer, which every rank has, weighs what is cut: its gradient is that of a part."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.words, self.mix, self.drop = nn.Embedding(31, 8), nn.Linear(8, 8), nn.Dropout(p)
        self.value, self.out, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 31)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        weights = self.drop((self.mix(h) @ h.transpose(1, 2)).softmax(-1))
        return self.head(self.out(weights @ self.value(h)) + h)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_dropout_layer_between_whole_and_cut_passes_the_whole_gradient(p):
    factory = partial(Mixing, p)
    alone = simulate_world(1, trained, {}, None, factory)[0][0]
    for losses, _, layers in simulate_world(2, trained, {"tp": 2}, None, factory):
        assert losses == pytest.approx(alone, rel=1e-9)
        assert "value column" in " ".join(layers.split())


class Positions(nn.Module):
    """Looks up as many rows as it asks the embedding for."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(31, 8), nn.Embedding(12, 8), nn.Linear(8, 31)

    def forward(self, ids: Tensor) -> Tensor:
        places = self.places(torch.arange(self.places.num_embeddings))
        return self.head(self.words(ids) + places[: ids.shape[1]])


def test_an_embedding_of_which_a_rank_has_rows_says_how_many_there_are() -> None:
    alone = simulate_world(1, trained, {}, None, Positions)[0][0]
    for losses, _, layers in simulate_world(2, trained, {"tp": 2}, None, Positions):
        assert losses == pytest.approx(alone, rel=1e-9)
        assert "places vocabulary 12 x 8 6 x 8" in " ".join(layers.split())


COHERE = {"model_type": "cohere", "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip


def test_a_plan_of_transformers_that_names_no_norm_of_heads_gives_way_to_the_graph() -> None:
    """Weights of the norms of queries and keys are [heads, size]: a rank needs those of its heads."""
    factory = from_config({**COHERE, "use_qk_norm": True})
    alone = simulate_world(1, trained, {}, None, factory)[0][0]
    for losses, _, layers in simulate_world(2, trained, {"tp": 2}, None, factory):
        assert losses == pytest.approx(alone, rel=1e-6)  # norms are fp32 inside
        rows = rows_of(layers)
        assert any("self_attn.q_proj column 16 x 16 8 x 16" in row for row in rows), layers
    assert cuts_of(build(from_config({**COHERE, "use_qk_norm": False}), 0).module, 2, None).found is None


def adapted_mixtral(hidden: int = 32) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = {**COHERE, "model_type": "mixtral", "hidden_size": hidden, "num_local_experts": 4}
    return peft.get_peft_model(from_config(config)(), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))


def test_a_model_with_products_by_groups_runs_as_a_whole() -> None:
    """Torch's stand-in takes them in bf16 alone: each part was looked at alone, on hundreds of inputs, and but for the
    adapters all stayed whole."""
    alone = simulate_world(1, trained, {}, None, adapted_mixtral, "fp32")[0][0]
    for losses, _, layers in simulate_world(2, trained, {"tp": 2}, None, adapted_mixtral, "fp32"):
        assert losses == pytest.approx(alone, rel=1e-5)
        assert any("self_attn.o_proj row 32 x 32 32 x 16" in row for row in rows_of(layers)), layers


class Refused(nn.Module):
    """It runs on no input that is tried."""

    tried = 0

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: float | None = None) -> Tensor:
        Refused.tried += 1
        assert scale is not None and len(x) == 3
        return self.up(x) * scale


class Refusing(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(31, 8), nn.ModuleList(Refused() for _ in range(number))

    def forward(self, ids: Tensor) -> Tensor:
        assert ids.shape[1] == 9
        return self.words(ids)


def test_layers_like_one_that_runs_on_nothing_are_not_tried() -> None:
    tried = []
    for number in (1, 4):
        Refused.tried = 0
        found = cuts_of(build(partial(Refusing, number), 0).module, 2, None).found
        assert found is not None and not found.kinds
        tried.append(Refused.tried)
    assert tried[0] == tried[1] > 0


class Shared(nn.Module):
    """A width that no shape but the mathematics shows to be whole."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.parts = nn.Embedding(31, 8), 4
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 31)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        wide = self.up(h).view(*ids.shape, self.parts, 4).relu() / self.parts
        return self.head(F.layer_norm(self.down(wide.flatten(-2)) + h, (8,)))


def test_what_computes_otherwise_with_a_part_stays_whole():
    assert cuts_of(build(Shared, 0).module, 2, None).found.kinds["up"] == "column"  # by its shapes
    alone = simulate_world(1, trained, {}, None, Shared)[0][0]
    for losses, _, layers in simulate_world(2, trained, {"tp": 2}, None, Shared):
        assert losses == pytest.approx(alone, rel=1e-9)
        assert "up stays whole: the model gives other numbers with a part than whole" in layers


class Rooted(Shared):
    """Has roots of what its own weights keep positive; of others there are none."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.up.bias, 9.0)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        wide = (self.up(h) - 0.25).view(*ids.shape, self.parts, 4).sqrt() / self.parts
        return self.head(F.layer_norm(self.down(wide.flatten(-2)) + h, (8,)))


class Picky(Shared):
    """Does not run on rows of nothing, on which it would be tried."""

    def forward(self, ids: Tensor) -> Tensor:
        if (ids == 0).all():
            raise ValueError("rows of nothing")
        return super().forward(ids)


@pytest.mark.parametrize(("model", "why"), [(Rooted, "gives other numbers"), (Picky, "does not run on what it could")])
def test_what_keeps_numbers_and_cannot_be_tried_as_others_can_stays_whole(model: type[Shared], why: str) -> None:
    """It was cut, and ranks divided by other numbers than one process."""
    alone = simulate_world(1, trained, {}, None, model)[0][0]
    for losses, _, layers in simulate_world(2, trained, {"tp": 2}, None, model):
        assert losses == pytest.approx(alone, rel=1e-9)
        assert f"up stays whole: the model {why}" in layers


class Told(Shared):
    """Computes with a width where it is given a mask, which the inputs that are tried have not."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.words(ids)
        wide = self.up(h).relu()
        if mask is not None:
            wide = wide * mask[..., None].expand(*ids.shape, 4 * self.parts)
        return self.head(F.layer_norm(self.down(wide) + h, (8,)))


def masked_loss(model: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(mb["ids"], (mb["ids"] > 5).double())[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), mb["ids"][:, 1:].flatten(), reduction="sum"), mb["ids"][:, 1:].numel()


def test_what_fails_as_it_was_cut_is_refused_and_the_remedy_trains() -> None:
    """It was an error of torch."""
    alone = simulate_world(1, trained, {}, None, Told, "fp64", masked_loss)[0][0]
    message = r"plan.tp = 2: the model fails \(RuntimeError: .*tensor_rules=\{"
    with pytest.raises(UserError, match=message + r'"\*\*": "whole"\}'):
        simulate_world(2, trained, {"tp": 2}, None, Told, "fp64", masked_loss)
    for losses, *_ in simulate_world(2, trained, {"tp": 2}, {"**": "whole"}, Told, "fp64", masked_loss):
        assert losses == pytest.approx(alone, rel=1e-9)


class Widths(nn.Module):
    """Attention with keys and values of widths of their own, and a mask for each head of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)
        self.keys, self.values = nn.Linear(8, 4), nn.Linear(8, 6)
        self.attention = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        h, (B, T) = self.words(ids), ids.shape
        mask = torch.ones(T, T, dtype=torch.bool).triu(1).expand(2 * B, T, T)
        return self.head(h + self.attention(h, self.keys(h), self.values(h), attn_mask=mask)[0])


def test_attention_is_tried_with_parts_of_its_keys_alike_on_all_ranks():
    """All heads are on each rank then, and the mask was cut: the first rank went on, where the second one failed."""
    alone = simulate_world(1, trained, {}, None, Widths)[0][0]
    for losses, _, layers in simulate_world(2, trained, {"tp": 2}, None, Widths):
        assert losses == pytest.approx(alone, rel=1e-9)
        assert "keys stays whole: the model gives other numbers with a part than whole" in layers


def adapted_by_size() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = {**COHERE, "model_type": "llama", "hidden_size": 16}
    adapters = peft.LoraConfig(r=4, target_modules=["up_proj"], use_dora=True, init_lora_weights=False)
    return peft.get_peft_model(from_config(config)(), adapters)


def test_a_module_that_is_given_others_is_confirmed_in_what_has_them():
    """DoRA's, which calls the adapter's layers, was run by itself, with the model's own, which have no values."""
    alone = simulate_world(1, trained, {}, None, adapted_by_size)[0][0]
    for losses, _, layers in simulate_world(2, trained, {"tp": 2}, None, adapted_by_size):
        assert losses == pytest.approx(alone, rel=1e-9)
        assert any("up_proj.lora_A.default column 4 x 16 2 x 16" in row for row in rows_of(layers))


def pruned() -> nn.Module:
    model = Shared()
    prune.random_unstructured(model.up, "weight", amount=0.5)
    return model


def test_a_layer_whose_weight_is_a_product_with_a_mask_stays_whole():
    """The mask is brought to the weight's dtype by `to`, which gives the mask itself: what it was made from was looked
    for without end."""
    alone = simulate_world(1, trained, {}, None, pruned)[0][0]
    for losses, _, layers in simulate_world(2, trained, {"tp": 2}, None, pruned):
        assert losses == pytest.approx(alone, rel=1e-9)
        assert "down stays whole: the model meets something that every rank has" in layers


class Tiled(nn.Module):
    """Features are weighed by numbers of their places, tiled by as many repeats as there are last dims."""

    def __init__(self, repeats: tuple[int, ...]) -> None:
        super().__init__()
        self.repeats = repeats
        self.words, self.up, self.down = nn.Embedding(31, 8), nn.Linear(8, 24), nn.Linear(24, 8)
        self.head = nn.Linear(8, 31)
        self.register_buffer("angles", torch.linspace(0.1, 1.0, 12)[None])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        return self.head(x + self.down(self.up(x) * self.angles.tile(self.repeats).cos()))


@pytest.mark.parametrize("repeats", [(2,), (1, 2), (1, 1, 2)])
def test_what_is_tiled_in_its_last_dims_alone_is_cut(repeats):
    """DINOv3 tiles its angles so: no tp held, for a ValueError of zip()."""
    model = partial(Tiled, repeats)
    assert cuts_of(build(model, 0).module, 2, None).found.kinds["up"] == "column"
    alone = simulate_world(1, trained, {}, None, model)[0][0]
    assert simulate_world(2, trained, {"tp": 2}, None, model)[0][0] == pytest.approx(alone, rel=1e-9)


# dims


def test_a_view_refines_a_dim_for_all_tensors_that_have_it():
    rows = new(24)
    columns = new(24)
    unify(rows, columns, "add")
    (heads, size) = reshape([rows], [4, 6])
    assert [atom.size for atom in resolve(columns)] == [4, 6]
    assert resolve(columns) == [*resolve(heads), *resolve(size)]


def test_uneven_pieces_make_a_sum_and_each_is_cut_by_itself():
    rows = new(16)
    q, k = pieces(rows, [12, 4], "split")
    chosen = frozenset([*leaves(q), *leaves(k)])
    assert stretches(mask(rows, chosen, 2, 1)) == [(6, 12), (14, 16)]


def test_dims_that_do_not_match_are_blocked():
    one, other = new(12), new(12)
    reshape([one], [4, 3])
    reshape([other], [3, 4])
    unify(one, other, "add")
    assert all(atom.blocked for atom in leaves(one))


def test_dims_that_are_not_of_one_size_are_blocked():
    one, other = new(12), new(4)
    unify(one, other, "as_strided")
    assert all(atom.blocked == "as_strided" for atom in leaves([*one, *other]))


class Fixed(nn.Module):
    """No input that is tried fits the whole of it; what is tied lies in one of its parts and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(31, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 31)
        self.head.weight = self.body[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        assert ids.shape[1] == 9
        return self.head(self.body(ids))


def test_what_is_tied_beside_a_part_that_is_looked_at_alone_stays_whole():
    alone = simulate_world(1, trained, {}, None, Fixed)[0][0]
    for losses, _, layers in simulate_world(2, trained, {"tp": 2}, None, Fixed):
        assert losses == pytest.approx(alone, rel=1e-9)
        rows = rows_of(layers)
        assert "body.* column 16 x 8 8 x 8" in rows and "head whole 31 x 8 31 x 8" in rows
        assert "body.* whole 31 x 8 31 x 8" in rows


class Across(nn.Module):
    """A layer that looks at something else where it is given that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.across = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = x + self.down(self.up(x).relu())
        return x if other is None else x + self.across(self.norm(other))


class Looking(nn.Module):
    """No input that is tried fits the whole of it, and its layer runs by itself without what it gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(31, 8), Across(), nn.Linear(8, 31)

    def forward(self, ids: Tensor) -> Tensor:
        assert ids.shape[1] == 9
        x = self.words(ids)
        return self.head(self.layer(x, x.flip(1)))


def test_what_a_part_that_is_looked_at_alone_does_not_use_stays_whole():
    alone = simulate_world(1, trained, {}, None, Looking)[0][0]
    for losses, _, layers in simulate_world(2, trained, {"tp": 2}, None, Looking):
        assert losses == pytest.approx(alone, rel=1e-9)
        rows = rows_of(layers)
        assert "layer.up column 16 x 8 8 x 8" in rows and "layer.norm whole 8 8" in rows
        assert "layer.norm stays whole: it is not used on the inputs on which the model was tried" in layers


class Counts(nn.Module):
    """Its constructor reads values, so that it is built on the CPU; training counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.norm = nn.Embedding(31, 8), nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.down, self.head = nn.Linear(16, 8), nn.Linear(8, 31)
        assert float(self.up.weight.abs().max()) > 0

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        return self.head(self.down(self.norm(self.up(h).transpose(1, 2)).transpose(1, 2)) + h)


def test_looking_at_a_model_counts_no_batches() -> None:
    module = build(Counts, 0).module
    cuts_of(module, 2, None)
    assert int(module.get_buffer("norm.num_batches_tracked")) == 0


class Collecting(Counts):
    """Hooks into its layers in its first forward, as models of transformers do, and notes that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.is_hooked = False

    def forward(self, ids: Tensor) -> Tensor:
        if not self.is_hooked:
            self.up.register_forward_hook(lambda *_: None)
        self.is_hooked = True
        return super().forward(ids)


def test_looking_at_a_model_leaves_no_hooks() -> None:
    """The first forward of training put them in once more, and all that they collect came twice."""
    module = build(Collecting, 0).module
    cuts_of(module, 2, None)
    assert not module.get_submodule("up")._forward_hooks and not module.is_hooked


class Distances(nn.Module):
    """A bias by head and distance; which distance is where, is kept outside of the model, as BEiT does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4))

    @staticmethod
    @lru_cache(maxsize=64)
    def places(length: int) -> Tensor:
        at = torch.arange(length)
        return (at[:, None] - at).clamp(-3, 3) + 3

    def forward(self, length: int) -> Tensor:
        return self.table[self.places(length).view(-1)].view(length, length, -1).permute(2, 0, 1)


class Biased(nn.Module):
    """Layers of attention, each with such a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)
        self.layers = nn.ModuleList(Heads() for _ in range(2))
        self.biases = nn.ModuleList(Distances() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        for layer, bias in zip(self.layers, self.biases, strict=True):
            h = layer(h, bias(ids.shape[1]))
        return self.head(h)


@pytest.mark.parametrize("known", [False, True], ids=["nothing kept", "kept before"])
def test_what_a_layer_keeps_for_the_next_one_does_not_decide_about_cuts(known):
    """Ranks of which one had run such a model before cut it otherwise, and met in other collectives."""
    Distances.places.cache_clear()
    model = build(Biased, 0).module
    if known:
        for length in range(40):
            Distances.places(length)
    found = cuts_of(model, 2, None).found
    assert {name for name in found.parts if name.endswith("table")} == {"biases.0.table", "biases.1.table"}


class Spoken(Gate):
    """Prints a value of a buffer, as the quantized layers of I-BERT do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def __repr__(self) -> str:
        return f"Spoken({self.seen.item():.2f})"


class Speaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.gate, self.head = nn.Embedding(31, 8), Spoken(), nn.Linear(8, 31)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.gate(self.words(ids)))


def test_a_layer_that_prints_values_is_cut():
    assert cuts_of(build(Speaking, 0).module, 2, None).found.kinds["gate.up"] == "column"


class Towers(nn.Module):
    """What text gives is mixed with a picture where there is one: a look at the model with text alone does not see who
    takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.text, self.forth = nn.Embedding(31, 8), Gate(), nn.Linear(8, 16)
        self.picture, self.mix, self.head = nn.Linear(4, 16), nn.Linear(16, 8), nn.Linear(8, 31)

    def forward(self, ids: Tensor, picture: Tensor | None = None) -> Tensor:
        text = self.text(self.words(ids))
        forth = self.forth(text)
        if picture is not None:
            both = torch.cat([self.picture(picture), forth], 1)
            text = text + self.mix(both)[:, picture.shape[1] :]
        return self.head(text)


def with_picture(model: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, int]:
    picture = mb["ids"][:, :4].to(torch.float64).div(31).sin()[:, None].expand(-1, 2, -1)
    logits = model(mb["ids"], picture)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), mb["ids"][:, 1:].flatten(), reduction="sum"), mb["ids"][:, 1:].numel()


def mixed(world, plan: dict) -> tuple[list[float], list[str]]:
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = Engine(
        Towers, with_picture, sgd, Plan(**plan), global_batch=4, microbatch=2, precision="fp64", world=world
    )
    losses = [engine.step(batch).loss for batch in engine.batches(samples(), steps=2)]
    rows = rows_of(str(engine.tensor_layers))
    engine.close()
    return losses, rows


def test_what_others_may_take_of_a_model_that_is_tried_in_part_stays_whole():
    """The half of what text gives was put beside the whole of the picture's."""
    alone, _ = simulate_world(1, mixed, {})[0]
    for losses, rows in simulate_world(2, mixed, {"tp": 2}):
        assert losses == pytest.approx(alone, rel=1e-9)
        assert any(row.startswith("text.up column 24 x 8 12 x 8") for row in rows), rows
