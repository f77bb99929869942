"""The reducer: chunks go out in order however gradients arrive, and hold the sum of the step's backwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.chunks import Chunk, ChunkSpec, Slot
from shoal.chunks.allocate import Private
from shoal.comm import Lane, World
from shoal.exchange import Algorithm, Holds, Replica
from shoal.exchange.reducer import Reducer
from shoal.optim.groups import ParamGroups
from shoal.optim.optimizer import ChunkOptimizer

pytestmark = pytest.mark.fast
CPU, ONE = torch.device("cpu"), torch.ones(())


class Watching(Algorithm):
    """An algorithm that writes down what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[int, list[float]]] = []

    def reduce(self, chunk: Chunk, own_mean: torch.Tensor) -> None:
        self.given.append((chunk.index, chunk.gradient.tolist()))


def setting(dtype: torch.dtype = torch.float32) -> tuple[Reducer, Watching, dict[str, nn.Parameter], Lane, list[Chunk]]:
    """Three parameters of one number in chunks 0, 1, 2."""
    names = ["a", "b", "c"]
    chunks = [
        Chunk(ChunkSpec(i, (Slot(name, torch.Size([1]), 0),), 1, dtype, torch.float32, torch.float32), Private(CPU))
        for i, name in enumerate(names)
    ]
    parameters = {name: nn.Parameter(chunk.data) for name, chunk in zip(names, chunks, strict=True)}
    optimizer = ChunkOptimizer(torch.optim.SGD, chunks, parameters, ParamGroups([{}], dict.fromkeys(names, 0)))
    world, watching, lane = World.single(CPU), Watching(), Lane(CPU)
    watching.attach(
        Replica(chunks, world.everyone, lane, optimizer, lambda name, places: world.group(name, list(places)))
    )
    return Reducer(parameters, watching), watching, parameters, lane, chunks


def test_chunks_go_out_in_order_whatever_arrives_first():
    reducer, watching, p, lane, _ = setting()
    reducer.begin(0)
    with reducer.backward(ONE, last=True):
        (p["c"] * 3).backward()
        lane.wait()
        assert watching.given == [], "chunk 2 is full, but chunk 0 is at the front"
        (p["a"] * 1).backward()
        lane.wait()
        assert watching.given == [(0, [1.0])]
        (p["b"] * 2).backward()
        lane.wait()
        assert watching.given == [(0, [1.0]), (1, [2.0]), (2, [3.0])]
    reducer.finish()
    assert reducer.norms.tolist() == [1, 2, 3]
    lane.close()


def test_gradients_accumulate_over_backwards_and_start_anew_in_the_next_step():
    reducer, watching, p, lane, _ = setting()
    for step in range(2):
        reducer.begin(0)
        with reducer.backward(ONE, last=False):
            (p["a"] * 5 + p["b"] * 7).backward()
        with reducer.backward(ONE, last=True):
            (p["a"] * 10).backward()
        reducer.finish()
        assert watching.given[3 * step :] == [(0, [15.0]), (1, [7.0]), (2, [0.0])], (
            "c was not reached: zero, not the step before's"
        )
        assert reducer.touched == {"a": True, "b": True, "c": False}
        assert all(parameter.grad is None for parameter in p.values())
        p["c"].data.fill_(0)
    lane.close()


def test_low_precision_gradients_accumulate_in_fp32():
    """256 + 1 is 256 in bf16."""
    reducer, watching, p, lane, _ = setting(torch.bfloat16)
    reducer.begin(0)
    with reducer.backward(ONE, last=False):
        (p["a"] * 256).backward()
    with reducer.backward(ONE, last=True):
        (p["a"] * 1).backward()
    reducer.finish()
    assert watching.given[0] == (0, [257.0])
    lane.close()


@pytest.mark.parametrize("holds", list(Holds))
def test_the_lane_is_left_alone_where_a_chunk_has_nothing_to_do_there(holds):
    reducer, watching, p, lane, chunks = setting()
    watching.holds = lambda step: holds  # type: ignore[method-assign]
    reducer.begin(0)
    with reducer.backward(ONE, last=True):
        (p["a"] * 5 + p["b"] * 7).backward()
    reducer.finish()
    assert [chunk.gradient.tolist() for chunk in chunks] == [[5.0], [7.0], [0.0]]
    reduced = holds in (Holds.SUM, Holds.MEAN, Holds.LOCAL_MEAN)
    assert [index for index, _ in watching.given] == ([0, 1, 2] if reduced else [])
    assert (lane._thread is not None) == reduced
    lane.close()


def test_a_loss_scale_is_taken_out_also_where_nothing_is_exchanged():
    reducer, watching, p, lane, chunks = setting()
    watching.holds = lambda step: Holds.INDEPENDENT  # type: ignore[method-assign]
    reducer.begin(0, unscale=torch.tensor(0.5))
    with reducer.backward(ONE, last=True):
        (p["a"] * 6).backward()
    reducer.finish()
    assert chunks[0].gradient.tolist() == [3.0]
    lane.close()


def test_a_backward_that_makes_a_graph_leaves_none_in_the_chunks():
    reducer, _, p, lane, chunks = setting()
    reducer.begin(0)
    with reducer.backward(ONE, last=True), pytest.warns(UserWarning, match="reference cycle"):
        (p["a"] ** 2).backward(create_graph=True)
    reducer.finish()
    assert not any(chunk.gradient.requires_grad for chunk in chunks)
    lane.close()


def test_an_error_of_the_algorithm_is_raised_at_the_end_of_the_step():
    reducer, watching, p, lane, _ = setting()
    watching.reduce = lambda chunk, own_mean: (_ for _ in ()).throw(OSError("the cable"))  # type: ignore[method-assign]
    reducer.begin(0)
    with reducer.backward(ONE, last=True):
        (p["a"] * 1).backward()
    with pytest.raises(OSError, match="the cable"):
        reducer.finish()
    lane.close()
