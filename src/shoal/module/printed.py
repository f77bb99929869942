"""The text by which modules that are alike are told: their classes and settings, which modules print."""

from __future__ import annotations

from torch import nn


def printed(module: nn.Module) -> str:
    """Returns what `module` prints; or, where one inside it prints values of tensors that have none, the classes and
    the plain attributes of all modules in it."""
    try:
        return repr(module)
    except Exception:  # an author's, of whatever kind
        inside = ((name, type(each), vars(each)) for name, each in module.named_modules())
        return repr(
            [
                (name, kind, {key: value for key, value in own.items() if isinstance(value, int | float | str)})
                for name, kind, own in inside
            ]
        )
