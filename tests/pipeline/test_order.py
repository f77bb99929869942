"""The order in which a module calls its children, read from its source."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from shoal.pipeline import units_of
from shoal.pipeline.order import children_as_called


@pytest.fixture
def threads_that_take_turns() -> Iterator[None]:
    """Another thread goes on wherever Python collects garbage, which it does all the time."""

    def turn(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    interval, often = sys.getswitchinterval(), gc.get_threshold()
    gc.callbacks.append(turn)
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    yield
    gc.callbacks.remove(turn)
    gc.set_threshold(*often)
    sys.setswitchinterval(interval)


def test_ranks_that_are_threads_read_a_model_at_once(threads_that_take_turns):
    layer = nn.TransformerEncoderLayer(8, 2)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: [children_as_called(layer) for _ in range(10)], range(4)))
    assert [name for name, _ in found[0][0]][:2] == ["self_attn", "norm1"]
    assert all(each == found[0][0] for one in found for each in one)


class SideBySide(nn.Module):
    """Lists of layers of which a loop uses one item of each in turn; the second list is used first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))


class Zipped(SideBySide):
    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = layer(norm(x))
        return self.head(self.layers[2](x))


class Unpacked(SideBySide):
    def forward(self, x: Tensor) -> Tensor:
        for _, both in enumerate(zip(self.norms, self.layers, strict=False)):
            norm, layer = both
            x = layer(norm(x))
        return self.head(self.layers[2](x))


class Numbered(SideBySide):
    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            if place < len(self.norms):
                x = self.norms[place](x)
            x = layer(x)
        return self.head(x)


class Apart(SideBySide):
    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("model", [Zipped, Unpacked, Numbered])
def test_lists_that_a_loop_goes_through_side_by_side_take_turns(model: type[nn.Module]) -> None:
    found = [unit.name for unit in units_of(model())]
    assert found == ["norms.0", "layers.0", "norms.1", "layers.1", "layers.2", "head"]


def test_lists_of_two_loops_come_one_after_the_other() -> None:
    found = [unit.name for unit in units_of(Apart())]
    assert found == ["norms.0", "norms.1", "layers.0", "layers.1", "layers.2", "head"]


class Reversed(SideBySide):
    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        for norm in self.norms:
            x = norm(x)
        return self.head(x)


class Sliced(Reversed):
    def forward(self, x: Tensor) -> Tensor:
        for _, layer in enumerate(list(self.layers)[::-1]):
            x = layer(x)
        for norm in reversed(list(reversed(self.norms))):
            x = norm(x)
        return self.head(x)


class CountedDown(Reversed):
    def forward(self, x: Tensor) -> Tensor:
        for place in range(len(self.layers) - 1, -1, -1):
            x = self.layers[place](x)
        for place in range(len(self.norms)):
            x = self.norms[place](x)
        return self.head(x)


class Mirrored(SideBySide):
    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(reversed(self.layers), self.norms, strict=False):
            x = norm(layer(x))
        return self.head(self.layers[0](x))


@pytest.mark.parametrize("model", [Reversed, Sliced, CountedDown])
def test_a_list_that_a_loop_goes_through_backwards_begins_with_its_last_item(model: type[nn.Module]) -> None:
    found = [unit.name for unit in units_of(model())]
    assert found == ["layers.2", "layers.1", "layers.0", "norms.0", "norms.1", "head"]


def test_one_of_two_lists_may_be_turned() -> None:
    found = [unit.name for unit in units_of(Mirrored())]
    assert found == ["layers.2", "norms.0", "layers.1", "norms.1", "layers.0", "head"]


class Prompted(nn.Module):
    """Puts a prompt before its tokens, if it has one, as prompt tuning of peft does: the table of tokens has two names,
    and a model without a prompt comes first in the source."""

    def __init__(self, prompted: bool = True) -> None:
        super().__init__()
        self.base, self.prompted = SideBySide(), prompted
        self.prompt, self.words = nn.Linear(4, 4), self.base.norms[0]

    def forward(self, x: Tensor) -> Tensor:
        if not self.prompted:
            with torch.enable_grad():
                return self.base(x)
        x = self.words(x)
        return self.base(x + self.learned(x))

    def learned(self, x: Tensor) -> Tensor:
        return self.prompt(x)


def test_a_way_that_ends_early_does_not_come_before_what_another_calls_first() -> None:
    found = [unit.name for unit in units_of(Prompted())]
    assert found == [
        "base.norms.0",
        "prompt",
        "base.head",
        "base.layers.0",
        "base.layers.1",
        "base.layers.2",
        "base.norms.1",
    ]


class Early(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.beside = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.last(self.first(x))
        return self.beside(self.first(self.last(x)))


def test_of_two_ways_that_differ_the_first_counts() -> None:
    assert [unit.name for unit in units_of(Early())] == ["first", "last", "beside"]


class Reads(nn.Module):
    """Looks at layers before it runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"en": nn.Linear(4, 4)}) for _ in range(2))
        self.last, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        language = next(iter(self.layers[0].keys()))
        x = self.first(x.to(self.last.weight.dtype))
        for layer in self.layers:
            x = layer[language](x)
        return self.last(x)


def test_what_is_only_read_of_a_layer_is_no_use_of_it() -> None:
    assert [unit.name for unit in units_of(Reads())] == ["first", "layers.0.en", "layers.1.en", "last"]


class Rescales(nn.Module):
    """Looks through its blocks before it looks up what goes into them, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.words = nn.Embedding(4, 4)

    def rescale(self) -> None:
        for block in self.blocks:
            block.weight.data.mul_(2)

    def forward(self, ids: Tensor) -> Tensor:
        if not self.training:
            self.rescale()
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_method_whose_result_nobody_takes_is_not_the_first_use() -> None:
    assert [unit.name for unit in units_of(Rescales())] == ["words", "blocks.0", "blocks.1"]


class OfDicts(nn.Module):
    """Blocks without a forward of their own, whose layers are called in another order than they are made in."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({key: nn.Linear(4, 4) for key in ("attend", "mix", "norm", "odd")}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block["mix"](block["norm"](block["attend"](x)))
        return x


def test_dicts_in_a_list_hold_their_layers_in_the_order_of_the_loop() -> None:
    names = [f"blocks.{at}.{key}" for at in range(2) for key in ("attend", "norm", "mix", "odd")]
    assert [unit.name for unit in units_of(OfDicts())] == names


class Once(nn.Module):
    """Calls beside its blocks in one turn of the loop what comes behind them in the source, and in one that no turn
    is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.never, self.mix, self.words = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(4, 4)


class Enumerated(Once):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place == 1 and self.training:
                x = self.mix(x)
            if place == 7:
                x = self.never(x)
        return x


class Ranged(Once):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for place in range(3):
            x = self.blocks[place](x)
            if place == 1:
                x = self.mix(x)
        return self.never(x)


@pytest.mark.parametrize("model", [Enumerated, Ranged])
def test_what_a_loop_calls_in_one_turn_comes_behind_that_item(model: type[Once]) -> None:
    names = ["words", "blocks.0", "blocks.1", "mix", "blocks.2", "never"]
    assert [unit.name for unit in units_of(model())] == names


class Table(nn.Module):
    """Computes with the weight of a layer that it never calls, beside one that it calls too."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.words, self.head = nn.Embedding(4, 4), nn.Embedding(4, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids) + self.positions.weight) + self.head.weight


def test_a_layer_that_is_never_called_is_no_part() -> None:
    assert [unit.name for unit in units_of(Table())] == ["words", "head"]
