"""Models by name, from the `[model]` table of a job file: {"name": "gpt", "preset": "5m", "vocab_size": 257}."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn

from shoal.errors import ArgumentError, UserError, did_you_mean, fits, in_section
from shoal.models.bert import Bert, BertConfig, MaskedTokens
from shoal.models.checks import one_of
from shoal.models.chess import chess_evaluator
from shoal.models.gpt import GPT, GPTConfig
from shoal.models.losses import LOSSES, OF_TEXT, Loss, find_loss
from shoal.models.lstm import LSTM, LSTMConfig
from shoal.models.mlp import MLP
from shoal.models.presets import PRESETS, flops_per_token
from shoal.models.resnet import ResNet, ResNetConfig


@dataclass(frozen=True)
class ModelSpec:
    """A model that is ready to be built.

    factory: builds it, also on the meta device.
    loss: the loss that it is trained with.
    values: all its settings with defaults, for the record.
    vocab_size, sequence: None where it reads no tokens, or rows of any length.
    flops_per_token: returns the FLOPs of a token, given the length of a row; None where no formula is known.
    prepare_data: turns the job's dataset into the model's.
    tells_documents: returns whether it takes `document_ids`, or `position_ids` that begin again, to keep the documents
        of a row apart.
    """

    name: str
    factory: Callable[[], nn.Module]
    loss: Loss
    values: dict[str, Any]
    vocab_size: int | None = None
    sequence: int | None = None
    flops_per_token: Callable[[int], float] | None = None
    prepare_data: Callable[[Any], Any] = lambda dataset: dataset
    tells_documents: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class MLPConfig:
    """The settings of an `MLP` in a job file; `task` tells the loss."""

    sizes: list[int]
    activation: str = "relu"
    dropout: float = 0.0
    task: Literal["classification", "regression"] = "classification"

    def __post_init__(self) -> None:
        one_of("MLP", "task", self.task, ("classification", "regression"))


def build(spec: Mapping[str, Any]) -> ModelSpec:
    """Returns the model of a `[model]` table.

    spec: `name`, the settings of that model, and optionally `loss`, which replaces the model's own. Settings by name:
        gpt: `preset` and/or the fields of `GPTConfig`; hf: `config` and any field of it, `weights` and `lora`; bert,
        lstm, resnet: the fields of their configuration; mlp: `sizes`, `activation`, `dropout`, `task`; chess: none.

    Raises `UserError` for an unknown name, preset or setting, and for a missing or invalid setting.
    """
    settings = dict(spec)
    name, loss = settings.pop("name", None), settings.pop("loss", None)
    if not isinstance(name, str) or name not in BUILDERS:
        hint = did_you_mean(str(name), list(BUILDERS))
        raise UserError(
            f"model.name = {name!r} is not a model of Shoal ({', '.join(BUILDERS)}).{hint}{of_transformers(str(name))}"
        )
    with in_section("model"):
        model = BUILDERS[name](settings)
        return model if loss is None else replace(model, loss=_given_loss(loss, model))


def _given_loss(name: str, model: ModelSpec) -> Loss:
    """Returns the loss of that name in place of the model's own. Raises UserError for one that reads other data."""
    found = find_loss(name)
    if (found in OF_TEXT) != (model.loss in OF_TEXT):
        others = [each for each, loss in LOSSES.items() if (loss in OF_TEXT) == (model.loss in OF_TEXT)]
        data = "text" if model.loss in OF_TEXT else "arrays or images"
        raise ArgumentError(
            "loss", f" = {name!r} is not for model {model.name!r}, which reads {data}: {' or '.join(others)}."
        )
    return found


def _gpt(settings: dict[str, Any]) -> ModelSpec:
    preset = settings.pop("preset", None)
    if not isinstance(preset, str | None):
        raise UserError(f"model.preset = {preset!r} of gpt must be one text ({', '.join(PRESETS)}).")
    if preset is not None and preset not in PRESETS:
        raise UserError(
            f"model.preset = {preset!r} is no preset of gpt "
            f"({', '.join(PRESETS)}).{did_you_mean(str(preset), list(PRESETS))}"
        )
    cfg = _config(GPTConfig, "gpt", settings, PRESETS[preset] if preset else None)
    return ModelSpec(
        "gpt",
        partial(GPT, cfg),
        find_loss("causal_lm"),
        asdict(cfg),
        cfg.vocab_size,
        cfg.sequence,
        partial(flops_per_token, cfg),
    )


def _hf(settings: dict[str, Any]) -> ModelSpec:
    from shoal.models import hf, pretrained
    from shoal.models.hf_config import config_of

    weights, lora = settings.pop("weights", None), settings.pop("lora", None)
    if not isinstance(weights, str | None):
        raise UserError(
            f'model.weights = {weights!r} of hf must be a directory, or "{pretrained.RANDOM}" for random weights.'
        )
    directory = None if weights == pretrained.RANDOM else weights
    source = settings.pop("config", directory)
    if source is None:
        raise UserError(
            "model 'hf' needs `config`: a JSON file, a directory with config.json, or a table with model_type."
        )
    if not isinstance(source, str | Path | Mapping):
        raise UserError(
            f"model.config = {source!r:.100} of hf must be a JSON file, a directory with config.json, or a table with "
            "model_type."
        )
    if not isinstance(lora, Mapping | None):
        raise UserError(
            f"model.lora = {lora!r} of hf must be a table of fields of peft's LoraConfig, such as {{r = 8}}."
        )
    if lora is not None:
        pretrained.check_lora(lora)
    pretrained.check_said(source, weights)
    config = config_of(source, **settings)
    text = config.get_text_config()
    return ModelSpec(
        "hf",
        pretrained.with_weights(config, directory, lora),
        find_loss("causal_lm"),
        config.to_dict() | {"weights": weights} | ({} if lora is None else {"lora": dict(lora)}),
        text.vocab_size,
        getattr(text, "max_position_embeddings", None),
        hf.flops_per_token(config),
        tells_documents=partial(hf.takes_positions, config),
    )


