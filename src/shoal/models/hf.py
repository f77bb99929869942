"""Builds causal language models of `transformers` from a configuration, without downloads, and exports them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.models.gpt import GPT, GPTConfig
from shoal.models.hf_config import config_of, transformers_here
from shoal.models.hf_map import to_hf

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def from_config(config: str | Path | Mapping[str, Any], **overrides: Any) -> Callable[[], PreTrainedModel]:
    """Returns a factory of the model that `config` describes, freshly initialised, in fp32.

    config: a JSON file, a directory with a `config.json`, or a dict, with `model_type` ("llama", "gpt2", "qwen3", ...).
    overrides: replace its values, e.g. `vocab_size=257`.

    The factory may run on the meta device. Attention is SDPA where the model has it, the key/value cache is off, and a
    mixture of experts returns its balance loss.

    Raises `UserError` for a missing or broken file, an unknown `model_type`, an override that the model does not have,
    a quantised model, or if `transformers` is not installed.
    """
    return partial(build_model, config_of(config, **overrides))


def flops_per_token(config: PretrainedConfig) -> Callable[[int], float]:
    """Returns a function from the length of a row to the FLOPs of one of its tokens, forward and backward.

    6 N + 12 L W T as in `presets.flops_per_token` (W: the width of all query heads), where N counts the matrices that a
    token passes: the head but not the embedding, and of a mixture of experts those it is routed to. A model without
    attention, such as a mamba, has the first term alone. The model is built on the meta device to count them, when they
    are first asked for.
    """
    text: Any = config.get_text_config()
    count = getattr(text, "num_hidden_layers", 0)  # not of a model that has several stacks of them
    layers = getattr(text, "per_layer_config", [text] * count) if count else []
    attention = 12.0 * sum(map(_width_of_heads, layers))
    weights = cache(partial(_weights_passed, config))
    return lambda sequence: 6.0 * weights() + attention * sequence


def _width_of_heads(layer: Any) -> int:
    """The width of all query heads of a layer; 0 where it has none."""
    heads = getattr(layer, "num_attention_heads", None)
    return heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads) if heads else 0


def _weights_passed(config: PretrainedConfig) -> float:
    """The elements of the matrices that a token passes."""
    with torch.device("meta"):
        model: Any = build_model(config)
    text: Any = config.get_text_config()
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    routed = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None)
    share = routed / experts if experts and routed else 1.0
    matrices = [(name, parameter) for name, parameter in model.named_parameters() if parameter.dim() >= 2]
    weights = sum(parameter.numel() * (share if ".experts." in name else 1.0) for name, parameter in matrices)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding.weight is not head.weight:
        weights -= embedding.weight.numel()
    if text.model_type == "gpt2":
        weights -= text.n_positions * text.n_embd
    return weights


def takes_positions(config: PretrainedConfig) -> bool:
    """Returns whether the model's forward names `position_ids`, by which it tells the documents of a row apart."""
    with _explained(config):
        return "position_ids" in inspect.signature(_for_training(config)[1].forward).parameters


