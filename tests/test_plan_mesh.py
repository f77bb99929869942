"""Plans are refused for what they say; the mesh's rank arithmetic on a hand-worked grid."""

from __future__ import annotations

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from shoal.comm import Group, World
from shoal.comm.silent import Silent
from shoal.errors import UserError
from shoal.exchange import algorithm
from shoal.mesh import AXES, EXPERT_AXES, Mesh
from shoal.parallel.groups import MeshGroups
from shoal.plan import Plan

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"exchagne": 2}, 'plan has no field "exchagne". Did you mean "exchange"?'),
        ({"dp": 0}, "plan.dp = 0: a degree is a whole number of at least 1"),
        ({"dp": "2"}, "plan.dp = '2'"),
        ({"stages": [1, 1]}, "plan.stages with plan.pp = 1"),
        (
            {"dp": 6, "zero": 1, "shard": 4},
            "plan.shard = 4: that many of dp = 6 ranks share one copy of the state, so it is one of [1, 2, 3, 6]",
        ),
        ({"dp": 6, "shard": 3}, "plan.shard = 3 with plan.zero = 0: nothing is sharded"),
        ({"zero": 4}, "plan.zero = 4 (ZeRO sharding) is not one of 0, 1, 2, 3"),
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
        ({"name": "powersgd", "rank": 0}, '"powersgd": rank = 0: give a whole number from 1 on'),
        ({"name": "local_sgd", "start": 1.5}, '"local_sgd": start = 1.5: give a whole number from 0 on'),
        *[
            ({"name": "hierarchical", "ranks_per_host": wrong}, "ranks_per_host = ")
            for wrong in (0, 1.5, float("nan"), True, "two")
        ],
        *[
            ({"name": name, key: wrong}, f'"{name}": {key} = {wrong!r}: give {wanted}')
            for name, key, wanted, value in (
                ("topk", "chunk_bytes", "a whole number from 1 on", 2**63),
                ("powersgd", "min_compression", "a number above 0", 0),
                ("diloco", "guard", "a number from 0 on", -1),
                ("async_average", "interval_ms", "a number from 0 on", float("inf")),
                ("bytegrad", "error_feedback", "true or false", "no"),
                ("qadam", "error_feedback", "true or false", 0),
            )
            for wrong in (value, float("nan"), -1, *([] if key == "chunk_bytes" else [None]))
        ],
        ({"name": "islands", "ranks": 0}, '"islands": ranks = 0: give a whole number from 1 on'),
        ({"name": "allreduce", "buckets": 1}, 'no parameter "buckets". "allreduce" takes: chunk_bytes'),
        ({"name": "topk", "ration": 0.1}, '"topk" has no parameter "ration". Did you mean "ratio"? "topk" takes: '),
        ({"name": "diloco", "fragment": 2}, 'no parameter "fragment"'),
        ({"name": "islands", "make": 2}, 'no parameter "make"'),
        ({"name": "topk", "ratio": "much"}, 'wants a number for "ratio"'),
    ],
)
def test_a_wrong_exchange_is_refused_by_name(option, message):
    with pytest.raises(UserError) as error:
        algorithm(option)
    assert message in str(error.value)


def test_degrees_must_multiply_to_the_ranks():
    with pytest.raises(
        UserError, match="needs pp 1 x dp 3 x cp 1 x tp 1 = 3 ranks, but 4 were started: dp = 4 works here"
    ):
        Mesh(Plan(dp=3), 0, 4)
    with pytest.raises(
        UserError, match=r"dp = 4 works here, or tp = 2 or cp = 2 or pp = 2 of a model that can be cut so$"
    ):
        Mesh(Plan(dp=2), 0, 4)
    for size in (2, 6):  # a model with 4 heads can be cut in none of 6
        said = rf"started: tp = {size} of a model that can be cut so, or start a multiple of 4 ranks, such as 4 "
        with pytest.raises(UserError, match=said):
            Mesh(Plan(tp=4), 0, size)
    with pytest.raises(UserError, match=r"but 1 were started: tp = 1 works here$"):
        Mesh(Plan(tp=2), 0, 1)


def test_coordinates_of_a_grid_worked_by_hand():
    """pp 2 x dp 3 x cp 1 x tp 2: rank = 6 p + 2 d + t, so rank 9 stands at p 1, d 1, t 1."""
    plan = Plan()
    for axis, degree in (("pp", 2), ("dp", 3), ("tp", 2)):
        object.__setattr__(plan, axis, degree)  # strategies that plans refuse as yet; the arithmetic is there
    mesh = Mesh(plan, 9, 12)
    assert mesh.coordinates == (1, 1, 0, 1)
    assert (
        mesh.ranks("pp") == [3, 9]
        and mesh.ranks("dp") == [7, 9, 11]
        and mesh.ranks("tp") == [8, 9]
        and mesh.ranks("cp") == [9]
    )
    assert mesh.size("dp") == 3 and mesh.rank("dp") == 1


def spread(rank: int, **degrees: int) -> Mesh:
    plan = Plan()
    for axis, degree in degrees.items():
        object.__setattr__(plan, axis, degree)  # strategies that plans refuse as yet; the arithmetic is there
    return Mesh(plan, rank, plan.size)


def test_degrees_of_experts_wait_for_the_number_of_ranks():
    plan = Plan.from_dict({"ep": 2})
    with pytest.raises(UserError, match="experts are spread over dp x cp = 1 x 1 = 1 ranks"):
        Mesh(plan, 0, 1)


