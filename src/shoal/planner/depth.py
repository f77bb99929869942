"""A deep model's recording from that of a shallow one: the middle blocks of most models are alike, so one of them is
run for all.

The shallow model differs from the deep one by its number of blocks alone. `alike_blocks` proves that on modules on the
meta device: outside the blocks nothing differs, and every block that the deep model has more equals the shallow one's
third. `deepened` then repeats the events of that block, after it has compared them with those of the block before.
Where either finds a difference the answer is None, and the deep model itself has to be run. What the model does with
the number of its blocks outside of them (a sum of all their losses) shows in neither: whoever asks for models of many
depths compares one of them with its own recording first (`equal`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.module.blank import on_meta
from shoal.planner.recording import Recording
from shoal.planner.repeats import REPEATED, SHALLOW, Shift, more_events, more_parameters
from shoal.precision import Precision

HOLDERS = {dict, OrderedDict, set}  # of a module's parameters, buffers and hooks: most are empty


@dataclass(frozen=True)
class Blocks:
    """The repeated part of a model: its name, the number of blocks, and of one the elements of its parameters and the
    bytes of its buffers. `from_second`: the second block too is like those that follow."""

    name: str
    number: int
    parameters: int
    buffers: int
    from_second: bool


def alike_blocks(
    shallow: Callable[[], nn.Module], deep: Callable[[], nn.Module], precision: Precision
) -> Blocks | None:
    """The blocks of the model of the factory `deep` if they are those of `shallow` with more of the same in the
    middle, else None."""
    small, large = on_meta(shallow), on_meta(deep)
    few, many = _block_list(small), _block_list(large)
    if few is None or many is None or few[0] != many[0] or len(few[1]) != SHALLOW or len(many[1]) <= SHALLOW:
        return None
    name, more, counts = few[0], len(many[1]) - SHALLOW, (len(many[1]), SHALLOW)
    names = _more_names(dict(small.named_parameters()), name, more)
    if [each for each, _ in large.named_parameters()] != list(names):  # tied in other ways
        return None
    outside = _Comparison(counts, (), {id(few[1]), id(many[1])}).alike(large, small)
    if not outside or not all(_same_block(many[1], few[1], place, counts) for place in range(counts[0])):
        return None
    second, block = few[1][REPEATED - 1 : REPEATED + 1]
    from_second = _Comparison((SHALLOW, SHALLOW), (REPEATED, REPEATED - 1), set()).alike(block, second)
    elements = sum(p.numel() for p in block.parameters())
    return Blocks(name, counts[0], elements, _buffer_bytes(block, precision), from_second)


def deepened(shallow: Recording, blocks: Blocks) -> Recording | None:
    """The recording of a model of `blocks` from that of the shallow one, None if the shallow one's middle blocks differ
    in what they do. `sent` and `layers` stay those of the shallow model."""
    more, shifted = blocks.number - SHALLOW, Shift(blocks.name)
    events = more_events(shallow.events, more, shifted)
    parameters = more_parameters(shallow.parameters, more, shifted)
    if events is None or parameters is None:
        return None
    return replace(
        shallow,
        num_parameters=shallow.num_parameters + more * blocks.parameters,
        parameters=parameters,
        buffers=shallow.buffers + more * blocks.buffers,
        events=events,
    )


def _more_names(names: Iterable[str], blocks: str, more: int) -> Iterator[str]:
    """Names in the order of the model."""
    shifted, repeated = Shift(blocks), list[str]()
    for name in names:
        block = shifted.block(name)
        if block == REPEATED:
            repeated.append(name)
            yield name
            continue
        if block == SHALLOW - 1 and repeated:
            yield from (shifted.name(each, by) for by in range(1, more + 1) for each in repeated)
            repeated = []
        yield shifted.name(name, more) if block == SHALLOW - 1 else name


def _block_list(module: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The only outermost ModuleList, by name."""
    lists = [(name, each) for name, each in module.named_modules() if isinstance(each, nn.ModuleList)]
    outermost = [(name, each) for name, each in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    return outermost[0] if len(outermost) == 1 else None


def _buffer_bytes(block: nn.Module, precision: Precision) -> int:
    return sum(
        buffer.numel() * precision.buffer_dtype(buffer, owner, name not in owner._non_persistent_buffers_set).itemsize
        for owner in block.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    )


def _same_block(many: nn.ModuleList, few: nn.ModuleList, place: int, counts: tuple[int, int]) -> bool:
    other = place if place < REPEATED else REPEATED if place < counts[0] - 1 else place - counts[0] + SHALLOW
    return _Comparison(counts, (place, other), set()).alike(many[place], few[other])


class _Comparison:
    """Compares what a deep and a shallow model are made of. `counts`: their numbers of blocks, `places`: of the two
    blocks that are compared; numbers may differ as these do. `passed`: ids of what is compared elsewhere."""

    def __init__(self, counts: tuple[int, int], places: tuple[int, ...], passed: set[int]) -> None:
        self._differ = [counts, *([places] if places else [])]
        self._passed, self._seen = passed, set[tuple[int, int]]()

    def alike(self, deep: Any, shallow: Any) -> bool:
        """Whether they have the same types, shapes, dtypes and settings."""
        if deep is shallow or (type(deep) is type(shallow) and type(deep) in HOLDERS and not deep and not shallow):
            return True  # most of what a module has
        pair = (id(deep), id(shallow))
        if pair in self._seen or (id(deep) in self._passed and id(shallow) in self._passed):
            return True
        if type(deep) is not type(shallow):
            return False
        if isinstance(deep, Tensor):
            return (deep.shape, deep.dtype, deep.requires_grad) == (shallow.shape, shallow.dtype, shallow.requires_grad)
        if isinstance(deep, bool | str | bytes | float | complex | torch.dtype | torch.device):
            return bool(deep == shallow)
        if isinstance(deep, int):
            return deep == shallow or (deep, shallow) in self._differ
        self._seen.add(pair)
        if isinstance(deep, Mapping):
            both = zip(deep.values(), shallow.values(), strict=True)
            return deep.keys() == shallow.keys() and all(one is other or self.alike(one, other) for one, other in both)
        if isinstance(deep, list | tuple):
            return self._sequences(deep, shallow)
        if isinstance(deep, partial):
            return self.alike((deep.func, deep.args, deep.keywords), (shallow.func, shallow.args, shallow.keywords))
        if (hasattr(deep, "__dict__") and not callable(deep)) or isinstance(deep, nn.Module):
            return self.alike(vars(deep), vars(shallow))
        return getattr(deep, "__qualname__", deep) == getattr(shallow, "__qualname__", shallow)

    def _sequences(self, deep: Sequence[Any], shallow: Sequence[Any]) -> bool:
        if len(deep) == len(shallow):
            return all(map(self.alike, deep, shallow))
        return (len(deep), len(shallow)) in self._differ and all(
            self.alike(each, shallow[0]) for each in (*deep, *shallow)
        )
