"""Trained weights of `transformers` models, from safetensors files on this machine, and adapters of `peft` on top of
them.

Reading a tensor is one operation of the recorded build (see `shoal.module.record`). So each rank reads, one at a time,
the tensors of which it has a part, and what transformers and peft do to them (renaming, stacking of experts, tying) is
replayed for each tensor alone.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.errors import ArgumentError, UserError, did_you_mean
from shoal.models import hf
from shoal.models.adapted import check_adapters
from shoal.models.hf_config import config_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RANDOM = "none"
"""The value of `weights` for a model that starts from random ones."""

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NO_FLOATS = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "C64": torch.complex64,
}
"""Dtypes by their names in safetensors."""
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


def from_pretrained(
    directory: str | Path,
    config: str | Path | Mapping[str, Any] | None = None,
    lora: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Callable[[], nn.Module]:
    """Returns a factory of the model in `directory`, with its trained weights, in fp32.

    directory: has `model.safetensors`, or its parts and their index, and `config.json` unless `config` is given.
    config, overrides: as in `from_config`.
    lora: fields of `peft.LoraConfig`; then only its adapters are trained.

    Raises UserError for missing or broken files. The factory raises UserError for tensors that are missing or have
    another shape, and warns of tensors that the model does not have.
    """
    if lora is not None:
        check_lora(lora)
    return with_weights(config_of(directory if config is None else config, **overrides), directory, lora)


def with_weights(
    config: PretrainedConfig, directory: str | Path | None, lora: Mapping[str, Any] | None = None
) -> Callable[[], nn.Module]:
    """Returns a factory of the model of `config`, with the weights in `directory` (None: random) and LoRA adapters."""
    if directory is not None:
        build: Callable[[], nn.Module] = partial(_load, config, str(directory), _files(Path(directory)))
    else:
        build = partial(hf.build_model, config)
    if lora is None:
        return build
    return partial(_adapted, build, dict(lora), None if directory is None else str(directory))


def check_said(config: Any, weights: str | None) -> None:
    """Raises UserError where there are weights beside `config` and `weights` does not say whether to use them."""
    if weights is not None or not isinstance(config, str | Path):
        return
    directory = Path(config) if Path(config).is_dir() else Path(config).parent
    found = next(
        (path.name for pattern in ("*.safetensors", *_PICKLES) for path in sorted(directory.glob(pattern))), None
    )
    if found is not None:
        raise UserError(
            f"model.config = {str(config)!r} lies beside weights ({found}), and nothing says whether to start from "
            f'them: give weights = "{directory}" to train on from them, or weights = "{RANDOM}" for random ones'
        )


def _files(directory: Path) -> dict[str, str]:
    """Returns the file of each tensor in `directory`, which may also be one file. Raises UserError for others."""
    if directory.is_file() and directory.suffix == ".safetensors":
        return dict.fromkeys(_header(directory), str(directory))
    index = directory / _INDEX
    if index.is_file():
        try:
            places = {str(name): str(file) for name, file in json.loads(index.read_bytes())["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"the index {index} cannot be read ({error!r}): it must be JSON with a weight_map"
            ) from error
        if gone := sorted({name for name in places.values() if not (directory / name).is_file()}):
            raise UserError(f"{index} names parts that are not there: {', '.join(gone)}. Copy all parts of the model")
        return {tensor: str(directory / name) for tensor, name in places.items()}
    if (directory / _ONE_FILE).is_file():
        return dict.fromkeys(_header(directory / _ONE_FILE), str(directory / _ONE_FILE))
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if directory.suffix in (".bin", ".pt", ".pth", ".ckpt") or pickles:
        raise ArgumentError(
            "weights",
            f" = {str(directory)!r}: {pickles[0] if pickles else directory.name} is a pickle, which can run any code "
            "when it is read, so it is not read. If you trust it, write it anew as safetensors: "
            f"AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(OUT), then weights = OUT",
        )
    raise ArgumentError(
        "weights",
        f" = {str(directory)!r} holds no weights: it must be a directory with {_ONE_FILE}, or with its parts and "
        f'{_INDEX}, or one .safetensors file. Nothing is downloaded. For random weights: weights = "{RANDOM}"',
    )


def _header(file: Path) -> list[str]:
    with _opened(file) as tensors:
        return list(tensors.keys())


@contextmanager
def _opened(file: str | Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise UserError(f"the weights {file} cannot be read ({error}): copy or write the file again") from error


@torch.library.custom_op("shoal::read_tensor", mutates_args=())
def _read_tensor(file: str, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Reads the tensor `name` of a safetensors file as `dtype`. `shape`: its shape, for fake tensors."""
    with _opened(file) as tensors:
        return tensors.get_tensor(name).to(dtype)


