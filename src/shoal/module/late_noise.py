"""Blocks whose second forward may not end once it has saved what backward asks for. RReLU saves its noise for backward
before its kernel fills it, which would leave memory that nothing has written; and torch.jit makes another error of that
by which torch ends a forward."""

from __future__ import annotations

import inspect
from functools import cache
from types import CodeType

from torch import nn

from shoal.module.scripted import is_scripted

_CALLED = {"rrelu", "rrelu_"}


def runs_to_its_end(module: nn.Module) -> bool:
    """Whether `module` has a part of torch.jit, or one whose forward calls RReLU's function, as nn.RReLU's does."""
    if any(map(is_scripted, module.modules())):
        return True
    codes = (getattr(inspect.unwrap(type(each).forward), "__code__", None) for each in module.modules())
    return any(code is not None and _names(code) for code in codes)


@cache
def _names(code: CodeType) -> bool:
    """Whether code, or that of a function inside of it, names one of those functions."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return not _CALLED.isdisjoint(code.co_names) or any(map(_names, inner))
