"""What ranks along an axis do together is nothing by default; names and norms are merged in the model's order."""

from __future__ import annotations

import pytest
import torch

from shoal.comm import World
from shoal.mesh import Mesh
from shoal.parallel.axis import Axis, in_order, together
from shoal.parallel.layout import Layout
from shoal.plan import Plan

pytestmark = pytest.mark.fast


class Another(Axis):
    """An axis that has nothing to say."""

    name = "dp"


def test_an_axis_leaves_everything_as_it_is() -> None:
    world = World.single()
    axis = Another(Mesh(Plan(), 0, 1), world)
    batch, layouts = {"input_ids": torch.zeros(2, 3)}, {"w": Layout.replicated((2,))}
    assert axis.take(batch) is batch and axis.relaid(layouts) is layouts and not axis.variants and not axis.tied
    assert axis.why_no_hook(layouts["w"]) is None and axis.untouched(["w"], ["w"]) == ["w"]
    assert axis.gather_names(["w"], []) == ["w"] and axis.gather_seen(None) == [None]
    assert axis.add_squares(batch["input_ids"]) is batch["input_ids"]
    assert axis.beside("ballot").group.name == "dp-ballot" and axis.group.name == "dp"
    axis.close()


def test_names_and_norms_of_several_ranks() -> None:
    assert in_order([["c", "a"], ["b", "a"]], ["a", "b", "c", "d"]) == ["a", "b", "c"]
    assert together([{"a": 1.0, "b": 2.0}, {"b": 3.0, "c": 4.0}], {"b"}) == {"a": 1.0, "b": 5.0, "c": 4.0}
    assert together([{"a": 1.0}, {"a": 2.0}]) == {"a": 1.0}