@_read_tensor.register_fake
def _(file: str, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _to_read(files: Mapping[str, str]) -> dict[str, Tensor]:
    """Reads all tensors of `files`; floating-point ones in fp32, since precision belongs to the job."""
    found: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no dict)
                piece = tensors.get_slice(name)
                dtype = _NO_FLOATS.get(piece.get_dtype(), torch.float32)
                found[name] = _read_tensor(file, name, piece.get_shape(), dtype)
    return found


def _load(config: PretrainedConfig, directory: str, files: Mapping[str, str]) -> nn.Module:
    """Builds the model of `config` as `hf.build_model` does, with the tensors of `files`, by transformers' rules."""
    with _one_thread(), hf.quiet():
        model, report = hf.load_model(config, _to_read(files))
    lacking = [f"missing {name}" for name in sorted(report["missing_keys"])]
    shapes = sorted(report["mismatched_keys"], key=lambda each: each[0])
    lacking += [f"{name} is {list(there)}, the model's is {list(here)}" for name, there, here in shapes]
    unknown = sorted(report["unexpected_keys"])
    if lacking:
        lacking += [f"the model has no {name}" for name in unknown]
        more = f", and {len(lacking) - 8} more" if len(lacking) > 8 else ""
        raise UserError(
            f"the weights in {directory} do not fit the model of {config.model_type}: {'; '.join(lacking[:8])}{more}. "
            f'Give the config of these weights, or weights = "{RANDOM}"'
        )
    if unknown:
        warnings.warn(
            f"{len(unknown)} tensors in {directory} have no place in the model of {config.model_type} and are left "
            f"out: {', '.join(unknown[:8])}{', ...' if len(unknown) > 8 else ''}",
            stacklevel=2,
        )
    return model.train()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Makes transformers load one tensor after the other in this thread, whose operations are recorded."""
    key = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(key)
    os.environ[key] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


# ---- Adapters ----


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError(f"model.lora needs peft installed ({error}). Run: pip install 'shoal[hf]'") from error
    return peft


def check_lora(settings: Mapping[str, Any]) -> None:
    """Raises UserError for what `peft.LoraConfig` does not take, and for adapters of single parameters."""
    config = _peft().LoraConfig
    known = [
        name
        for name in config.__dataclass_fields__
        if name not in ("peft_type", "task_type", "inference_mode", "runtime_config")
    ]
    for key in settings:
        if key not in known:
            raise UserError(f"model.lora.{key} is no field of peft's LoraConfig.{did_you_mean(key, known)}")
    if settings.get("target_parameters"):
        raise UserError(
            f"model.lora.target_parameters = {settings['target_parameters']!r}: such an adapter sets the parameter "
            "anew in each forward, and weights lie together in chunks here, to which no forward writes. Leave it out, "
            "and give names of linear layers as target_modules"
        )
    try:
        config(**settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"model.lora = {dict(settings)!r} is refused by peft: {error}") from error


def _adapted(build: Callable[[], nn.Module], settings: dict[str, Any], base: str | None) -> nn.Module:
    """Returns the model of `build` with LoRA adapters, which alone are trained.

    base: where its weights come from, recorded for those who load the adapters.
    """
    peft = _peft()
    model: Any = build()
    model.name_or_path = base or ""
    try:
        adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"model.lora = {settings!r} does not go with a {type(model).__name__}: {error}") from error
    try:
        check_adapters(adapted)
    except UserError as error:
        raise UserError(f"model.lora = {settings!r}: {error}") from error
    return adapted


def export_adapter(model: nn.Module, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, for `peft.PeftModel.from_pretrained(base, directory)`.

    weights: as of `model.state_dict()`; only the adapters' weights are written.
    """
    from safetensors.torch import save_file

    peft, adapted = _peft(), model
    for name, config in adapted.peft_config.items():  # type: ignore[union-attr, operator]
        own = peft.get_peft_model_state_dict(adapted, dict(weights), name, save_embedding_layers=False)
        place = directory if name == "default" else directory / name
        place.mkdir(parents=True, exist_ok=True)
        tensors = {
            key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for key, tensor in own.items()
        }
        save_file(tensors, place / "adapter_model.safetensors", metadata={"format": "pt"})
        training, config.inference_mode = config.inference_mode, True
        config.save_pretrained(place)
        config.inference_mode = training
