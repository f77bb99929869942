"""Trained weights of transformers, under every plan the same as `from_pretrained` and a plain loop; adapters of
peft."""

from __future__ import annotations

import json
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shoal.comm import World
from shoal.comm.simulation import simulate_world
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.models import build as model_of
from shoal.models import causal_lm, from_config, from_pretrained
from shoal.module.build import build
from shoal.plan import Plan
from tests.models.test_hf import CONFIGS
from tests.pool import disposable_ranks, run_ranks

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
STEPS = 3


def rows() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 61, (4, 9), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]


def publish(config: dict, directory: Path, **options) -> nn.Module:
    """A model with weights unlike fresh ones, written to `directory`."""
    torch.manual_seed(5)
    model = from_config(config)()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.to(options.pop("dtype", torch.float32)).save_pretrained(directory, **options)
    return model


def plain(model: nn.Module) -> list[float]:
    """Losses of a loop of torch alone."""
    optimizer = ADAMW([each for each in model.parameters() if each.requires_grad])
    batch = {key: torch.stack([row[key] for row in rows()]) for key in ("input_ids", "labels")}
    losses = []
    for _ in range(STEPS):
        total, count, *more = causal_lm(model, batch)
        losses.append(float(total / count))
        (total / count + sum(more[0].values() if more else ())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(world, directory: str, plan: dict, lora: dict | None, out: str) -> list[float]:
    model = from_pretrained(directory, lora=lora)
    engine = Engine(model, causal_lm, ADAMW, Plan(**plan), global_batch=4, microbatch=4 // world.size, world=world)
    assert engine.build_note == "recorded", engine.build_note
    losses = [float(engine.step(batch).loss) for batch in engine.batches(rows(), steps=STEPS)]
    if out:
        engine.export(out)
    engine.close()
    return losses


PLANS = {
    "dp": {"dp": 2},
    "zero 3": {"dp": 2, "zero": 3},
    "offload": {"dp": 2, "zero": 3, "memory": {"device": "128KiB"}},
    "tp": {"dp": 1, "tp": 2},
    "pp": {"dp": 1, "pp": 2},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[str, list[float]]:
    """A tied model in bf16, in several files, and the losses of plain training from it."""
    directory = tmp_path_factory.mktemp("llama")
    publish(CONFIGS["llama tied"], directory, dtype=torch.bfloat16, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return str(directory), plain(transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_training_goes_on_from_the_weights_as_in_plain_torch(plan, llama):
    directory, losses = llama
    for mine in run_ranks(trained, 2, directory, plan, None, ""):
        assert mine == pytest.approx(losses, rel=2e-5)


def test_experts_that_a_file_has_one_by_one_are_stacked(tmp_path):
    publish(CONFIGS["mixtral"], tmp_path)
    names = (tmp_path / "model.safetensors").read_bytes()[:20_000].decode(errors="ignore")
    assert "experts.3." in names, "the file has each expert apart"
    losses = plain(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_router_logits=True))
    assert trained(World.single("cpu"), str(tmp_path), {}, None, "") == pytest.approx(losses, rel=2e-5)


def test_a_rank_never_holds_the_whole_model(tmp_path):
    """24 layers of 1.5 MB in bf16, 3 MB in fp32: 75 MB."""
    wide = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    model = publish({**CONFIGS["llama"], **wide}, tmp_path, dtype=torch.bfloat16)
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    with disposable_ranks(_peak, 1, str(tmp_path)) as (rank,):
        assert rank.result() < whole / 4


def _peak(world, directory: str) -> int:
    """By how many bytes this process grows while it computes each tensor once."""
    built = build(from_pretrained(directory), 0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from now
    before = _high_water()
    for name, tensor in built.module.named_parameters():
        built.value(name, tensor)
    return _high_water() - before


def _high_water() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


# Adapters


@pytest.mark.parametrize("plan", [PLANS["zero 3"], PLANS["pp"], PLANS["tp"]], ids=["zero 3", "pp", "tp"])
def test_adapters_alone_are_trained_and_published(plan, llama, tmp_path):
    directory, before = llama
    losses, again = run_ranks(trained, 2, directory, plan, LORA, str(tmp_path))
    assert losses == again and losses[0] == pytest.approx(before[0], rel=2e-5), "adapters start at zero"
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path, is_trainable=True, dtype=torch.float32)
    assert all(("lora" in name) == parameter.requires_grad for name, parameter in loaded.named_parameters())
    assert any(float(p.abs().max()) for n, p in loaded.named_parameters() if "lora_B" in n)
    assert plain(loaded)[0] < losses[-1]


@pytest.mark.parametrize("plan", [PLANS["pp"], PLANS["tp"]], ids=["pp", "tp"])
def test_layers_that_are_trained_beside_adapters_are_published(plan, tmp_path):
    """The head, and adapters, which other stages than the first have."""
    publish(CONFIGS["llama"], tmp_path / "base")
    lora = {**LORA, "modules_to_save": ["lm_head"]}
    run_ranks(trained, 2, str(tmp_path / "base"), plan, lora, str(tmp_path / "cut"))
    trained(World.single("cpu"), str(tmp_path / "base"), {}, lora, str(tmp_path / "whole"))
    cut, whole = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("cut", "whole"))
    assert cut.keys() == whole.keys() and any("lm_head" in name for name in whole)
    torch.testing.assert_close(cut, whole, rtol=1e-2, atol=1e-3)


def test_adapters_train_as_in_plain_torch(llama, tmp_path):
    """From the same first adapters: those that an engine has published untrained."""
    directory, _ = llama
    engine = Engine(from_pretrained(directory, lora=LORA), causal_lm, ADAMW, global_batch=4, world=World.single("cpu"))
    engine.export(tmp_path)
    losses = [float(engine.step(batch).loss) for batch in engine.batches(rows(), steps=STEPS)]
    engine.close()
    base = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert losses == pytest.approx(plain(peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True)), rel=2e-5)


def test_a_ready_model_of_peft_passes(llama):
    directory, _ = llama
    ready = peft.get_peft_model(from_pretrained(directory)(), peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    engine = Engine(ready, causal_lm, ADAMW, global_batch=4, world=World.single("cpu"))
    losses = [float(engine.step(batch).loss) for batch in engine.batches(rows(), steps=STEPS)]
    frozen = {name for name, parameter in engine.parameters.items() if not parameter.requires_grad}
    engine.close()
    assert losses[-1] < losses[0] and all("lora" not in name for name in frozen)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 8}, "model.lora.rank is no field"),
        ({"target_module": "x"}, 'Did you mean "target_modules"'),
        (3, "must be a table"),
        ({"target_parameters": ["experts.down_proj"]}, "sets the parameter anew in each forward.*target_modules"),
    ],
)
def test_wrong_adapters_are_explained(lora, message, llama):
    with pytest.raises(UserError, match=message):
        model_of({"name": "hf", "config": llama[0], "weights": "none", "lora": lora})


