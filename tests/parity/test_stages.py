"""The parity matrix of plans with stages: each against one process, and checkpoints from any number of stages to
any."""

from __future__ import annotations

from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal import Engine, Plan
from shoal.errors import UserError
from shoal.exchange.named import ALGORITHMS
from shoal.models import generate
from tests.parity.cases import CASES, Trace
from tests.parity.covering import in_turn, thinned
from tests.parity.runs import check_alike, one_process, size_of, trained, under
from tests.parity.test_mesh import TOLERANCE, WIDER, state_of
from tests.parity.test_parity import compare
from tests.pool import run_ranks

SOME_BLOCKS = {"name": "blocks", "full": "0, 3", "selective": [1]}
PLANS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "pp2-gpipe": {"pp": 2, "schedule": "gpipe"},
    "pp2-zb1p": {"pp": 2, "schedule": "zb1p"},
    "pp2-zbv": {"pp": 2, "schedule": "zbv"},
    "pp4-zbv": {"pp": 4, "schedule": "zbv"},
    "pp4-interleaved-zero1": {"pp": 4, "schedule": "interleaved", "dp": 2, "zero": 1},
    "pp2-interleaved": {"pp": 2, "schedule": {"name": "interleaved", "chunks": 4}},
    "dp2-pp2": {"dp": 2, "pp": 2},
    "dp3-pp2": {"dp": 3, "pp": 2},
    "dp2-pp2-zero1": {"dp": 2, "pp": 2, "zero": 1},
    "dp2-pp2-zero2": {"dp": 2, "pp": 2, "zero": 2, "schedule": "zbv"},
    "dp4-pp2-shard2": {"dp": 4, "pp": 2, "zero": 2, "shard": 2},
    "zero3": {"dp": 2, "pp": 2, "zero": 3},
    "zero3-hosts": {"dp": 2, "pp": 2, "zero": 3, "schedule": "zbv"},
    "1f1b-zero3-hosts": {"dp": 2, "pp": 2, "zero": 3},
    "offload": {"pp": 2, "memory": {}},
    "activations": {
        "dp": 2,
        "pp": 2,
        "zero": 1,
        "memory": {"activations": 0.5, "update": "deferred"},
        "schedule": "interleaved",
    },
    "disk": {"dp": 2, "pp": 2, "zero": 3, "memory": {"disk": "a directory"}},
    "hosts": {"dp": 2, "pp": 2, "zero": 1},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "dp2-tp2-pp2": {"dp": 2, "tp": 2, "pp": 2},
    "pp2-cp2": {"pp": 2, "cp": 2},
    "pp2-cp2-tp2": {"pp": 2, "cp": 2, "tp": 2},
    "pp2-ring2": {"pp": 2, "cp": 2, "context": "ring", "schedule": "zb1p"},
    "pp2-ep2": {"pp": 2, "dp": 2, "ep": 2},
    "pp2-ep2-zero2": {"pp": 2, "dp": 4, "ep": 2, "zero": 2},
    "recompute": {"pp": 2, "dp": 2, "recompute": "full"},
    "recompute-zb": {"pp": 2, "recompute": "full", "schedule": "zbv"},
    "selective": {"pp": 2, "recompute": "selective"},
    "blocks-zero3-hosts": {"dp": 2, "pp": 2, "zero": 3, "recompute": SOME_BLOCKS, "schedule": "interleaved"},
    "blocks-zb": {"pp": 2, "recompute": SOME_BLOCKS, "schedule": "zbv"},
    "blocks-offload": {"pp": 2, "memory": {"activations": 0.5}, "recompute": SOME_BLOCKS},
    "shares": {"dp": 2, "pp": 2, "shares": [3, 1], "schedule": "interleaved"},
    "shares-zero3-hosts": {"dp": 2, "pp": 2, "shares": [1, 5], "zero": 3},
    "shares-ep2": {"dp": 2, "pp": 2, "shares": [3, 1], "ep": 2},
    "compiled": {"pp": 2, "compile": "aot_eager"},
    "compiled-blocks": {"pp": 2, "compile": "aot_eager", "recompute": {"name": "blocks", "full": [1]}},
    "compiled-zb": {"pp": 2, "compile": "aot_eager", "schedule": "zb1p"},
    "selective-zb": {"pp": 2, "recompute": "selective", "schedule": "zb1p"},
}
MODELS = ["gpt-deep", "llama-deep", "resnet-batchnorm", "lstm-deep", "moe-deep", "gpt"]
COLUMNS = (MODELS, list(PLANS), ["fp64", "fp32", "bf16", "fp16"], [1, 3])


