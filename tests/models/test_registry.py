import re
import tomllib

import pytest
import torch

from shoal.errors import UserError
from shoal.models import GPT, LOSSES, build, count_parameters

pytestmark = pytest.mark.fast


def test_gpt_from_a_preset_and_settings():
    model = build({"name": "gpt", "preset": "5m", "vocab_size": 300, "sequence": 128})
    assert (model.vocab_size, model.sequence, model.name) == (300, 128, "gpt")
    assert model.values["d_model"] == 256
    assert model.loss is LOSSES["causal_lm"]
    with torch.device("meta"):
        gpt = model.factory()
    assert isinstance(gpt, GPT)
    assert count_parameters(gpt.cfg) == sum(parameter.numel() for parameter in gpt.parameters())
    assert model.flops_per_token(128) > 6 * 4.7e6


@pytest.mark.parametrize(
    ("table", "loss", "inputs", "shape"),
    [
        (
            {"name": "gpt", "vocab_size": 9, "sequence": 8, "layers": 1, "d_model": 8, "heads": 2},
            "causal_lm",
            (2, 8),
            (2, 8, 9),
        ),
        (
            {"name": "bert", "vocab_size": 9, "sequence": 8, "layers": 1, "d_model": 8, "heads": 2},
            "masked_lm",
            (2, 8),
            (2, 8, 9),
        ),
        ({"name": "lstm", "vocab_size": 9, "hidden": 8}, "causal_lm", (2, 8), (2, 8, 9)),
        ({"name": "resnet", "depth": 20, "classes": 4}, "classification", (2, 3, 8, 8), (2, 4)),
        ({"name": "mlp", "sizes": [6, 5, 4], "dropout": 0}, "classification", (2, 6), (2, 4)),
        ({"name": "mlp", "sizes": [6, 4], "task": "regression"}, "regression", (2, 6), (2, 4)),
        ({"name": "mlp", "sizes": [6, 4], "loss": "regression"}, "regression", (2, 6), (2, 4)),
        ({"name": "chess"}, "regression", (2, 773), (2, 1)),
    ],
)
def test_each_model_is_built_with_its_loss(table, loss, inputs, shape):
    before = dict(table)
    model = build(table)
    assert table == before
    assert model.loss is LOSSES[loss]
    with torch.device("meta"):
        tokens = torch.zeros(inputs, dtype=torch.long if loss.endswith("lm") else torch.float)
        assert model.factory()(tokens).shape == shape


def test_hf_with_a_setting_of_its_own():
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    model = build({"name": "hf", "config": config, "vocab_size": 99, "max_position_embeddings": 64})
    assert (model.vocab_size, model.sequence) == (99, 64)
    assert model.factory().lm_head.weight.shape == (99, 32)


def test_bert_reads_masked_rows():
    model = build({"name": "bert", "vocab_size": 9, "sequence": 8, "layers": 1, "d_model": 8, "heads": 2})
    rows = model.prepare_data([{"input_ids": torch.zeros(1000, dtype=torch.long)}])
    assert (rows[0]["input_ids"] == 8).any()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "model.name = None"),
        ({"name": "gtp"}, 'Did you mean "gpt"?'),
        ({"name": "gpt", "preset": "33mm"}, 'Did you mean "33m"?'),
        ({"name": "gpt", "preset": ["5m"]}, "must be one text"),
        ({"name": "gpt", "presett": "5m"}, 'Did you mean "preset"?'),
        ({"name": "gpt", "preset": "5m", "vocabsize": 9}, 'Did you mean "vocab_size"?'),
        ({"name": "gpt", "preset": "5m", "heads": "4"}, "model.heads = '4' of gpt must be an integer, not str"),
        ({"name": "gpt", "preset": "5m", "tied": 1}, "must be true or false, not int"),
        ({"name": "gpt", "preset": "5m", "kv_heads": True}, "must be an integer, not bool"),
        ({"name": "gpt", "preset": "5m", "dropout": "much"}, "must be a number"),
        ({"name": "gpt", "preset": "5m", "heads": 7}, "model.heads = 7 of GPT does not divide"),
        ({"name": "gpt", "vocab_size": 9, "heads": 2}, "needs sequence, layers, d_model or a `preset`"),
        (
            {"name": "gpt", "vocab_size": 9, "sequence": 8, "layers": 0, "d_model": 8, "heads": 2},
            "model.layers = 0 of GPT",
        ),
        (
            {"name": "lstm", "vocab_size": 9, "tied": True, "hidden": 8},
            "model.tied of LSTM needs embedding = 256 equal",
        ),
        ({"name": "lstm"}, "model 'lstm' needs vocab_size."),
        ({"name": "mlp", "sizes": [4, "5"]}, "must be a list of integers"),
        ({"name": "mlp", "sizes": [4]}, "model.sizes = [4] of MLP must name at least the inputs and the outputs"),
        ({"name": "mlp", "sizes": [4, 2], "activation": "tan"}, "model.activation = 'tan' of MLP is none of"),
        ({"name": "mlp", "sizes": [4, 2], "task": "regresion"}, 'Did you mean "regression"?'),
        ({"name": "chess", "depth": 3}, "no settings; remove depth"),
        ({"name": "mlp", "sizes": [4, 2], "loss": 5}, "model.loss = 5 is not a loss of Shoal"),
        (
            {"name": "mlp", "sizes": [4, 2], "loss": "causal_lm"},
            "model.loss = 'causal_lm' is not for model 'mlp', which reads arrays or images: classification or regr",
        ),
        ({"name": "hf"}, "needs `config`"),
        ({"name": "hf", "config": 5}, "model.config = 5 of hf must be a JSON file"),
        ({"name": "hf", "config": {"model_type": ["llama"]}}, "is no causal language model"),
        ({"name": "chess", "loss": "mse"}, "'mse' is not a loss"),
    ],
)
def test_a_wrong_table_is_explained(table, message):
    with pytest.raises(UserError) as error:
        build(table)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "llama"),
        ("meta-llama/Llama-3.2-1B", "llama"),
        ("gpt-2", "gpt2"),
        ("qwen2-moe", "qwen2_moe"),
        ("Mistral-7B", "mistral"),
    ],
)
def test_a_name_of_transformers_is_told_how_to_be_written(name, kind):
    transformers = pytest.importorskip("transformers")
    with pytest.raises(UserError, match=rf'written name = "hf", config = \{{model_type = "{kind}"\}}') as refused:
        build({"name": name})
    table = tomllib.loads(
        re.search(r'name = "hf".*?(?=, config)', str(refused.value))[0] + f'\nconfig = {{model_type = "{kind}"}}'
    )
    assert isinstance(
        transformers.AutoConfig.for_model(kind), type(build({**table, "num_hidden_layers": 1}).factory.args[0])
    )


def test_a_name_of_nobody_s_gets_no_such_hint():
    with pytest.raises(UserError) as refused:
        build({"name": "my-model"})
    assert "hf," in str(refused.value) and "transformers" not in str(refused.value)
