"""Plans are refused for what they say; the mesh's rank arithmetic on a hand-worked grid."""

from __future__ import annotations

import json
import tomllib

import pytest

from shoal.errors import UserError
from shoal.exchange import algorithm
from shoal.mesh import Mesh
from shoal.plan import Plan

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"exchagne": 2}, 'plan has no field "exchagne". Did you mean "exchange"?'),
        ({"dp": 0}, "plan.dp = 0: a degree is a whole number of at least 1"),
        ({"dp": "2"}, "plan.dp = '2'"),
        ({"tp": 2}, "plan.tp = 2 is not implemented yet (tensor parallel); this version takes 1"),
        (
            {"dp": 6, "zero": 1, "shard": 4},
            "plan.shard = 4: that many of dp = 6 ranks share one copy of the state, so it is one of [1, 2, 3, 6]",
        ),
        ({"dp": 6, "shard": 3}, "plan.shard = 3 with plan.zero = 0: nothing is sharded"),
        ({"zero": 4}, "plan.zero = 4 is not implemented yet (ZeRO sharding)"),
        ({"recompute": 3}, "plan.recompute = 3: give a name, or a table"),
        ({"exchange": 3}, "plan.exchange = 3: give a name, or a table"),
        ({"compile": 1.5}, "plan.compile = 1.5: give true, false or"),
    ],
)
def test_a_wrong_plan_is_refused_by_name(table, message):
    with pytest.raises(UserError) as error:
        Plan.from_dict(table)
    assert message in str(error.value)


def test_one_schema_for_python_toml_and_json():
    plan = Plan(dp=4, exchange={"name": "allreduce", "chunk_bytes": 1024})
    toml = tomllib.loads('dp = 4\nexchange = {name = "allreduce", chunk_bytes = 1024}')
    assert Plan.from_dict(toml) == Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert Plan().to_dict() == {}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("allreduse", 'plan.exchange = "allreduse" is not implemented. Did you mean "allreduce"?'),
        ({"name": "allreduce", "buckets": 1}, "unexpected keyword argument 'buckets'"),
    ],
)
def test_a_wrong_exchange_is_refused_by_name(option, message):
    with pytest.raises(UserError) as error:
        algorithm(option)
    assert message in str(error.value)


def test_degrees_must_multiply_to_the_ranks():
    with pytest.raises(UserError, match="needs pp 1 x dp 3 x cp 1 x tp 1 = 3 ranks, but 4 were started: dp = 4 works here"):
        Mesh(Plan(dp=3), 0, 4)


def test_coordinates_of_a_grid_worked_by_hand():
    """pp 2 x dp 3 x cp 1 x tp 2: rank = 6 p + 2 d + t, so rank 9 stands at p 1, d 1, t 1."""
    plan = Plan()
    for axis, degree in (("pp", 2), ("dp", 3), ("tp", 2)):
        object.__setattr__(plan, axis, degree)  # strategies that plans refuse as yet; the arithmetic is there
    mesh = Mesh(plan, 9, 12)
    assert mesh.coordinates == (1, 1, 0, 1)
    assert (
        mesh.ranks("pp") == [3, 9] and mesh.ranks("dp") == [7, 9, 11] and mesh.ranks("tp") == [8, 9] and mesh.ranks("cp") == [9]
    )
    assert mesh.size("dp") == 3 and mesh.rank("dp") == 1
