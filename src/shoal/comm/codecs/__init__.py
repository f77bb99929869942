"""Codecs: how a flat tensor is encoded for the wire. One format a file; `codec` makes one from a plan's option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch

from shoal.comm.codecs.cast import Cast
from shoal.comm.codecs.codec import Codec
from shoal.comm.codecs.feedback import ErrorFeedback
from shoal.comm.codecs.minmax import U4, U8
from shoal.comm.codecs.sign import Sign
from shoal.comm.codecs.topk import TopK
from shoal.errors import check_choice, check_names
from shoal.plan import Option, option_name, option_parameters

__all__ = ["U4", "U8", "Cast", "Codec", "ErrorFeedback", "Sign", "TopK", "codec"]

_CASTS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_FORMATS: dict[str, Callable[..., Codec]] = {"u8": U8, "u4": U4, "sign": Sign, "topk": TopK}


def codec(option: Option) -> Codec:
    """Makes the codec of a name or of a table such as {name = "u8", row = 256}.

    Raises UserError for an unknown name or parameter, or a wrong value.
    """
    name, parameters = option_name(option, "exchange.codec"), option_parameters(option)
    check_choice(f'codec "{name}" is not one of', name, [*_CASTS, *_FORMATS])
    known = [] if name in _CASTS else [field.name for field in fields(_FORMATS[name])]  # type: ignore[arg-type]
    check_names(f'codec "{name}" has no parameter', parameters, known, "Parameters")
    return Cast(_CASTS[name]) if name in _CASTS else _FORMATS[name](**parameters)