MIXTRAL = {"model_type": "mixtral", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24,
           "num_hidden_layers": 2, "num_attention_heads": 2, "num_local_experts": 4}  # fmt: skip


def test_adapters_that_peft_makes_of_stacked_experts_are_refused_with_what_goes(tmp_path):
    """Under ep it was a shape of torch that did not match, on one rank a weight that backward found changed."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    table = {"name": "hf", "config": str(tmp_path), "weights": "none"}
    layers = ["q_proj", "k_proj", "v_proj", "o_proj"]
    said = f"layers.0.mlp.gate and 5 more: an adapter of a single parameter.*Give target_modules = {layers}"
    with pytest.raises(UserError, match=f"model.lora = .*all-linear.*{re.escape(str(layers))}") as refusal:
        build(model_of({**table, "lora": {"target_modules": "all-linear"}}).factory, 0)
    assert re.search(said.replace("[", r"\[").replace("]", r"\]"), str(refusal.value))
    build(model_of({**table, "lora": {"target_modules": layers}}).factory, 0)

    def own() -> nn.Module:
        return peft.get_peft_model(from_config(MIXTRAL)(), peft.LoraConfig(target_parameters=["experts.down_proj"]))

    for plan, world in ((Plan(), 1), (Plan(dp=2, ep=2), 2)):
        with pytest.raises(UserError, match=r"experts and 1 more: an adapter of a single parameter.*that are linear"):
            simulate_world(world, partial(engine_of, own, plan))


def engine_of(factory, plan, world):
    Engine(factory, causal_lm, ADAMW, plan, world=world, global_batch=4).close()


def test_adapters_for_layers_that_there_are_not(llama):
    with pytest.raises(UserError, match="does not go with a LlamaForCausalLM"):
        build(from_pretrained(llama[0], lora={"target_modules": ["c_attn"]}), 0)


# What does not fit


def test_a_job_file_says_where_weights_come_from(llama):
    directory, _ = llama
    with pytest.raises(UserError) as error:
        model_of({"name": "hf", "config": directory})
    assert f'weights = "{directory}"' in str(error.value) and 'weights = "none"' in str(error.value)
    published = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    for weights, same in ((directory, True), ("none", False)):
        built = build(model_of({"name": "hf", "config": directory, "weights": weights}).factory, 0)
        head = built.value("model.embed_tokens.weight", built.module.model.embed_tokens.weight)
        assert torch.equal(head, published["model.embed_tokens.weight"]) == same
    assert model_of({"name": "hf", "weights": directory}).vocab_size == 61
    with pytest.raises(UserError, match="must be a directory"):
        model_of({"name": "hf", "config": directory, "weights": 3})


def test_tensors_that_do_not_fit_are_named(tmp_path):
    publish(CONFIGS["llama"], tmp_path)
    with pytest.raises(UserError, match=r"lm_head.weight is \[61, 32\], the model's is \[61, 16\]"):
        build(from_pretrained(tmp_path, hidden_size=16, head_dim=8), 0)
    with pytest.raises(UserError, match=r"missing model.layers.2.*and \d+ more"):
        build(from_pretrained(tmp_path, num_hidden_layers=4), 0)
    with pytest.warns(UserWarning, match=r"9 tensors .* have no place .* model.layers.1"):
        build(from_pretrained(tmp_path, num_hidden_layers=1), 0)


def test_weights_that_cannot_be_read_are_explained(tmp_path):
    config = CONFIGS["llama"]
    with pytest.raises(UserError, match=r"holds no weights.*Nothing is downloaded"):
        from_pretrained(tmp_path, config)
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(UserError, match=r"pytorch_model.bin is a pickle.*save_pretrained\(OUT\)"):
        from_pretrained(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="lies beside weights"):
        model_of({"name": "hf", "config": str(tmp_path / "config.json")})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(UserError, match=r"not there: model-1\.safetensors"):
        from_pretrained(tmp_path, config)
    for broken in ("{", "[]", '{"weight_map": [1]}', '{"weight_map": 5}'):
        index.write_text(broken)
        with pytest.raises(UserError, match="must be JSON with a weight_map"):
            from_pretrained(tmp_path, config)
    index.unlink()
    (tmp_path / "model.safetensors").write_bytes(b"anything")
    with pytest.raises(UserError, match="cannot be read"):
        from_pretrained(tmp_path, config)


def test_the_factory_can_be_called_without_an_engine(llama):
    directory, losses = llama
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = from_pretrained(directory)()
    assert model.training and not model.config.use_cache
    assert plain(model) == pytest.approx(losses, rel=1e-6)


def test_adapters_do_not_hide_what_the_model_takes(llama):
    """Positions that start again tell packed documents apart; peft's forward does not name them."""
    model = from_pretrained(llama[0], lora=LORA)().eval()
    ids = torch.randint(0, 61, (1, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}
    total, _ = causal_lm(model, batch)
    assert float(total) == pytest.approx(float(causal_lm(model.get_base_model(), batch)[0]))
    assert float(total) != pytest.approx(
        float(causal_lm(model, {**batch, "position_ids": torch.arange(8)[None]})[0]), rel=1e-4
    )


@pytest.mark.parametrize("plan", [PLANS["tp"], {"dp": 1, "cp": 2}], ids=["tp", "cp"])
def test_adapters_that_ranks_share_train_as_in_data_parallel(plan, llama):
    losses = [run_ranks(trained, 2, llama[0], each, LORA, "")[0] for each in (PLANS["dp"], plan)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-5)
