"""Models of `peft`: one of `transformers` inside, with adapters."""

from __future__ import annotations

from typing import Any


def unadapted(model: Any) -> Any:
    """The model inside one of `peft`, whose forward names what it takes; any other model is itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
