"""What stands in a model for a part that another stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def whole_model(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`module.named_modules()` as it was before the pipeline's cut: in place of each stand-in the part that it stands for, with the modules in it."""
    seen: set[int] = set()

    def visit(name: str, each: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if isinstance(each, StandIn):
            each = each.__dict__["_part"]
        if id(each) not in seen:
            seen.add(id(each))
            yield name, each
            for key, child in each.named_children():
                yield from visit(f"{name}.{key}".lstrip("."), child)

    return visit("", module)


class StandIn(nn.Module):
    """Called, it gives what `answer` gives; its attributes are those of `part`, whose parameters, buffers and modules it does not have."""

    def __init__(self, part: nn.Module, answer: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["_part"], self.__dict__["_answer"] = part, answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_answer"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_part"], name)

    def hold(self, name: str, parameter: nn.Parameter) -> None:
        """Keeps one parameter of the part, under its name there: it is tied to one that is here. (Registering refuses names of attributes, which are the part's.)"""
        *path, attribute = name.split(".")
        owner: nn.Module = self
        for step in path:
            if step not in owner._modules:
                owner._modules[step] = nn.Module()
            owner = owner.get_submodule(step)
        owner._parameters[attribute] = parameter