def _bert(settings: dict[str, Any]) -> ModelSpec:
    cfg = _config(BertConfig, "bert", settings)
    masked = partial(MaskedTokens, vocab_size=cfg.vocab_size, mask_id=cfg.vocab_size - 1)
    return ModelSpec(
        "bert",
        partial(Bert, cfg),
        find_loss("masked_lm"),
        asdict(cfg),
        cfg.vocab_size,
        cfg.sequence,
        prepare_data=masked,
    )


def _lstm(settings: dict[str, Any]) -> ModelSpec:
    cfg = _config(LSTMConfig, "lstm", settings)
    loss = find_loss("causal_lm")
    return ModelSpec("lstm", partial(LSTM, cfg), loss, asdict(cfg), cfg.vocab_size, tells_documents=lambda: False)


def _resnet(settings: dict[str, Any]) -> ModelSpec:
    cfg = _config(ResNetConfig, "resnet", settings)
    return ModelSpec("resnet", partial(ResNet, cfg), find_loss("classification"), asdict(cfg))


def _mlp(settings: dict[str, Any]) -> ModelSpec:
    cfg = _config(MLPConfig, "mlp", settings)
    factory = partial(MLP, cfg.sizes, cfg.activation, cfg.dropout)
    with torch.device("meta"):
        factory()  # a wrong size or activation is an error of the job file, not of the first step
    return ModelSpec("mlp", factory, find_loss(cfg.task), asdict(cfg))


def _chess(settings: dict[str, Any]) -> ModelSpec:
    if settings:
        raise UserError(f"model 'chess' has no settings; remove {', '.join(settings)}.")
    return ModelSpec("chess", chess_evaluator, find_loss("regression"), {})


def of_transformers(name: str) -> str:
    """Returns a hint how a job file names the model of `transformers` that `name` seems to mean, such as
    "meta-llama/Llama-3-8B"; empty for none."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        return " Those of transformers have name = \"hf\" and need it installed: pip install 'shoal[hf]'."
    bare = _letters(name.rsplit("/", 1)[-1])
    kinds = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if bare.startswith(_letters(kind))]
    if not kinds:
        return ""
    kind = max(kinds, key=len)
    return (
        f' One of transformers is written name = "hf", config = {{model_type = "{kind}"}}, with more of its '
        "configuration in that table, or config = the path of its config.json."
    )


def _letters(name: str) -> str:
    return "".join(each for each in name.lower() if each.isalnum())


BUILDERS: dict[str, Callable[[dict[str, Any]], ModelSpec]] = {
    "gpt": _gpt,
    "hf": _hf,
    "bert": _bert,
    "lstm": _lstm,
    "resnet": _resnet,
    "mlp": _mlp,
    "chess": _chess,
}


def _config(kind: type, name: str, settings: Mapping[str, Any], base: Any = None, table: str = "model") -> Any:
    """Returns a `kind` from the settings of `table`, over `base` where there is one; checks names and types first."""
    hints, settings = get_type_hints(kind), dict(settings)
    for key, value in settings.items():
        if key not in hints:
            known = ["preset", *hints] if kind is GPTConfig else list(hints)
            raise UserError(f"{table}.{key} is not a setting of {name} ({', '.join(known)}).{did_you_mean(key, known)}")
        inner = next((each for each in get_args(hints[key]) if is_dataclass(each)), None)
        if inner is not None and isinstance(value, Mapping):
            before = getattr(base, key, None)
            value = settings[key] = _config(inner, name, value, before, f"{table}.{key}")  # type: ignore[arg-type]
        if not fits(value, hints[key]):
            raise UserError(
                f"{table}.{key} = {value!r} of {name} must be {_spoken(hints[key])}, not {type(value).__name__}."
            )
    if base is not None:
        with in_section(table):
            return replace(base, **settings)
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in settings]
    if missing:
        preset = " or a `preset`" if kind is GPTConfig else ""
        inside = table.removeprefix("model").removeprefix(".")
        missing = [f"{inside}.{each}" if inside else each for each in missing]
        raise UserError(f"model {name!r} needs {', '.join(missing)}{preset}.")
    with in_section(table):
        return kind(**settings)


def _spoken(hint: Any) -> str:
    """Describes a type for a message: `int | None` is "an integer"."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_spoken(member) for member in get_args(hint) if member is not NoneType)
    if get_origin(hint) is list:
        return "a list of integers"
    if is_dataclass(hint):
        return "a table"
    return {int: "an integer", float: "a number", bool: "true or false"}.get(hint, "a text")
