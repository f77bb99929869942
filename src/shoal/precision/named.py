"""The meaning of a precision, everywhere the same: the dtypes of the module, of the masters and of the gradients.

Under bf16 and fp16 the module sees low-precision views; the fp32 master lives with the optimizer, and gradients are
accumulated and reduced in fp32. Normalisation kernels accumulate in fp32 inside; BatchNorm keeps fp32 parameters and
statistics. The model's floating inputs are cast down on the way in and its outputs up to fp32 on the way out, so the
loss computes in fp32. Autocast is not used: autograd would save a low-precision copy of every weight outside its chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from shoal.device import allow_tf32
from shoal.errors import ArgumentError, UserError, did_you_mean
from shoal.precision.converted import converted, follows
from shoal.precision.fp8 import products_in_fp8
from shoal.precision.scaling import Scaling


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run.

    - `model`: what the module computes in
    - `master`: what the optimizer updates
    - `grad`: accumulation and reduction of gradients
    - `scaling`: of the loss, for a `model` dtype of small range
    - `tf32`: whether fp32 products may round their factors to tf32 where the device has it
    - `keep`: how masters are kept between steps (see chunks.masters)
    - `fp8`: whether linear layers multiply in fp8
    """

    name: str
    model: torch.dtype
    master: torch.dtype
    grad: torch.dtype
    scaling: Scaling | None = None
    tf32: bool = False
    keep: str = "whole"
    fp8: bool = False

    @property
    def low(self) -> bool:
        """Whether the module sees fewer bits than the optimizer."""
        return self.model != self.master

    def parameter_dtypes(self, module: nn.Module) -> dict[str, torch.dtype]:
        """Returns the dtype that the module sees of each parameter. Integers stay; those of BatchNorm, and of layers
        that their forwards convert to it, keep the master's. Raises UserError where they are converted to another."""
        own = converted(module)
        for dtype in own.values():
            if dtype not in (self.model, self.master):
                fits = f'give the configuration router_dtype = "{str(self.master).removeprefix("torch.")}"'
                remedy = 'take precision = "fp32"' if self.master == torch.float64 else fits
                raise UserError(
                    f"the model's routers compute in {dtype} (config.router_dtype), and precision = "
                    f'"{self.name}" has no weights of it: {remedy}'
                )
        return {
            f"{prefix}.{name}".lstrip("."): self._parameter_dtype(parameter.dtype, owner, own.get(owner))
            for prefix, owner in module.named_modules()
            for name, parameter in owner.named_parameters(recurse=False)
        }

    def _parameter_dtype(self, built: torch.dtype, owner: nn.Module, asked: torch.dtype | None) -> torch.dtype:
        if not built.is_floating_point:
            return built
        return self.master if isinstance(owner, _BatchNorm) or asked == self.master else self.model

    def is_uniform(self, module: nn.Module) -> bool:
        """Whether all parameters of `module` that are trained are to be seen in the dtype `model`."""
        dtypes = self.parameter_dtypes(module)
        return all(dtypes[name] == self.model for name, each in module.named_parameters() if each.requires_grad)

    def buffer_dtype(self, buffer: Tensor, owner: nn.Module, persistent: bool) -> torch.dtype:
        """Returns the dtype of a buffer. Floating ones follow the parameters, except that running statistics and
        derived, non-persistent tables (rotary frequencies) keep the master's under low precision, unless the
        model is written for ones that follow.
        """
        if not buffer.is_floating_point():
            return buffer.dtype
        kept = isinstance(owner, _BatchNorm) or not (persistent or follows(owner))
        return self.master if kept else self.model


PRECISIONS = {
    "fp32": Precision("fp32", torch.float32, torch.float32, torch.float32),
    "tf32": Precision("tf32", torch.float32, torch.float32, torch.float32, tf32=True),
    "fp64": Precision("fp64", torch.float64, torch.float64, torch.float64),
    "bf16": Precision("bf16", torch.bfloat16, torch.float32, torch.float32),
    "fp8": Precision("fp8", torch.bfloat16, torch.float32, torch.float32, fp8=True),
    "fp16": Precision("fp16", torch.float16, torch.float32, torch.float32, Scaling()),
}
KEEPS = ("whole", "split", "kahan", "stochastic")


def precision(option: str | Mapping[str, Any]) -> Precision:
    """Returns the precision of a name, or of a table {name = ..., parameter = ...}.

    Parameters are those of `Scaling` for fp16, and `master` (one of KEEPS) for bf16. Raises UserError that names what
    is wrong and the closest name or parameter.
    """
    name = option if isinstance(option, str) else option.get("name")
    parameters = {} if isinstance(option, str) else {key: value for key, value in option.items() if key != "name"}
    if name is None:
        raise ArgumentError("precision", f" = {option!r:.100} has no name: give it one of {', '.join(PRECISIONS)}")
    if not isinstance(name, str) or name not in PRECISIONS:
        raise ArgumentError(
            "precision",
            f' = "{name}" is not one of {", ".join(PRECISIONS)}.{did_you_mean(str(name), list(PRECISIONS))}',
        )
    chosen = PRECISIONS[name]
    known = [field.name for field in fields(Scaling)] if chosen.scaling else ["master"] if name == "bf16" else []
    for key in parameters:
        if key not in known:
            raise ArgumentError(
                "precision",
                f' = "{name}" has no parameter "{key}".{did_you_mean(key, known)} It has: {", ".join(known) or "none"}',
            )
    if chosen.scaling is not None:
        return replace(chosen, scaling=Scaling(**parameters))
    keep = parameters.get("master", "whole")
    if keep not in KEEPS:
        raise ArgumentError(
            "precision",
            f' = "{name}": master = {keep!r} is not one of {", ".join(KEEPS)}.{did_you_mean(str(keep), list(KEEPS))}',
        )
    return replace(chosen, keep=keep)


def set_products(module: nn.Module, chosen: Precision, device: torch.device) -> None:
    """Sets which matrix products the device may use. tf32 is a switch of the process, which "fp32" leaves alone."""
    if chosen.fp8:
        products_in_fp8(module, device)
    if chosen.tf32:
        allow_tf32(device)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Casts each floating tensor in `tree`, and whatever stands in for one, to `dtype`."""
    return tree_map(lambda leaf: leaf.to(dtype) if is_floating(leaf) else leaf, tree)


def is_floating(leaf: Any) -> bool:
    """Whether `leaf` is a floating tensor, or stands in for one."""
    asked = getattr(leaf, "is_floating_point", None)
    return callable(asked) and bool(asked())
