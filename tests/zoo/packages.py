"""torchvision and timm for the tests of models, kept out of the environment of Shoal.

torchvision from the package index is built for CUDA: next to a CPU build of torch its operators do not load, and then
importing it raises, also where `transformers` imports it for its own image models. So both packages lie in a folder of
their own (`make .venv/zoo`), which only these tests put on the path, after declaring the two operators whose absence
raises.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

FOLDER = Path(__file__).resolve().parents[2] / ".venv" / "zoo"
_MISSING = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@cache
def _operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "DEF")  # its definitions end with it: the cache keeps it
    for schema in _MISSING:
        library.define(schema)
    return library


def load(name: str) -> ModuleType:
    """Imports the module `name` of torchvision or timm."""
    if not FOLDER.is_dir():
        raise ModuleNotFoundError(f"{FOLDER} is missing: run make test once, which sets it up")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    if "torchvision" not in sys.modules:
        _operators()
    return import_module(name)
