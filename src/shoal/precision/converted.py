"""What models of transformers and timm keep in a dtype of their own.

The routers of Switch Transformers and NLLB-MoE compute in `config.router_dtype` (fp32: Fedus et al. 2021,
https://arxiv.org/abs/2101.03961, section 2.4), and convert their weights to it in each forward. A weight in a chunk
keeps its form, so it is made in that dtype from the beginning. Tables of places that are added to embeddings (XGLM,
M2M100) are not cast there: wider ones would widen all that comes after. Nor are the tables of the models of timm
(masks of Swin, the zeros that BEiT has for a bias), but rotary ones, which lie in its layers.
"""

from __future__ import annotations

import torch
from torch import nn

CONVERTED = {"SwitchTransformersTop1Router": "classifier", "NllbMoeTop2Router": "classifier"}
"""By the name of a class: its layer, which it converts to its attribute `dtype`."""


def converted(module: nn.Module) -> dict[nn.Module, torch.dtype]:
    """Finds such layers in `module`, and the dtype of each."""
    found: dict[nn.Module, torch.dtype] = {}
    for part in module.modules():
        for base in type(part).__mro__:
            if base.__name__ in CONVERTED:
                found[part.get_submodule(CONVERTED[base.__name__])] = vars(part)["dtype"]
    return found


def follows(owner: nn.Module) -> bool:
    """Whether the tables that `owner` derives are meant to be in the dtype of the weights."""
    added = any(base.__name__.endswith("SinusoidalPositionalEmbedding") for base in type(owner).__mro__)
    return added or type(owner).__module__.startswith("timm.models.")
