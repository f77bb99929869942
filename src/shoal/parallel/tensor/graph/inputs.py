"""Small inputs on which a module runs, found by trying: those that its configuration names (models of `transformers`),
else ids, rows of features and images of the sizes that its layers take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.models.adapted import unadapted
from shoal.parallel.tensor.graph.trace import Trace, trace

BATCH, TOKENS, TRIES = 2, 7, 200
_IMAGES = (32, 64, 224)

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def traced(name: str, module: nn.Module, mode: FakeTensorMode) -> Trace | None:
    """Runs `module`, which is called `name`, on the first inputs that it takes; None where none of those tried fits."""
    for inputs in islice(_candidates(module), TRIES):
        with mode:
            args, kwargs = inputs()
        try:
            return trace(name, module, args, kwargs, mode)
        except Exception:
            continue
    return None


def _candidates(module: nn.Module) -> Iterator[Callable[[], Inputs]]:
    inner = unadapted(module)
    if hasattr(inner, "config") and hasattr(inner, "main_input_name"):
        yield from _of_transformers(inner)
    try:
        parameters = inspect.signature(inner.forward).parameters.values()
    except (TypeError, ValueError):
        return
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = [each for each in parameters if each.kind in positional]
    required = [each for each in wanted if each.default is inspect.Parameter.empty]
    number = len(required) or min(1, len(wanted))
    for choice in product(_tensors(inner), repeat=number):
        yield lambda choice=choice: (tuple(make() for make in choice), {})  # type: ignore[misc]


def _tensors(module: nn.Module) -> list[Callable[[], Tensor]]:
    """Returns makers of single inputs, the likeliest first: by the layer that is made first."""
    made: list[Callable[[], Tensor]] = []
    lengths = [TOKENS, *_lengths(module)]

    def ids(*shape: int) -> Callable[[], Tensor]:
        return lambda: torch.zeros(shape, dtype=torch.long)

    def floats(*shape: int) -> Callable[[], Tensor]:
        return lambda: torch.randn(shape)

    for layer in _first_of_each_kind(module):
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            made += [ids(BATCH, length) for length in lengths]
        elif isinstance(layer, nn.Conv2d):
            made += [floats(BATCH, layer.in_channels, side, side) for side in _sides(module)]
        elif isinstance(layer, nn.Conv1d):
            made += [floats(BATCH, layer.in_channels, length) for length in (32, *lengths)]
        elif isinstance(layer, nn.Linear):
            made += [floats(BATCH, length, layer.in_features) for length in lengths]
            made.append(floats(BATCH, layer.in_features))
        elif isinstance(layer, nn.LayerNorm):
            made += [floats(BATCH, length, *layer.normalized_shape) for length in lengths]
        elif isinstance(layer, nn.MultiheadAttention):
            made += [floats(BATCH, length, layer.embed_dim) for length in lengths]
    return [*made, floats(BATCH), ids(BATCH)]


def _first_of_each_kind(module: nn.Module) -> list[nn.Module]:
    found: dict[Any, nn.Module] = {}
    for each in module.modules():
        size = each.in_features if isinstance(each, nn.Linear) else None
        found.setdefault((type(each), size), each)
    return list(found.values())[:12]


def _lengths(module: nn.Module) -> list[int]:
    """Returns sizes that may be the one length of rows that a module takes: of its own bare parameters."""
    own = [
        tuple(each.shape)
        for owner in module.modules()
        for each in owner._parameters.values()
        if each is not None
        if not isinstance(owner, nn.Linear | nn.Embedding | nn.modules.conv._ConvNd | nn.MultiheadAttention)
    ]
    return sorted({length for shape in own if len(shape) > 1 for length in shape[:-1] if 1 < length <= 4096})[:4]


def _sides(module: nn.Module) -> list[int]:
    """Returns sides of images, those that the module was made for first."""
    size = getattr(module, "image_size", None) or getattr(module, "img_size", None)
    patches = getattr(getattr(module, "patch_embed", None), "img_size", None)
    known = [each if isinstance(each, int) else each[0] for each in (size, patches) if isinstance(each, int | tuple)]
    return [*known, *(each for each in _IMAGES if each not in known)]


def _of_transformers(model: Any) -> Iterator[Callable[[], Inputs]]:
    """Yields inputs by the names that models of `transformers` give them."""
    accepted = inspect.signature(model.forward).parameters
    known = {name: make for name, make in _named(model).items() if name in accepted}
    main = [name for name in (model.main_input_name, "pixel_values", "input_features") if name in known]
    names = dict.fromkeys([*main[:1], *(each for each in ("input_ids", "pixel_values") if each in known)])
    decoder = ["decoder_input_ids"] if "decoder_input_ids" in known else []
    flags = {name: value for name, value in (("use_cache", False), ("return_dict", True)) if name in accepted}
    for chosen in ([*names, *decoder], [*main[:1], *decoder], [*main[:1]]):
        if chosen:
            yield lambda chosen=chosen: ((), {name: known[name]() for name in chosen} | flags)  # type: ignore[misc]


def _named(model: Any) -> dict[str, Callable[[], Tensor]]:
    config = model.config
    vision = getattr(config, "vision_config", None) or config

    def of(name: str, default: int) -> int:
        value = getattr(vision, name, None) or default
        return int(value if isinstance(value, int) else value[0])

    def ids() -> Tensor:
        return torch.zeros(BATCH, TOKENS, dtype=torch.long)

    frames = 2 * int(getattr(config, "max_source_positions", None) or 32)
    mels = int(getattr(config, "num_mel_bins", None) or 80)
    side = of("image_size", 64)
    return {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "pixel_values": lambda: torch.randn(BATCH, of("num_channels", 3), side, side),
        "input_features": lambda: torch.randn(BATCH, mels, frames),
        "input_values": lambda: torch.randn(BATCH, 4000),
    }
