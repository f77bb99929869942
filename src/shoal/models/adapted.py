"""Models of `peft`, which wrap a model of `transformers` with adapters."""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.errors import UserError


def unadapted(model: Any) -> Any:
    """Returns the model inside a model of `peft`, whose forward names its inputs; any other model unchanged."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def check_adapters(model: nn.Module) -> None:
    """Raises UserError for adapters of single parameters, as `peft` makes them of stacked experts also where
    `target_modules` ask for layers: "all-linear", or names that these had before they were stacked."""
    if not hasattr(model, "peft_config"):
        return
    wrapped = [name for name, each in model.named_modules() if _of_parameter(each)]
    if wrapped:
        layers = {
            name.rpartition(".")[2]: None
            for name, each in model.named_modules()
            if hasattr(each, "lora_A") and not _of_parameter(each)
        }
        ask = f"target_modules = {list(layers)}" if layers else "target_modules that are linear layers"
        more = f" and {len(wrapped) - 1} more" if len(wrapped) > 1 else ""
        raise UserError(
            f"{wrapped[0]}{more}: an adapter of a single parameter, not of a layer, sets the parameter anew in each "
            f"forward, and weights lie together in chunks here, to which no forward writes. Give {ask}"
        )


def _of_parameter(module: nn.Module) -> bool:
    """Whether `module` is peft's adapter of a parameter of the module inside it."""
    return type(module).__module__.startswith("peft.") and hasattr(module, "parameter_name")