def test_experts_see_the_same_ranks_otherwise():
    """dp 2 x cp 2 x tp 2 with ep 2: dp x cp are four places, two of them hold different experts, and the others
    copies."""
    mesh = spread(5, dp=2, cp=2, tp=2, ep=2)  # dp 1, cp 0, tp 1: place 2 of dp x cp
    assert mesh.ranks("dp", "cp") == [1, 3, 5, 7] and mesh.ranks("dp", "cp", "tp") == list(range(8))
    assert mesh.ranks("ep") == [5, 7] and mesh.ranks("edp") == [1, 5] and mesh.ranks("tp") == [4, 5]
    assert (mesh.size("ep"), mesh.rank("ep"), mesh.rank("edp")) == (2, 0, 1)
    with pytest.raises(UserError, match="dp and ep are not axes of one grid"):
        mesh.ranks("dp", "ep")


@pytest.mark.parametrize(
    ("plan", "rank", "within", "copies"),
    [
        ({"dp": 8, "ep": 2}, 5, [1, 3, 5, 7], [5]),
        ({"dp": 8, "ep": 2, "shard": 4}, 5, [5, 7], [1, 5]),
        ({"dp": 8, "ep": 4, "shard": 4}, 5, [5], [1, 5]),
        ({"dp": 4, "cp": 2, "ep": 4, "shard": 2}, 5, [5], [1, 5]),
        ({"dp": 4, "cp": 2, "ep": 8, "shard": 2}, 5, [5], [5]),
    ],
    ids=str,
)
def test_those_who_have_the_same_experts_share_their_state(plan, rank, within, copies):
    assert spread(rank, **plan, zero=1).shards(experts=True) == (within, copies)


@given(st.tuples(*(st.integers(1, 3) for _ in range(4))), st.data())
def test_groups_of_an_axis_part_the_ranks(degrees, data):
    pp, dp, cp, tp = degrees
    ep = data.draw(st.sampled_from([each for each in range(1, dp * cp + 1) if dp * cp % each == 0]))
    meshes = [spread(rank, pp=pp, dp=dp, cp=cp, tp=tp, ep=ep) for rank in range(pp * dp * cp * tp)]
    for axes in (("pp",), ("dp",), ("cp",), ("tp",), ("ep",), ("edp",), ("dp", "cp"), ("ep", "tp")):
        groups = {tuple(mesh.ranks(*axes)) for mesh in meshes}
        assert sorted(rank for group in groups for rank in group) == list(range(len(meshes)))
        for mesh_rank, mesh in enumerate(meshes):
            group = mesh.ranks(*axes)
            assert len(axes) > 1 or (group[mesh.rank(axes[0])] == mesh_rank and len(group) == mesh.size(axes[0]))
            assert meshes[0].at(mesh_rank) == {axis: mesh.rank(axis) for axis in {*AXES, *EXPERT_AXES}}


def test_groups_of_peers_are_named_after_the_axes_that_have_several_ranks():
    whole, flat = spread(5, dp=2, cp=2, tp=2), spread(1, dp=4)
    assert whole.peers("replicas") == ("dp-cp", [1, 3, 5, 7]) and whole.peers("parts") == ("tp", [4, 5])
    assert whole.peers("stage") == ("dp-cp-tp", list(range(8))) and whole.peers("stages") == ("pp", [5])
    assert flat.peers("stage") == flat.peers("replicas") == ("dp", [0, 1, 2, 3])
    assert spread(0, cp=2).peers("replicas") == ("dp-cp", [0, 1])  # not the group of the axis cp itself


def test_a_plan_answers_with_a_meaning():
    plan = Plan(pp=2, dp=4, cp=2, tp=2, zero=1, shard=2)
    assert (plan.pipelined, plan.replicas, plan.copy_size, plan.stage_size) == (True, 8, 4, 16)
    assert (plan.head_sharers, plan.forwards_meet, Plan(dp=4).forwards_meet) == (4, True, False)
    assert Plan(dp=4, zero=3, recompute="full").division == Plan(dp=4).division != Plan(dp=2, tp=2).division


def test_experts_divide_dp_x_cp():
    with pytest.raises(
        UserError, match=r"plan.ep = 3: experts are spread over dp x cp = 4 x 1 = 4 ranks, so it is one of \[1, 2, 4\]"
    ):
        Plan(dp=4, ep=3)


class Elsewhere(World):
    """A world whose groups send nothing."""

    def group(self, name: str, ranks: list[int]) -> Group:
        key = (name, tuple(ranks))
        if key not in self._groups:
            self._groups[key] = Group(name, ranks, self.ledger, {"cpu": Silent(ranks.index(self.rank), len(ranks))})
        return self._groups[key]


def test_the_groups_of_1024_ranks():
    """Of every rank, in seconds: along each axis the ranks are parted, and each is where it says."""
    plan = Plan(dp=32, cp=4, tp=8)
    seen: dict[str, set[tuple[int, ...]]] = {}
    for rank in range(plan.size):
        world = Elsewhere(rank, plan.size, store=HashStore())
        groups = MeshGroups(Mesh(plan, rank, plan.size), world)
        for axes in (("dp",), ("cp",), ("tp",), ("dp", "cp"), ("dp", "cp", "tp")):
            group = groups.group(*axes)
            assert group.ranks[group.rank] == rank
            seen.setdefault("-".join(axes), set()).add(tuple(group.ranks))
    for axes, found in seen.items():
        assert sorted(rank for ranks in found for rank in ranks) == list(range(plan.size)), axes
