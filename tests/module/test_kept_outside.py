"""Models whose code keeps tensors outside of the model from one call to the next (BEiT's and DINOv3's positions in
`transformers`): what a run without values leaves there does not reach a forward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, lru_cache, partial, wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shoal import Engine, Plan, auto_plan
from shoal.comm.simulation import simulate_world
from shoal.errors import UserError
from shoal.module.build import build, build_blank, without_values
from shoal.module.kept_outside import nothing_kept_outside
from shoal.parallel.tensor.graph.trace import fake_mode, trace
from shoal.planner.cluster import Cluster, Device, Host, Link
from tests.pool import reference, run_ranks

D = 16
TABLES: dict[int, Tensor] = {}
KEPT: list[Tensor] = []


def positions(size: int) -> Tensor:
    return torch.arange(size).float().sin()


def memo(function: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    @wraps(function)
    def wrapper(*args: Any) -> Any:
        if args not in known:
            known[args] = function(*args)
        return known[args]

    return wrapper


def around(function: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers has it, which does without while torch compiles."""
    kept = lru_cache(maxsize=10)(function)

    @wraps(function)
    def wrapper(*args: Any) -> Any:
        return kept(*args)

    return wrapper


class Positions(nn.Module):
    """Adds positions, which subclasses keep, between layers of which tp cuts some."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def at(self) -> Tensor:
        return positions(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x + self.at())))


class Cached(Positions):
    @staticmethod
    @cache
    def table(size: int) -> tuple[Tensor, int]:
        return positions(size), size

    def at(self) -> Tensor:
        return self.table(D)[0]


class Around(Positions):
    table = staticmethod(around(positions))

    def at(self) -> Tensor:
        return self.table(D)


class Memo(Positions):
    table = staticmethod(memo(positions))

    def at(self) -> Tensor:
        return self.table(D)


class Table(Positions):
    def at(self) -> Tensor:
        return TABLES[D] if D in TABLES else TABLES.setdefault(D, positions(D))


class Buffer(Table):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", Table.at(self), persistent=False)


class Listed(Positions):
    def at(self) -> Tensor:
        KEPT[1:] = []
        return KEPT[0] if KEPT else KEPT.append(positions(D)) or KEPT[0]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return model(batch["x"]).square().sum(), batch["x"].numel()


ROWS = [{"x": torch.randn(D, generator=torch.Generator().manual_seed(row))} for row in range(8)]
SGD = partial(torch.optim.SGD, lr=0.1)
CORES = Device("cores", {"fp32": 1e11}, 2**33, 1e10, on_host=True)
HERE = {
    size: Cluster("here", (Host(CORES, size, Link(1e-5, 2e9), 2**33, 5e9),), Link(1e-4, 1e9), 0.3) for size in (1, 2)
}


def nothing_known() -> None:
    Cached.table.cache_clear()
    TABLES.clear()
    KEPT.clear()


def trained(world: Any, model: Any, asked: bool) -> list[float]:
    nothing_known()
    plan = Plan(tp=world.size)
    if asked:
        plan, _ = auto_plan(
            model,
            loss,
            SGD,
            ROWS[0],
            global_batch=4,
            microbatch=2,
            pins={"tp": world.size},
            cluster=HERE[world.size],
            world=world,
        )
    engine = Engine(model, loss, SGD, plan, world=world, global_batch=4, microbatch=2)
    try:
        return [engine.step(batch).loss for batch in engine.batches(ROWS, steps=2)]
    finally:
        engine.close()


@pytest.mark.parametrize("model", [Cached, Around, Memo, Table, Buffer])
@pytest.mark.parametrize("asked", [False, True], ids=["given", "auto"])
def test_a_forward_has_values_whatever_was_run_without_before(model, asked):
    whole = reference(trained, 1, Positions, False)[0]
    for each in run_ranks(trained, 2, model, asked):  # processes: threads would share what is kept
        assert each == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("make", [partial(build, seed=0), build_blank, without_values])
def test_a_model_that_is_built_leaves_nothing(make):
    nothing_known()
    TABLES[7] = real = torch.ones(3)
    make(Buffer)
    assert list(TABLES) == [7] and TABLES[7] is real


class Imports(Positions):
    """Imports in its forward what makes a tensor of its own, as layers of `transformers` do peft."""

    def at(self) -> Tensor:
        import late_table

        return positions(D) * late_table.ONES.sum().item()


def test_what_is_imported_without_values_has_some_and_is_none_of_the_model(tmp_path, monkeypatch):
    """Ranks of which one had imported it before cut other layers; its tensors had no values for good."""
    (tmp_path / "late_table.py").write_text("import torch\nONES = torch.ones(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = build(Imports, 0).module
    mode = fake_mode(module)
    with mode:
        x = torch.zeros(2, D)
    first, second = ([op.name for op in trace("", module, [x], {}, mode).ops] for _ in range(2))
    assert first == second and not isinstance(sys.modules.pop("late_table").ONES, FakeTensor)


@pytest.mark.parametrize("make", [partial(build, seed=0), build_blank, without_values])
def test_what_a_factory_imports_has_values(make, tmp_path, monkeypatch):
    (tmp_path / "late_table.py").write_text("import torch\nONES = torch.ones(1)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def factory() -> nn.Module:
        import late_table

        return nn.Linear(2, late_table.ONES.numel())

    make(factory)
    assert float(sys.modules.pop("late_table").ONES) == 1.0


def test_what_torch_imports_to_leave_a_mode_is_imported_as_ever():
    """Else the first such import of a process ended in a circle, and the model was not recorded."""
    with nothing_kept_outside():
        first, *others = sys.meta_path
        assert first.find_spec("torch._subclasses.schema_check_mode", None) is None
    assert sys.meta_path == others


def test_what_has_values_stays():
    nothing_known()
    kept = Cached.table(3)
    with nothing_kept_outside(Cached()):
        Cached.table(4)
    assert Cached.table(3) is kept and Cached.table.cache_info().currsize == 2


def test_what_is_kept_elsewhere_is_named():
    with pytest.raises(UserError, match="takes a tensor from outside of the model that has no values"):
        simulate_world(1, trained, Listed, True)
