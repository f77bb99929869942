"""Stand-ins in a model for the parts that other pipeline stages have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from shoal.errors import UserError


class Unseen(Tensor):
    """Stands in for a parameter or a buffer of a part when the model, or the loss, looks at it from outside.

    It has the shape, the dtype and the device, and refuses to be computed with.
    """

    known_as: str
    kind: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(name: str, parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Unseen:
        """Makes the stand-in; `dtype` is that of computation, used if the parameter is of a floating dtype."""
        its = dtype if parameter.is_floating_point() else parameter.dtype
        found: Unseen = Tensor._make_wrapper_subclass(
            Unseen, parameter.shape, dtype=its, device=device, requires_grad=parameter.requires_grad
        )
        found.__dict__.update(vars(parameter))  # what the author has noted there
        found.known_as, found.kind = name, "parameter" if isinstance(parameter, nn.Parameter) else "buffer"
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        names = [f"the {each.kind} {each.known_as}" for each in args if isinstance(each, Unseen)]
        raise UserError(
            f"the loss, or the model between its parts, computes with {', '.join(names)}, which with "
            "plan.pp > 1 is used inside its part alone (its shape, dtype and device may be read anywhere): compute "
            "with it in that module's forward, leave weight decay to the optimizer, or take plan.pp = 1"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Unseen({self.known_as}, {tuple(self.shape)}, {self.dtype}, {self.device})"


def whole_model(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields `module.named_modules()` as before the cut into stages: with the original parts in place of stand-ins."""
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


def modules_here(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields `module.named_modules()` with the parts of the stage that runs in place of their stand-ins, and without
    those of other stages."""

    def visit(name: str, each: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
        if isinstance(each, StandIn):
            if not each.__dict__["_here"]:
                return
            each = each.__dict__["_part"]
        if id(each) not in seen:
            seen.add(id(each))
            yield name, each
            for key, child in each.named_children():
                yield from visit(f"{name}.{key}".lstrip("."), child, seen)

    return visit("", module, set())


@contextmanager
def parts_in_place(module: nn.Module) -> Iterator[None]:
    """Has `module` look as before the cut into stages, inside the context; parts of other stages have no values."""
    whole = [each for _, each in whole_model(module)]
    stand_ins = [
        (each, key, child) for each in whole for key, child in each._modules.items() if isinstance(child, StandIn)
    ]
    for parent, key, stand_in in stand_ins:
        parent._modules[key] = stand_in.__dict__["_part"]
    try:
        yield
    finally:
        for parent, key, stand_in in stand_ins:
            parent._modules[key] = stand_in


def forget_parts(module: nn.Module) -> None:
    """Lets go of the weights of the parts that other stages have, but in modules that a part here has too: shape and
    dtype alone are kept."""
    known: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    here = {id(each): each for each in module.modules()}
    for stand_in in (each for each in here.values() if isinstance(each, StandIn)):
        for part in stand_in.__dict__["_part"].modules():
            for name, weight in part._parameters.items() if id(part) not in here else ():
                if weight is None or weight.is_meta:
                    continue
                if id(weight) not in known:
                    empty = torch.empty_like(weight, device="meta")
                    known[id(weight)] = weight, nn.Parameter(empty, requires_grad=weight.requires_grad)
                    known[id(weight)][1].__dict__.update(vars(weight))
                part._parameters[name] = known[id(weight)][1]


_LEFT = "_left_by_another_stage"


def leave(module: nn.Module, name: str, value: Tensor) -> None:
    """Sets an attribute of a module that another stage has to what that has left there: it can be computed with."""
    module.__dict__[name] = value
    module.__dict__.setdefault(_LEFT, set()).add(name)


def _outside(name: str, *_: Any, **__: Any) -> None:
    raise UserError(
        f"{name} is called from outside of its part, which another stage has: call it in the forward of the module "
        "that has it, give both to one stage (plan.stages), or take plan.pp = 1"
    )


class StandIn(nn.Module):
    """A module whose call returns the result of `answer`.

    Attributes are those of `part`, also where they are set, but it does not have its parameters, buffers and modules.
    While the model runs, `show` sets what `model.parameters()` yields for a parameter of the part, and so for what is
    read of a part that is not `here`, in the stage that runs: its own tensors there are without values, or are not
    trained.
    """

    def __init__(self, part: nn.Module, answer: Callable[..., Any], name: str = "") -> None:
        super().__init__()
        self.__dict__.update(_part=part, _answer=answer, _name=name, _shown=None, _here=True)

    def show(self, shown: Callable[[str, Tensor], Tensor] | None, here: bool = True) -> None:
        self.__dict__.update(_shown=shown, _here=here)

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        if self.__dict__["_shown"] is None:
            yield from super().named_modules(memo, prefix, remove_duplicate)
            return
        for name, each in self.__dict__["_part"].named_modules(prefix=prefix):
            yield name, self._shadow(name, each)

    def _shadow(self, name: str, each: nn.Module) -> nn.Module:
        """What the model sees of a module in the part: of its class, with its attributes, and with what is shown for
        its parameters."""
        shadow: nn.Module = object.__new__(type(each))
        shadow.__dict__.update(vars(each), _parameters={}, _buffers={}, _modules={})
        for key, value in each._parameters.items():
            shadow._parameters[key] = value if value is None else self.__dict__["_shown"](f"{name}.{key}", value)
        return shadow

    def train(self, mode: bool = True) -> Self:
        self.__dict__["_part"].train(mode)
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_answer"](*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        held = any(name in table for table in (self._parameters, self._buffers, self._modules))  # see `hold`
        own = held or name in self.__dict__ or name.startswith("__")  # of any module, such as `training`
        super().__setattr__(name, value) if own else setattr(self.__dict__["_part"], name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["_part"], name)
        return self._seen(name, found)

    def _seen(self, name: str, found: Any) -> Any:
        """What the model sees of `found`, which the part has under this name."""
        shown, known_as = self.__dict__["_shown"], f"{self.__dict__['_name']}.{name}"
        if shown is None or self.__dict__["_here"]:
            return found
        if isinstance(found, Tensor):
            return found if name in self.__dict__["_part"].__dict__.get(_LEFT, ()) else shown(known_as, found)
        if isinstance(found, nn.Module):
            kind = _Several if hasattr(found, "__getitem__") else StandIn
            inside = kind(found, partial(_outside, known_as), known_as)
            inside.show(shown, here=False)
            return inside
        return found

    def hold(self, name: str, parameter: nn.Parameter) -> None:
        """Keeps one parameter of the part, under its name in it, since it is tied to one that this rank has.

        It bypasses registration, which refuses the names of attributes.
        """
        *path, attribute = name.split(".")
        owner: nn.Module = self
        for step in path:
            if step not in owner._modules:
                owner._modules[step] = nn.Module()
            owner = owner.get_submodule(step)
        owner._parameters[attribute] = parameter


class _Several(StandIn):
    """A stand-in for a list or dict of modules inside a part."""

    def __len__(self) -> int:
        return len(self.__dict__["_part"])

    def __getitem__(self, key: Any) -> Any:
        return self._seen(str(key), self.__dict__["_part"][key])
