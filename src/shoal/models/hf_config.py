"""Configurations of causal language models of `transformers`, from a file or a table, with values replaced by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# What a published config.json says that is not about the architecture. Precision belongs to the job, code is never
# fetched.
NOT_ARCHITECTURE = ("auto_map", "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path")


def config_of(config: str | Path | Mapping[str, Any], **overrides: Any) -> PretrainedConfig:
    """Returns the configuration that `from_config` builds from."""
    return _parse(_read(config), overrides)


def transformers_here() -> Any:
    """Imports `transformers`. Raises UserError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"Models of transformers need it installed ({error}). Run: pip install 'shoal[hf]'") from error
    return transformers


def _read(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"The model configuration {path} cannot be read: {error.strerror}. It must be a JSON file, or a directory "
            "with config.json; nothing is downloaded."
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"The model configuration {path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise UserError(
            f"The model configuration {path} holds a {type(content).__name__}; it must be a JSON object with "
            "model_type."
        )
    return content


def _parse(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> PretrainedConfig:
    transformers = transformers_here()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hint = did_you_mean(str(model_type), list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
        raise UserError(
            f"model_type={model_type!r} is no causal language model of transformers {transformers.__version__} "
            f"(e.g. gpt2, llama, qwen3, mixtral).{hint}"
        )
    if content.get("quantization_config"):
        raise UserError(
            "The model configuration has a quantization_config: weights in a quantised format cannot be trained. "
            "Remove it."
        )
    fields = {key: value for key, value in content.items() if key not in (*NOT_ARCHITECTURE, "model_type")}
    with _refused(model_type):
        known = transformers.AutoConfig.for_model(model_type)
    for key in overrides:
        if not hasattr(known, key):
            hint = did_you_mean(key, list(known.to_dict()))
            raise UserError(f"{key} is no field of the configuration of a {model_type} of transformers.{hint}")
    fields = _overridden(known, fields, overrides)
    # A smaller vocabulary than the published one leaves the published ids of special tokens outside of it.
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = fields.get(token, getattr(known, token, None))
        ids = fields.get("vocab_size")
        if isinstance(value, int) and isinstance(ids, int) and value >= ids:
            fields[token] = None
    with _refused(model_type):
        config = transformers.AutoConfig.for_model(model_type, **fields)
        config.get_text_config()  # which some have several of
    return config


@contextmanager
def _refused(model_type: str) -> Iterator[None]:
    """Turns what a configuration raises, each of which checks itself in its own way, into a UserError."""
    try:
        yield
    except Exception as error:
        raise UserError(f"The configuration of the {model_type} is refused by transformers: {error}") from error


def _overridden(known: PretrainedConfig, fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces fields by `overrides`, whichever name each has: a GPT-2 takes `num_hidden_layers` too for what it calls
    `n_layer`, and goes by that where both are given. Of two overrides of one value its own name counts."""
    names = type(known).attribute_map
    ordered = sorted(overrides.items(), key=lambda each: each[0] not in names)
    new = {names.get(key, key): value for key, value in ordered}
    return {key: value for key, value in fields.items() if names.get(key, key) not in new} | new
