"""What ranks say to each other comes back as it was, and nothing that is read can run code."""

from __future__ import annotations

import math
import os
import pickle
import random
import re
from collections import Counter, OrderedDict, UserDict, namedtuple
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.comm import wire
from shoal.errors import BudgetExceeded, CheckpointError, LaunchError, UserError
from shoal.parallel.layout import Box, Layout, Part
from shoal.pipeline.routes import Given, Shape, Stage, Value
from tests.pool import run_ranks

Point = namedtuple("Point", "x y")

VALUES = [
    None, True, 3, 2**70, -1.5, math.inf, "text \udc80", b"\x00\xff",
    [], (), {}, [1, (2, [3])], {1: "a", (2, 3): None}, {1, 2}, frozenset({"a"}),
    torch.bfloat16, torch.device("cuda:1"), torch.Size((2, 3)),
    Path("runs/a"), Point(1, (2, 3)), OrderedDict(b=1, a=(2,)),
    Layout((4, 4), (Part(Box((0,), (4,)), Box((2,), (4,))),), reduce=("dp", "cp")),
    Stage(
        {(0, 1): Given((Shape((2,), torch.float16), {"rest": 3}))},
        frozenset({Value(0, 1, 2)}), frozenset(), frozenset(), [None], True,
    ),
]  # fmt: skip


@pytest.mark.fast
def test_no_two_kinds_that_travel_have_one_name():
    """A process may import both."""
    sources = [each.read_text() for each in Path(wire.__file__).parents[1].rglob("*.py")]
    names = Counter(re.findall(r"^@sent\n(?:@.*\n)*class (\w+)", "\n".join(sources), re.MULTILINE))
    assert len(names) > 10 and [name for name, times in names.items() if times > 1] == []


@pytest.mark.fast
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_as_they_were(value):
    back = wire.unpack(wire.pack(value))
    assert back == value and type(back) is type(value)


@pytest.mark.fast
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn]
)
def test_tensors_and_arrays_come_back_bit_by_bit(dtype):
    several = torch.arange(6).to(dtype).view(2, 3).t(), torch.ones(()).to(dtype), torch.empty(0, 3, dtype=dtype)
    for tensor in (*several, torch.ones(()).to(dtype).expand(1, 1)):  # of stride 0
        back = wire.unpack(wire.pack({"a": [tensor]}))["a"][0]
        assert back.dtype == dtype and back.shape == tensor.shape
        bits = [torch.stack([each]).view(-1).view(torch.uint8).tolist() for each in (back, tensor)]
        assert bits[0] == bits[1]
    for array in (np.arange(4, dtype=">i2"), np.array(["ab", "c"]), np.float64(2.5)):
        back = wire.unpack(wire.pack(array))
        assert np.array_equal(back, array) and back.dtype == array.dtype and type(back) is type(array)


@pytest.mark.fast
def test_other_mappings_arrive_as_dicts():
    """Such as the samples that a tokenizer of transformers makes."""
    assert wire.unpack(wire.pack([UserDict(a=1), Counter("aab")])) == [{"a": 1}, {"a": 2, "b": 1}]


@pytest.mark.fast
def test_errors_come_back_with_their_kind_their_message_and_what_they_hold():
    for error in (UserError("a"), CheckpointError("b"), BudgetExceeded(7, 5, "plan.memory")):
        error.add_note("a note")
        back = wire.unpack(wire.pack(error))
        assert type(back) is type(error) and str(back) == str(error) and vars(back) == vars(error)
    other = wire.unpack(wire.pack(KeyError("x")))
    assert type(other) is RuntimeError and str(other) == "KeyError: 'x'"


class Unknown:
    pass


@pytest.mark.fast
@pytest.mark.parametrize(
    "value",
    [Unknown(), len, np.array([object()]), torch.eye(2).to_sparse()],
    ids=["an object", "a function", "an array of objects", "a sparse tensor"],
)
def test_what_cannot_travel_is_refused_by_its_type_and_place(value):
    with pytest.raises(UserError, match=r"(Unknown|builtin_function|ndarray|sparse).*at \['a'\]\[1\].*cannot be sent"):
        wire.pack({"a": [0, value]})


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.fast
def test_a_pickle_is_no_message(tmp_path):
    with pytest.raises(LaunchError, match="cannot be read"):
        wire.unpack(pickle.dumps(Trap(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()


@pytest.mark.fast
@pytest.mark.parametrize(
    "said",
    [
        '{"namedtuple": ["os", "system", ["true"]]}', '{"Popen": ["true"]}', '{"array": ["O", [1]]}',
        '{"tensor": ["float32", [1000000000000]]}', '{"tensor": ["float32", [-1, -4]]}', '{"dtype": "save"}',
        '{"error": ["SystemExit", "", {"dict": []}]}', "[" * 100_000,
        '{"node": ["[1, {\\"type\\": \\"collections.defaultdict\\", \\"context\\": \\"{}\\", '
        '\\"children_spec\\": []}]", []]}',
        '{"dict": [[[], 1]]}',
        '{"Box": [1]}', "1" * 5000,
    ],
    ids=lambda said: said[:20],
)  # fmt: skip
def test_a_message_cannot_name_what_it_likes(said):
    with pytest.raises(LaunchError, match="cannot be read"):
        wire.unpack(len(said).to_bytes(8, "big") + said.encode() + b"1234")


@pytest.mark.fast
def test_damaged_messages_are_errors_of_ours():
    whole, draw = wire.pack([*VALUES, torch.arange(9.0)]), random.Random(0)
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        with suppress(LaunchError):
            wire.unpack(damaged[: draw.choice([len(whole), draw.randrange(len(whole))])])


def refused_on_all(world) -> list[str]:
    said, everyone = [], world.everyone
    values = (Unknown(), torch.empty(1, device="meta"))
    for ask in (
        lambda value: everyone.broadcast_object(value, src=1),
        lambda value: everyone.all_gather_object(value if world.rank else 1),
    ):
        for value in values:
            try:
                ask(value)
            except (UserError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return [*said, everyone.broadcast_object("goes on", src=1)]


def test_all_ranks_refuse_what_one_of_them_cannot_send():
    for said in run_ranks(refused_on_all, 2):
        assert len(said) == 5 and said[4] == "goes on"
        assert all("UserError" in each and "Unknown cannot be sent to other ranks" in each for each in said[:4:2])
        assert all("meta tensor" in each for each in said[1:4:2])