def goes_together(case: str, plan: str, precision: str, accumulation: int) -> bool:
    options = PLANS[plan]
    if ("compile" in options) != (case == "gpt"):
        return False  # blocks are compiled one by one: of two of them
    if options.get("ep") and case != "moe-deep":
        return False
    if (options.get("tp") or options.get("cp")) and case in ("resnet-batchnorm", "lstm-deep"):
        return False
    if options.get("context") == "ring" and case == "gpt-deep":
        return False  # refused: it drops inside attention
    stages = options["pp"] * (
        2
        if options.get("schedule") in ("zbv", "interleaved")
        else 4
        if "schedule" in options and plan == "pp2-interleaved"
        else 1
    )
    if case == "moe-deep" and stages > 4:
        return False  # four blocks
    selective = options.get("recompute") == "selective" or options.get("recompute") == SOME_BLOCKS
    if selective and case in ("resnet-batchnorm", "lstm-deep"):
        return False
    if case in ("resnet-batchnorm", "lstm-deep") and (precision in ("bf16", "fp16") or "compile" in options):
        return False  # slow on a CPU, and nothing else of them is special to stages
    if precision == "fp16" and (plan, accumulation) != ("dp2-pp2", 3):
        return False  # slow on a CPU, and alike
    return not (size_of(options) == 8 and accumulation == 3)


# two blocks, whose routers' logits the last stage collects for the balance loss
COLLECTED = [
    "pp2",
    "pp2-gpipe",
    "pp2-zb1p",
    "dp2-pp2-zero1",
    "1f1b-zero3-hosts",
    "tp2-pp2",
    "pp2-ep2",
    "recompute",
    "offload",
]
ROUTED = [("mixtral", plan, *turn) for plan in COLLECTED for turn in [("fp32", 1), ("fp32", 3), ("bf16", 1)]]
# where logits pass through something of their own: a split backward, half of a router, a second forward, a tier
SPLIT = [("mixtral", plan) for plan in ("pp2", "pp2-zb1p", "tp2-pp2", "recompute", "pp2-ep2", "offload")]
ROWS = [row for row in product(*COLUMNS) if goes_together(*row)] + ROUTED
TURNS = [("fp64", 1), ("fp32", 3), ("bf16", 1), ("fp32", 1)]
COVERING = (
    {
        row
        for (plan, case), turn in zip(in_turn(list(PLANS), MODELS), cycle(TURNS), strict=False)
        for row in [
            next(
                row
                for row in [
                    (case, plan, *turn),
                    ("gpt-deep", plan, "fp32", 1),
                    ("moe-deep", plan, "fp32", 1),
                    ("llama-deep", plan, "fp32", 1),
                    ("gpt", plan, "fp32", 1),
                ]
                if goes_together(*row)
            )
        ]
    }
    | {(case, "pp2", "fp32", 3) for case in MODELS[:5]}
    | {("gpt-deep", "dp2-pp2", "fp16", 3)}
    | {(*row, *turn) for row, turn in in_turn(SPLIT, [row[2:] for row in ROUTED[:3]])}
) - {
    ("gpt", "compiled", "fp32", 1),
    ("gpt", "compiled-blocks", "fp32", 1),
}  # a whole backward of compiled blocks is in test_unflushed.py, a split one here


def run(world, case: str, precision: str, accumulation: int, plan: str) -> Trace:
    return trained(world, case, precision, accumulation, PLANS[plan], plan, plan.startswith("compiled"))


@pytest.mark.parametrize(("case", "plan", "precision", "accumulation"), thinned(ROWS, COVERING))
def test_stages_equal_one_process(case, plan, precision, accumulation):
    traces = run_ranks(run, size_of(PLANS[plan]), case, precision, accumulation, plan)
    check_alike(traces)
    reference = one_process(case, precision, accumulation, plan.startswith("compiled"))
    assert traces[0].weights.keys() == reference.weights.keys()
    compare(traces[0], reference, *WIDER.get((case, precision), TOLERANCE[precision]))


CUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {"dp": 2, "zero": 1},
    "pp2": {"pp": 2},
    "pp4-zbv": {"pp": 4, "schedule": "zbv"},
    "dp2-pp2-zero2": {"dp": 2, "pp": 2, "zero": 2, "schedule": "interleaved"},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "dp2-pp2-ep2": {"dp": 2, "pp": 2, "ep": 2},
}
GOING_ON = [
    ("one", "pp2"),
    ("pp2", "pp4-zbv"),
    ("pp4-zbv", "dp2-pp2-zero2"),
    ("dp2-pp2-zero2", "tp2-pp2"),
    ("tp2-pp2", "dp2"),
    ("dp2", "pp4-zbv"),
]
CHECKPOINTS = [(*cuts, *kind) for cuts, kind in product(GOING_ON, [("gpt-deep", "fp32"), ("llama-deep", "bf16")])]
CHECKPOINTS += [("one", "pp2", "resnet-batchnorm", "fp32"), ("pp2", "dp2", "resnet-batchnorm", "fp32")]
CHECKPOINTS += [("dp2-pp2-ep2", "pp2", "moe-deep", "fp32"), ("pp2", "dp2-pp2-ep2", "moe-deep", "bf16")]
SOME = {(*cuts, *kind) for cuts, kind in in_turn(GOING_ON, [("gpt-deep", "fp32"), ("llama-deep", "bf16")])} | set(
    CHECKPOINTS[12:]
)