def export_hf(
    model: nn.Module | GPTConfig | PretrainedConfig, state_dict: Mapping[str, Tensor], directory: str | Path
) -> None:
    """Writes config.json, generation_config.json where there is one, and safetensors (in parts of at most 5 GB) for
    `from_pretrained(directory)` of the model's class, for a configuration or a GPT that of `AutoModelForCausalLM`.

    model: gives only the architecture: a module of `transformers`, a `GPT`, or the configuration of one.
    state_dict: the weights at full shape, by the names of the model's own `state_dict()`; a tied weight once or twice.
        They are written in their own dtype; config.json has the widest of the matrices, in which they are read.

    Raises `UserError` for a model without an equivalent in `transformers`, and for names that do not match.
    """
    if isinstance(model, GPT | GPTConfig):
        config_dict, weights = to_hf(model.cfg if isinstance(model, GPT) else model, state_dict)
        config = config_of(config_dict)
    else:
        config, weights = _config_to_publish(model), dict(state_dict)
    matrices = [tensor for tensor in weights.values() if tensor.is_floating_point() and tensor.dim() >= 2]
    dtype = reduce(torch.promote_types, {tensor.dtype for tensor in matrices} or {torch.float32})
    architecture = _architecture(model, config, dtype)
    # The configuration is published as a user of the model wants it; the settings of training go.
    defaults = type(config)()
    for setting in ("use_cache", "output_router_logits"):
        if hasattr(defaults, setting):
            setattr(architecture.config, setting, getattr(defaults, setting))
    with quiet():
        architecture.save_pretrained(directory, state_dict=_own_tensors(architecture, weights), max_shard_size="5GB")


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the bars and reports of `transformers` out of the progress line of a run."""
    from transformers.utils import logging

    was_on, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_on:
            logging.enable_progress_bar()


def build_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Returns the model of `config` as `from_config` describes; `config` stays as it is. Raises UserError for sizes of
    which transformers makes no model."""
    config, _, attention = _for_training(config)
    with _explained(config):
        return transformers_here().AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )


def load_model(config: PretrainedConfig, weights: Mapping[str, Tensor]) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Returns the model of `config` with `weights`, named as published, and transformers' report on mismatches. Raises
    UserError as `build_model` does."""
    config, model_class, attention = _for_training(config)
    with _explained(config):
        return model_class.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=torch.float32,
            attn_implementation=attention,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )


@contextmanager
def _explained(config: PretrainedConfig) -> Iterator[None]:
    """What transformers' modules raise for sizes that make no model, such as no heads, or for a package that they need,
    becomes a UserError."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"{config.model_type} of transformers needs another package: {str(error).strip()}") from error
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"transformers makes no {config.model_type} of this configuration ({type(error).__name__}: {error}): check "
            "its values"
        ) from error
    except RuntimeError as error:
        if "negative dimension" not in str(error):
            raise
        raise UserError(f"transformers makes no {config.model_type} of this configuration: {error}") from error


def _for_training(config: PretrainedConfig) -> tuple[PretrainedConfig, Any, str]:
    """Returns a copy of `config` with the settings of training, the class of its model, and its attention."""
    config = deepcopy(config)
    config.use_cache = False
    if hasattr(config, "output_router_logits") and hasattr(config, "router_aux_loss_coef"):
        config.output_router_logits = True
    model_class = transformers_here().MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return config, model_class, "sdpa" if model_class._supports_sdpa else "eager"


def _architecture(model: Any, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a model without values: of the class of `model` where that is one, since not all are causal ones."""
    with torch.device("meta"):
        if isinstance(model, transformers_here().PreTrainedModel):
            return type(model)(deepcopy(config)).to(dtype)
        return build_model(config, dtype)


def _config_to_publish(model: Any) -> PretrainedConfig:
    transformers = transformers_here()
    config = model.config if isinstance(model, transformers.PreTrainedModel) else model
    if not isinstance(config, transformers.PretrainedConfig):
        raise UserError(
            f"A {type(model).__name__} has no equivalent in transformers, so it cannot be exported for "
            "from_pretrained; models 'gpt' and 'hf' can."
        )
    return config


def _own_tensors(architecture: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drops the second name of a tied weight, checks the names, and gives each tensor a storage of its own.

    Views of one flat storage would look tied to `transformers`, which tells tied weights by storage.
    """
    ties = getattr(architecture.config, "tie_word_embeddings", False)  # which models of images have not
    tied = set(architecture.all_tied_weights_keys) if ties else set()
    expected = set(architecture.state_dict()) - tied
    given = set(weights) - tied
    if expected != given:
        missing, extra = sorted(expected - given)[:3], sorted(given - expected)[:3]
        raise UserError(
            f"The weights do not fit a {type(architecture).__name__}: missing {missing}, unknown {extra} (three of "
            "each at most)."
        )
    own: dict[str, Tensor] = {}
    for name in given:
        tensor = weights[name].detach().cpu().contiguous()
        own[name] = tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
    return own
