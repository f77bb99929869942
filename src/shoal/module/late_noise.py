"""RReLU saves its noise for backward before its kernel fills it: a second forward that ends once it has saved what
backward asks for would leave memory that nothing has written."""

from __future__ import annotations

import inspect
from functools import cache
from types import CodeType

from torch import nn

_CALLED = {"rrelu", "rrelu_"}


def fills_late(module: nn.Module) -> bool:
    """Whether `module` has a part whose forward calls it, as nn.RReLU's does."""
    codes = (getattr(inspect.unwrap(type(each).forward), "__code__", None) for each in module.modules())
    return any(code is not None and _names(code) for code in codes)


@cache
def _names(code: CodeType) -> bool:
    """Whether code, or that of a function inside of it, names one of those functions."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return not _CALLED.isdisjoint(code.co_names) or any(map(_names, inner))