def train_and_save(
    world, case: str, precision: str, cut: str, directory: Path
) -> tuple[dict[str, torch.Tensor], list[float]]:
    running = under(world, case, precision, 1, CUTS[cut])
    for batch in running.batches(CASES[case].data(), steps=3):
        running.step(batch)
    running.save(directory)
    found = state_of(running)
    went_on = two_steps(running, case)
    running.close()
    return found, went_on


def two_steps(running: Engine, case: str) -> list[float]:
    """Losses and learning rates of the fourth and the fifth step."""
    results = [running.step(batch) for batch in running.batches(CASES[case].data(), steps=2)]
    return [result.loss for result in results] + [rate for result in results for rate in result.lr]


def load_and_go_on(
    world, case: str, precision: str, cut: str, directory: Path
) -> tuple[dict[str, torch.Tensor], list[float]]:
    running = under(world, case, precision, 1, CUTS[cut])
    running.load(directory)
    found = state_of(running)
    went_on = two_steps(running, case)
    running.close()
    return found, went_on


@pytest.mark.parametrize(("before", "after", "case", "precision"), thinned(CHECKPOINTS, SOME))
def test_a_checkpoint_of_stages_loads_under_others(before, after, case, precision, tmp_path):
    saved, unbroken = run_ranks(train_and_save, Plan(**CUTS[before]).size, case, precision, before, tmp_path)[0]
    loaded, went = run_ranks(load_and_go_on, Plan(**CUTS[after]).size, case, precision, after, tmp_path)[0]
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved), "masters and optimizer state, to the bit"
    assert went == pytest.approx(unbroken, rel=1e-5 if precision == "fp32" else 5e-3)


def exported(world, case: str, cut: str, directory: Path) -> None:
    running = under(world, case, "fp32", 1, CUTS[cut])
    running.export(directory)
    running.close()


@pytest.mark.parametrize(
    ("case", "cut"),
    [("llama-deep", "pp4-zbv"), ("gpt-deep", "tp2-pp2"), ("resnet-batchnorm", "pp2"), ("moe-deep", "dp2-pp2-ep2")],
)
def test_an_export_of_stages_is_that_of_one_process(case, cut, tmp_path):
    run_ranks(exported, 1, case, "one", tmp_path / "one")
    run_ranks(exported, Plan(**CUTS[cut]).size, case, cut, tmp_path / "stages")
    one, stages = (load_file(tmp_path / where / "model.safetensors") for where in ("one", "stages"))
    assert one.keys() == stages.keys() and all(torch.equal(value, stages[name]) for name, value in one.items())


def written(world, case: str, cut: str) -> torch.Tensor:
    running = under(world, case, "fp32", 1, CUTS[cut])
    draw = torch.Generator().manual_seed(0)
    text = generate(running.model, torch.tensor([[1, 2, 3]]), 8, 1.0, None, draw)
    running.close()
    return text


@pytest.mark.parametrize(
    ("case", "cut"), [("llama-deep", "pp4-zbv"), ("gpt-deep", "tp2-pp2"), ("moe-deep", "dp2-pp2-ep2")]
)
def test_stages_write_what_one_process_writes(case, cut):
    one = run_ranks(written, 1, case, "one")[0]
    assert all(torch.equal(text, one) for text in run_ranks(written, Plan(**CUTS[cut]).size, case, cut))


def exchanged(world, plan: dict[str, Any]) -> list[Any]:
    try:
        running = under(world, "moe-deep", "fp32", 1, plan)
    except UserError as error:
        return [str(error)]
    losses = [running.step(batch).loss for batch in running.batches(CASES["moe-deep"].data(), steps=6)]
    running.close()
    return losses


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_replicas_of_stages_agree_by_any_exchange_that_takes_them(name):
    plan = {"dp": 2, "pp": 2, "exchange": name}
    found = run_ranks(exchanged, 4, plan)
    assert all(each == found[0] for each in found)
    if isinstance(found[0][0], str):
        assert "does not go with plan.pp" in found[0][0]
        return
    alone = run_ranks(exchanged, 2, {"dp": 2, "exchange": name})[0]
    exact = name in ("allreduce", "hierarchical", "scatter_gather", "none")
    assert found[0] == pytest.approx(alone, rel=1e-5 if exact else 2e-2)
