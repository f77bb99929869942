"""Batches of map-style datasets, and what stacks."""

import numpy as np
import pytest
import torch

from shoal.data import Cursor, map_batches, stack_samples
from shoal.errors import UserError


class Squares:
    """Item i is {"x": i * i}; counts what is read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, int]:
        self.read.append(index)
        return {"x": index * index}


@pytest.mark.fast
def test_batches_follow_the_cursor_and_load_what_is_asked():
    dataset, cursor = Squares(5), Cursor(5, 2, seed=0)
    batches = map_batches(dataset, cursor, start_step=2)
    for step, batch in zip(range(2, 6), batches, strict=False):
        assert (batch.step, batch.epoch) == (step, step // 3)
        assert batch.ids == tuple(cursor.ids(step).tolist())
        assert dataset.read == []
        assert batch.load(batch.ids[:1])["x"].tolist() == [batch.ids[0] ** 2]
        assert dataset.read == [batch.ids[0]]
        dataset.read.clear()
    assert batch.load([4, 1, 0])["x"].tolist() == [16, 1, 0]  # any rank can load any id


@pytest.mark.fast
def test_own_collate():
    batch = next(
        map_batches(Squares(5), Cursor(5, 2, seed=0), collate=lambda samples: {"n": torch.tensor(len(samples))})
    )
    assert batch.load([0, 1, 2])["n"].item() == 3


@pytest.mark.fast
@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((torch.ones(2), torch.ones(2)), "collate gave a tuple: give a dict of tensors by name"),
        (None, "collate gave a NoneType: give a dict"),
        ({"in": {"x": torch.ones(2)}}, "collate gave a dict for 'in': give tensors, each under a key of its own"),
        ({"x": torch.ones(2), "mask": None}, "collate gave a NoneType for 'mask'"),
    ],
)
def test_what_is_no_dict_of_tensors_is_told(batch, said):
    found = next(map_batches(Squares(5), Cursor(5, 2, seed=0), collate=lambda samples: batch))
    with pytest.raises(UserError, match=said):
        found.load([0, 1])


@pytest.mark.fast
def test_stack_tensors_arrays_and_numbers():
    samples = [{"t": torch.ones(2), "a": np.arange(3), "i": number, "f": 0.5, "b": True} for number in range(2)]
    stacked = stack_samples(samples)
    assert {key: tuple(value.shape) for key, value in stacked.items()} == {
        "t": (2, 2),
        "a": (2, 3),
        "i": (2,),
        "f": (2,),
        "b": (2,),
    }
    assert stacked["i"].tolist() == [0, 1]
    assert (stacked["a"].dtype, stacked["b"].dtype) == (torch.int64, torch.bool)


REFUSED = [
    ([{"x": torch.ones(2)}, {"x": torch.ones(3)}], r"sample\['x'\] has different shapes in one batch: \(2,\), \(3,\)"),
    ([{"x": 1}, {"y": 1}], r"different keys: \['x'\] and \['y'\]"),
    ([{"x": "word"}], r"sample\['x'\] is a str"),
    ([(1, 2)], "a sample is a tuple"),
]


@pytest.mark.fast
@pytest.mark.parametrize(("samples", "says"), REFUSED)
def test_refuses(samples, says):
    with pytest.raises(UserError, match=says):
        stack_samples(samples)
