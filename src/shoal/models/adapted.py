"""Models of `peft`, which wrap a model of `transformers` with adapters."""

from __future__ import annotations

from typing import Any


def unadapted(model: Any) -> Any:
    """Returns the model inside a model of `peft`, whose forward names its inputs; any other model unchanged."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
