"""Small traced models for placements, and the same problem for another solver."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from shoal.models import build
from shoal.parallel.tensor.graph.trace import Trace
from shoal.planner.cluster import Device, Link
from shoal.planner.operators import traced
from shoal.planner.placements import Problem, Rates
from shoal.planner.prepare import Subject
from shoal.precision import precision
from tests.launch.packages import modules, wheel
from tests.zoo.entry import Model
from tests.zoo.runs import ZOO

DEVICE = Device("toy", {"fp32": 1e13}, 2**30, 1e12, launch=0.0)


def rates(bandwidth: float, ranks: int = 2, latency: float = 1e-6) -> Rates:
    return Rates.of(ranks, Link(latency, bandwidth), DEVICE, torch.float32)


class Mlp(nn.Module):
    """Two linear maps with something elementwise between them, and a residual sum."""

    def __init__(self, width: int = 256, wide: int = 1024) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, wide), nn.Linear(wide, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def squared(model: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, int]:
    return model(mb["x"]).square().sum(), 1


def own(name: str, shape: tuple[int, ...], **settings: object) -> Model:
    """One of our own models on rows of `shape`: ids where it has one dim."""
    spec = build({"name": name, **settings})
    row = torch.zeros(shape, dtype=torch.long if len(shape) == 1 else torch.float32)
    labels = torch.zeros(shape if len(shape) == 1 else (), dtype=torch.long)
    sample = {"input_ids": row, "labels": labels} if len(shape) == 1 else {"image": row, "label": labels}
    return Model(spec.factory, spec.loss, lambda: [sample])


MODELS: dict[str, partial[Model]] = {
    "mlp": partial(Model, Mlp, squared, lambda: [{"x": torch.zeros(64, 256)}]),
    "gpt": partial(own, "gpt", (64,), layers=2, d_model=256, heads=4, vocab_size=1000, sequence=64),
}


def trace_of(name: str, rows: int = 4) -> Trace:
    """Traces a model of `MODELS` or of the zoo."""
    entry = MODELS[name]() if name in MODELS else ZOO[name]
    return traced(Subject(entry.factory, entry.loss, entry.samples()[0], rows, precision("fp32")))


def by_milp(problem: Problem) -> float:
    """Returns the smallest sum of costs, by a mixed integer program: one of the choices of each variable, and one of
    the pairs of choices of each two that have costs together. SciPy is fetched for this alone."""
    folder = modules(wheel("scipy"))
    if folder not in sys.path:
        sys.path.append(folder)
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    starts = np.cumsum([0, *(len(each) for each in problem.alone)])
    costs, rows, columns, values, wanted = list(np.concatenate(problem.alone)), [], [], [], []
    for first, each in zip(starts, problem.alone, strict=False):
        rows += [len(wanted)] * len(each)
        columns += range(first, first + len(each))
        values += [1.0] * len(each)
        wanted.append(1.0)
    for (one, other), table in problem.pairs.items():
        base = len(costs)
        costs += list(table.reshape(-1))
        places = base + np.arange(table.size).reshape(table.shape)
        for variable, its in ((one, places), (other, places.T)):
            for choice, line in enumerate(its):
                rows += [len(wanted)] * (len(line) + 1)
                columns += [*line, starts[variable] + choice]
                values += [1.0] * len(line) + [-1.0]
                wanted.append(0.0)
    matrix = coo_array((values, (rows, columns)), (len(wanted), len(costs))).tocsr()
    whole = np.array([1.0] * starts[-1] + [0.0] * (len(costs) - starts[-1]))
    scale = 1 / max(costs)
    found = milp(
        np.array(costs) * scale,
        constraints=LinearConstraint(matrix, wanted, wanted),
        integrality=whole,
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    assert found.success, found.message
    return float(found.fun) / scale
