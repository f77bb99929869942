"""Exports weights: in Hugging Face layout where the model has one, else as safetensors with the model's own names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from shoal.errors import CheckpointError, ShoalError, UserError
from shoal.models.adapted import unadapted
from shoal.models.gpt import GPT
from shoal.models.hf import export_hf
from shoal.models.hf_map import unmapped
from shoal.models.pretrained import export_adapter

_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_ALL = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "model.json",
    "generation_config.json",
    *_ADAPTERS,
)


def export_whole(model: nn.Module, weights: Mapping[str, Tensor], directory: Path) -> ShoalError | None:
    """Calls `export_model` on a temporary directory, and moves its files to `directory` once all of them are written.

    What an earlier export has left there is removed, where a loader would read it in place of the new files or on top
    of them: other parts, their index, adapters. An export of adapters leaves a model alone, which may be theirs.

    Returns the error, if any, so that all ranks can raise it.
    """
    directory = directory.resolve()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{directory.name}.", dir=directory.parent) as fresh:
            export_model(model, weights, Path(fresh))
            directory.mkdir(parents=True, exist_ok=True)
            _replace(Path(fresh), directory, _ALL if unadapted(model) is model else _ADAPTERS)
    except ShoalError as error:
        return error
    except Exception as error:  # safetensors has an error of its own for a full disk
        return CheckpointError(
            f"the weights were not exported to {directory}: {error}; free space there, or export elsewhere"
        )
    return None


def _replace(fresh: Path, directory: Path, superseded: Sequence[str]) -> None:
    """Moves what is in `fresh` to `directory`, and removes what else matches `superseded` there."""
    new = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    for path in (each for pattern in superseded for each in directory.glob(pattern)):
        if path.relative_to(directory) not in new:
            path.unlink()
    for name in sorted(new):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (fresh / name).replace(directory / name)


def export_model(model: nn.Module, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Writes `weights` (parameters and buffers by the names of `model.state_dict()`, each tied one once) to
    `directory`.

    For a model of `peft` only the adapters are written, for `PeftModel.from_pretrained`. A model of `transformers`, or
    a GPT with an equivalent there, is written for `from_pretrained` of its class. Any other model is written as
    `model.safetensors`, with its class and the reason in `model.json`.

    Raises UserError for numbers of which safetensors has no type.
    """
    _check_types(weights)
    directory.mkdir(parents=True, exist_ok=True)
    if unadapted(model) is not model:
        export_adapter(model, weights, directory)
        return
    if _is_of_transformers(model) or (isinstance(model, GPT) and unmapped(model.cfg) is None):
        export_hf(model, weights, directory)
        return
    from safetensors.torch import save_file  # the engine runs where only torch is installed

    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    why = unmapped(model.cfg) if isinstance(model, GPT) else None
    about = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "not in Hugging Face layout": why or "no such layout for this class",
    }
    (directory / "model.json").write_text(json.dumps(about, indent=2) + "\n")


def _check_types(weights: Mapping[str, Tensor]) -> None:
    for name, each in weights.items():
        if each.is_complex() and each.dtype != torch.complex64:
            raise UserError(
                f"{name} is {str(each.dtype).removeprefix('torch.')}, of which safetensors has no type: keep it as "
                "pairs of real numbers (torch.view_as_real(x), and torch.view_as_complex(self.x) in the forward) or as "
                "complex64; a buffer that the model makes by itself need not be written (persistent=False)"
            )


def _is_of_transformers(model: nn.Module) -> bool:
    """Returns whether it is one of `transformers`, which need not be installed; others have `save_pretrained` too."""
    bases = type(model).__mro__
    return any(each.__name__ == "PreTrainedModel" and each.__module__.startswith("transformers.") for each in bases)
