"""Values of a caller's objects survive being copied, packed and put back; what cannot be is refused."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.checkpoint.values import check_holds, copied, joined, put, split, tensors_beside, value_of
from shoal.comm.wire import unpack
from shoal.errors import UserError

pytestmark = pytest.mark.fast


@dataclass
class Best:
    loss: float = float("inf")
    weights: torch.Tensor = field(default_factory=lambda: torch.zeros(3))


@dataclass(frozen=True)
class Frozen:
    loss: float = 0.0


def through_a_checkpoint(value: Any) -> Any:
    packed, tensors = split(value, "user.it/")
    value = unpack(packed)
    assert {each.title for each in tensors_beside(value)} == set(tensors)
    return joined(value, {title: tensor.clone() for title, tensor in tensors.items()})


def stepped() -> torch.optim.Optimizer:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    return optimizer


VALUES = {
    "numbers": {"none": None, "big": 2**127, "nan": float("nan"), "text": "ö", "pair": (1, [2.5, True])},
    "keys": {0: "zero", (1, "one"): {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}},
    "arrays": {
        "a": np.arange(3, dtype=np.int16),
        "b": np.float32(0.1),
        "bits": np.random.default_rng(1).bit_generator.state,
    },
    "tensors": [
        torch.zeros(0),
        torch.ones((), dtype=torch.bfloat16),
        torch.arange(4).t(),
        torch.ones(2, dtype=torch.cfloat),
    ],
    "others": {"seen": {1, 2}, "raw": b"\x00\xff", "counts": OrderedDict(a=1)},
    "an optimizer": stepped().state_dict(),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b or (a != a and b != b)


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_from_bytes_and_tensors(name):
    assert same(through_a_checkpoint(VALUES[name]), VALUES[name])
    assert same(copied(VALUES[name]), VALUES[name])


def test_a_copy_is_apart_and_is_written_again_where_it_fits():
    value = {"a": torch.zeros(2), "b": [torch.zeros(3), {"n": [1]}], "gone": torch.ones(1)}
    first = copied(value)
    value["a"] += 1
    value["b"][1]["n"].append(2)
    value["b"][0] = torch.ones(4)
    del value["gone"]
    assert first["a"].tolist() == [0, 0] and first["b"][1]["n"] == [1]
    kept = first["a"]
    second = copied(value, first)
    assert second["a"] is kept and same(second, value)


def test_objects_are_changed_in_place():
    inner = torch.zeros(2, requires_grad=True)
    table, rows, best, counts = {"w": inner, "more": {"x": 1}, "old": 0}, [inner, 1], Best(), Counter(a=3)
    nested, weights = table["more"], best.weights
    put(table, {"w": torch.ones(2), "more": {"x": 2, "y": 3}}, "it")
    put(rows, [torch.full((2,), 2.0), 5, 6], "it")
    put(best, {"loss": 0.5, "weights": torch.ones(3)}, "it")
    put(counts, {"b": 2}, "it")
    assert table == {"w": inner, "more": nested} and nested == {"x": 2, "y": 3}
    assert rows == [inner, 5, 6] and inner.tolist() == [2, 2] and inner.requires_grad
    assert best.loss == 0.5 and best.weights is weights and weights.tolist() == [1, 1, 1]
    assert counts == Counter(b=2)
    weight = nn.Parameter(torch.zeros(2))
    put(held := {"w": weight}, through_a_checkpoint({"w": nn.Parameter(torch.ones(2))}), "it")
    assert held["w"] is weight and weight.tolist() == [1, 1]
    put(weight, copied(nn.Parameter(torch.full((2,), 2.0))), "it")
    assert weight.tolist() == [2, 2] and weight.requires_grad
    array = np.zeros(2)
    put(array, np.ones(2), "it")
    assert array.tolist() == [1, 1]
    with pytest.raises(UserError, match=r"it is a Tensor of torch.float32 \(2,\) here, and was .* \(3,\) when it was"):
        put(torch.zeros(2), torch.zeros(3), "it")


def test_a_module_and_an_optimizer_go_by_their_state_dict():
    a, b = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    a(torch.randn(4, 2))
    put(b, through_a_checkpoint(copied(value_of(a))), "it")
    assert same(dict(a.state_dict()), dict(b.state_dict()))
    other = torch.optim.AdamW([torch.zeros(2, 2), torch.zeros(2)], lr=0.3)
    put(other, through_a_checkpoint(value_of(stepped())), "it")
    assert other.param_groups[0]["lr"] == 0.1 and len(other.state) == 2


@pytest.mark.parametrize("thing", [3.0, "text", Best, nn.Linear, Frozen(), object(), (1, 2)])
def test_what_cannot_be_put_back_is_refused(thing):
    with pytest.raises(UserError, match="it got a"):
        check_holds(thing, "it")


@pytest.mark.parametrize("value", [{"x": [object()]}, {"x": [lambda: 1]}, {"x": [Best()]}])
def test_what_cannot_be_saved_is_refused_with_its_place(value):
    with pytest.raises(UserError, match=r"at \['x'\]\[0\].*Turn it into those"):
        split(value, "user.it/")
