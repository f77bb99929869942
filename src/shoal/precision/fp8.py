"""`precision = "fp8"`: bf16, with the matrix products of linear layers in fp8 where the device has them, by torchao."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from shoal.device import hardware_name
from shoal.errors import UserError
from shoal.precision.formats import FORMATS, multiplies

MULTIPLE = 16
"""The kernels need both sides of a weight to be multiples of this."""


def products_in_fp8(module: nn.Module, device: torch.device) -> None:
    """Swaps the linear layers of `module` whose sides are multiples of MULTIPLE for torchao's Float8Linear, scaled by
    tensor, dynamically. Parameters keep their names and objects.

    Raises UserError where the device has no fp8 or torchao is not installed.
    """
    eight = next(each for each in FORMATS if each.name == "fp8 e4m3")
    if not multiplies(eight, device):
        found = hardware_name(device) or "the CPU"
        raise UserError(
            'precision = "fp8" needs a GPU with fp8 matrix products (compute capability 8.9); '
            f'this is {found}. Take "bf16"'
        )
    if importlib.util.find_spec("torchao") is None:
        raise UserError('precision = "fp8" needs torchao: pip install torchao')
    from torchao.float8 import convert_to_float8_training

    def fits(child: nn.Module, _: str) -> bool:
        return isinstance(child, nn.Linear) and child.in_features % MULTIPLE == child.out_features % MULTIPLE == 0

    convert_to_float8_training(module, module_filter_fn=fits)
