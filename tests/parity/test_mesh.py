"""The parity matrix of plans that cut the model: each against one process, and checkpoints from any to any."""

from __future__ import annotations

from functools import cache, partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal import Plan
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.models import causal_lm, from_config
from shoal.models.attention import Attention
from tests.parity.cases import CASES, LLAMA, Trace, derivatives_of, engine, gathered, train
from tests.parity.covering import in_turn, thinned
from tests.parity.runs import check_alike, one_process, size_of, trained, under
from tests.parity.test_parity import compare
from tests.pool import run_ranks

ALIKE = {"overlap-compiled", "cp2-compiled", "ring2-compiled"}
"""Plans under which all batches are alike; "compiled" has a short one, and evaluates."""
PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},  # of models with two heads of keys and values: two ranks share one
    "dp2-tp2": {"dp": 2, "tp": 2},
    "all-tokens": {"dp": 2, "tp": 2},  # without sequence parallel, where models have it
    "overlap": {"dp": 2, "tp": 2},
    "overlap-tp4-recompute": {"tp": 4, "recompute": "full"},
    "overlap-compiled": {"tp": 2, "compile": "aot_eager"},
    "dp3-tp2": {"dp": 3, "tp": 2},
    "dp2-tp4": {"dp": 2, "tp": 4},
    "dp4-tp2": {"dp": 4, "tp": 2, "zero": 2, "shard": 2},
    "zero1": {"dp": 2, "tp": 2, "zero": 1},
    "zero2": {"dp": 2, "tp": 2, "zero": 2},
    "zero3": {"dp": 2, "tp": 2, "zero": 3},
    "zero3-hosts": {"dp": 2, "tp": 2, "zero": 3},
    "offload": {"tp": 2, "memory": {}},
    "deferred": {"dp": 2, "tp": 2, "zero": 1, "memory": {"update": "deferred", "activations": 0.5}},
    "disk": {"dp": 2, "tp": 2, "zero": 3, "memory": {"disk": "a directory"}},
    "recompute": {"dp": 2, "tp": 2, "recompute": "full"},
    "selective": {"tp": 2, "recompute": "selective"},
    "budget": {"dp": 2, "tp": 2, "zero": 1, "recompute": {"name": "budget", "keep": 0.5}},
    "compiled": {"tp": 2, "compile": "aot_eager"},
    "cp2": {"cp": 2},
    "cp4": {"cp": 4},
    "dp2-cp2": {"dp": 2, "cp": 2},
    "cp2-tp2": {"cp": 2, "tp": 2},
    "cp2-zero1": {"cp": 2, "zero": 1},
    "cp2-zero2": {"dp": 2, "cp": 2, "zero": 2, "shard": 1},
    "cp2-zero3-hosts": {"cp": 2, "zero": 3},
    "dp2-cp2-tp2": {"dp": 2, "cp": 2, "tp": 2, "zero": 3},
    "cp2-offload": {"cp": 2, "memory": {}},
    "cp2-recompute": {"dp": 2, "cp": 2, "recompute": "full"},
    "cp2-compiled": {"cp": 2, "compile": "aot_eager"},
    "ring2": {"cp": 2, "context": "ring"},
    "ring3": {"cp": 3, "context": "ring"},
    "dp2-ring2-zero1": {"dp": 2, "cp": 2, "context": "ring", "zero": 1},
    "ring2-tp2": {"cp": 2, "tp": 2, "context": "ring"},
    "ring2-recompute": {"cp": 2, "context": "ring", "recompute": "full", "zero": 3},
    "ring2-compiled": {"cp": 2, "context": "ring", "compile": "aot_eager"},
}
MODELS = ["gpt", "gpt-rotary-dropout", "tied", "llama", "gpt2", "mixtral", "bert"]
COLUMNS = (MODELS, list(PLANS), ["fp64", "fp32", "bf16", "fp16"], [1, 3])


def goes_together(case: str, plan: str, precision: str, accumulation: int) -> bool:
    if case == "mixtral" and precision == "fp64":
        return False  # torch multiplies by groups of experts in at most fp32
    if case == "gpt-rotary-dropout" and PLANS[plan].get("context") == "ring":
        return False  # refused: it drops inside attention
    if plan.startswith("overlap") and case not in ("gpt", "gpt-rotary-dropout", "tied", "bert"):
        return False  # not sequence parallel
    if precision == "fp16" and (plan, accumulation) != ("dp2-tp2", 3):
        return False  # slow on a CPU, and alike
    return not (plan in ("dp2-tp4", "dp4-tp2", "dp2-cp2-tp2") and accumulation == 3)  # eight ranks: fewer of them


ROWS = [row for row in product(*COLUMNS) if goes_together(*row)]
TURNS = [("fp64", 1), ("fp32", 3), ("bf16", 1), ("fp32", 1)]
COVERING = {
    (case, plan, *turn)
    if goes_together(case, plan, *turn)
    else (case if goes_together(case, plan, "fp32", 1) else "gpt", plan, "fp32", 1)
    for (plan, case), turn in zip(in_turn(list(PLANS), MODELS), cycle(TURNS), strict=False)
    # so each model has plans of each axis and each turn
} | {("gpt", "dp2-tp2", "fp16", 3), ("tied", "dp2-tp2", "fp32", 3), ("gpt", "cp2-compiled", "fp32", 1)}
# bf16 and fp16: what leaves a layer is rounded on each rank before it is summed
TOLERANCE = {
    "fp64": (1e-9, 1e-9, 1e-9),
    "fp32": (1e-6, 1e-5, 2e-5),
    "bf16": (2e-2, 5e-2, 6e-2),
    "fp16": (3e-3, 2e-2, 1e-2),
}
WIDER = {
    (case, "bf16"): (4e-2, 2e-1, 6e-1) for case in ("mixtral", "moe", "moe-capacity")
}  # a token near the border of two experts goes to the other one


def run(world, case: str, precision: str, accumulation: int, plan: str) -> Trace:
    more = {"tensor_rules": {"": "whole"}} if plan == "all-tokens" else {}
    if plan.startswith("overlap"):
        more = {"tensor_rules": {"": "overlap"}}
    return trained(world, case, precision, accumulation, PLANS[plan], plan, plan in ALIKE, **more)


@pytest.mark.parametrize(("case", "plan", "precision", "accumulation"), thinned(ROWS, COVERING))
def test_a_cut_model_equals_one_process(case, plan, precision, accumulation):
    traces = run_ranks(run, size_of(PLANS[plan]), case, precision, accumulation, plan)
    check_alike(traces)
    bounds = WIDER.get((case, precision), TOLERANCE[precision])
    compare(traces[0], one_process(case, precision, accumulation, plan in ALIKE), *bounds)


CUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "dp2-tp2-zero2": {"dp": 2, "tp": 2, "zero": 2},
    "dp2-tp2-zero3": {"dp": 2, "tp": 2, "zero": 3},
    "dp2": {"dp": 2},
    "cp2-tp2": {"cp": 2, "tp": 2, "zero": 1},
    "dp4-ep2-zero2": {"dp": 4, "ep": 2, "zero": 2},
    "dp2-ep2-tp2": {"dp": 2, "ep": 2, "tp": 2},
    "ep4": {"dp": 4, "ep": 4},
    "ep2-tp2-offload": {"dp": 2, "ep": 2, "tp": 2, "memory": {}},
}
SPREAD = [
    ("one", "ep4"),
    ("ep4", "dp2-ep2-tp2"),
    ("dp2-ep2-tp2", "dp4-ep2-zero2"),
    ("dp4-ep2-zero2", "cp2-tp2"),
    ("tp2", "dp4-ep2-zero2"),
]
GOING_ON = [
    ("cp2-tp2", "tp4"),
    ("one", "tp4"),
    ("tp2", "dp2-tp2-zero3"),
    ("dp2-tp2-zero3", "one"),
    ("tp4", "dp2-tp2-zero2"),
    ("dp2-tp2-zero2", "dp2"),
    ("dp2", "tp2"),
]
KINDS = [("gpt-rotary-dropout", "fp32"), ("gpt2", "bf16"), ("mixtral", "fp32")]
WITH_EXPERTS = [("moe-capacity", "fp32"), ("mixtral", "bf16"), ("moe", "bf16")]
CHECKPOINTS = [(*cuts, *kind) for cuts, kind in [*product(GOING_ON, KINDS), *product(SPREAD, WITH_EXPERTS)]]
SOME = {(*cuts, *kind) for cuts, kind in [*in_turn(GOING_ON, KINDS), *in_turn(SPREAD, WITH_EXPERTS)]}


def state_of(running: Engine) -> dict[str, torch.Tensor]:
    """Masters and optimizer state, whole."""
    found = {f"master {name}": value for name, value in gathered(running, dict(running.optimizer.parameters)).items()}
    for key in ("exp_avg", "exp_avg_sq"):
        tensors = {name: value for (name, each), value in running.optimizer.state_tensors().items() if each == key}
        found |= {f"{key} {name}": value for name, value in gathered(running, tensors).items()}
    return found


def train_and_save(world, case: str, precision: str, cut: str, directory: Path) -> dict[str, torch.Tensor]:
    running = under(world, case, precision, 1, CUTS[cut])
    for batch in running.batches(CASES[case].data(), steps=3):
        running.step(batch)
    running.save(directory)
    found = state_of(running)
    running.close()
    return found


def load_and_go_on(
    world, case: str, precision: str, cut: str, directory: Path
) -> tuple[dict[str, torch.Tensor], list[float]]:
    running = under(world, case, precision, 1, CUTS[cut])
    running.load(directory)
    found = state_of(running)
    losses = [running.step(batch).loss for batch in running.batches(CASES[case].data(), steps=2)]
    running.close()
    return found, losses


@pytest.mark.parametrize(("before", "after", "case", "precision"), thinned(CHECKPOINTS, SOME))
def test_a_checkpoint_goes_on_under_another_cut_with_the_same_bits(before, after, case, precision, tmp_path):
    sizes = [Plan(**CUTS[cut]).size for cut in (before, after)]
    saved = run_ranks(train_and_save, sizes[0], case, precision, before, tmp_path)[0]
    for found, losses in run_ranks(load_and_go_on, sizes[1], case, precision, after, tmp_path):
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], value) for name, value in saved.items())
        bounds = WIDER.get((case, precision), TOLERANCE[precision])
        assert losses == pytest.approx(one_process(case, precision, 1).losses[3:5], rel=bounds[0])


def exports(world, case: str, cut: str, directory: Path) -> None:
    running = under(world, case, "fp32", 1, CUTS[cut])
    running.export(directory / cut)
    running.close()


@pytest.mark.parametrize(
    ("case", "cuts"),
    [
        ("gpt", ["tp2", "dp2-tp2-zero3"]),
        ("mixtral", ["tp2", "dp2-tp2-zero3", "dp4-ep2-zero2", "dp2-ep2-tp2"]),
        ("moe", ["ep4", "dp2-ep2-tp2", "ep2-tp2-offload"]),
    ],
)
def test_the_export_of_a_cut_model_is_that_of_one_process(case, cuts, tmp_path):
    from safetensors.torch import load_file

    for cut in ("one", *cuts):
        run_ranks(exports, Plan(**CUTS[cut]).size, case, cut, tmp_path)
    files = {cut: load_file(next((tmp_path / cut).glob("*.safetensors"))) for cut in ("one", *cuts)}
    for cut in cuts:
        assert files[cut].keys() == files["one"].keys()
        assert all(torch.equal(files[cut][name], value) for name, value in files["one"].items())


def exchanged(world, plan: dict[str, Any], exchange: str) -> list[float]:
    running = engine("gpt", "fp64", 1, world=world, plan=Plan(**plan, exchange=exchange), clip=None, microbatch=None)
    losses = [running.step(batch).loss for batch in running.batches(CASES["gpt"].data(), steps=8)]
    evaluated = running.evaluate(CASES["gpt"].data()).loss
    running.close()
    return [*losses, evaluated]


@pytest.mark.parametrize("exchange", ["diloco", "decentralized"])
def test_exchange_algorithms_go_on_over_dp(exchange):
    """Two replicas that are cut do what two whole ones do, also where they drift apart."""
    whole = run_ranks(exchanged, 2, {"dp": 2}, exchange)
    cut = run_ranks(exchanged, 4, {"dp": 2, "tp": 2}, exchange)
    for rank, losses in enumerate(cut):
        # NaN: it had no sample of a short batch
        assert losses == pytest.approx(whole[rank // 2], rel=1e-9, nan_ok=True)


def derivatives(world, case: str, plan: dict[str, Any], rules: dict[str, str] | None) -> tuple[torch.Tensor, ...]:
    """Value, slope, gradient and a product with the Hessian, in the same direction under any plan."""
    running = engine(case, "fp64", 1, world=world, plan=Plan(**plan), tensor_rules=rules)
    return derivatives_of(running, case)


@cache
def derivatives_alone(case: str) -> tuple[torch.Tensor, ...]:
    return run_ranks(derivatives, 1, case, {}, None)[0]


@pytest.mark.parametrize(
    ("case", "plan", "rules"),
    [
        ("gpt", {"tp": 2}, None),
        ("gpt", {"dp": 2, "tp": 2}, {"": "whole"}),
        ("gpt", {"tp": 2}, {"": "overlap"}),
        ("tied", {"tp": 4}, None),
        ("llama", {"tp": 4}, None),
        ("gpt", {"dp": 2, "cp": 2}, None),
        ("llama", {"cp": 2, "tp": 2}, None),
        ("gpt", {"cp": 2, "tp": 2, "context": "ring"}, None),
    ],
    ids=str,
)
def test_forward_mode_and_products_with_the_hessian_pass_through(case, plan, rules):
    bound = 1e-5 if case == "llama" else 1e-9  # its RMSNorm computes in fp32 whatever it is given
    for ours in run_ranks(derivatives, Plan(**plan).size, case, plan, rules):
        torch.testing.assert_close(ours, derivatives_alone(case), rtol=bound, atol=bound * 1e-3)


def short_rows(world, plan: dict[str, Any], tokens: int, rules: dict[str, str] | None = None) -> list[float]:
    data = [{key: value[:tokens] for key, value in row.items()} for row in CASES["gpt-rotary-dropout"].data()]
    running = engine("gpt-rotary-dropout", "fp64", 1, world=world, plan=Plan(**plan), tensor_rules=rules)
    return train(running, data, 4).losses


@cache
def short_rows_alone(tokens: int) -> list[float]:
    return run_ranks(short_rows, 1, {}, tokens)[0]


@pytest.mark.parametrize("tokens", [7, 3])
@pytest.mark.parametrize("rules", [None, {"": "overlap"}], ids=str)
def test_rows_that_do_not_come_out_even_among_the_ranks(tokens, rules):
    """Sequence parallel: of 7 tokens four ranks have 2, 2, 2 and 1, of 3 the last one has none."""
    for losses in run_ranks(short_rows, 4, {"tp": 4}, tokens, rules):
        assert losses == pytest.approx(short_rows_alone(tokens), rel=1e-9)


def refused(world, plan: dict[str, Any], more: dict[str, Any], case: str) -> str:
    with pytest.raises(UserError) as failure:
        engine(case, more.pop("precision", "fp32"), 1, world=world, plan=Plan(**plan), **more)
    return str(failure.value)


@pytest.mark.parametrize(
    ("case", "more", "message"),
    [
        ("gpt", {"tensor_rules": {"blocks.*.mpl.up": "column"}}, "the model has no module of such a name"),
        ("gpt", {"tensor_rules": {"blocks.*": "sequence"}}, 'it is said of the whole model, tensor_rules[""]'),
        ("gpt", {"precision": "fp8"}, "fp8"),
    ],
)
def test_what_cannot_be_cut_is_refused_alike_on_every_rank(case, more, message):
    first, second = run_ranks(refused, 2, {"tp": 2}, more, case)
    assert first == second and message in first


def whole_matrices(world) -> str:
    with pytest.raises(UserError) as failure:
        Engine(
            CASES["gpt"].factory,
            CASES["gpt"].loss,
            partial(torch.optim.Adafactor, lr=1e-2),
            Plan(tp=2),
            global_batch=4,
            world=world,
        )
    return str(failure.value)


def test_optimizers_of_whole_matrices_are_refused():
    assert all("looks at whole parameters" in message for message in run_ranks(whole_matrices, 2))


def penalised(world, beside: bool) -> str:
    """`beside`: the penalty is an auxiliary loss. No gradient goes through it, so that only the sums show it."""

    def loss(model: nn.Module, mb: Any) -> Any:
        total, count = causal_lm(model, mb)[:2]
        penalty = 0.1 * sum(each.detach().square().sum() for each in model.parameters())
        return (total, count, {"penalty": penalty}) if beside else (total + count * penalty, count)

    case = CASES["gpt"]
    running = Engine(case.factory, loss, case.optimizer, Plan(tp=2), global_batch=4, world=world)
    with pytest.raises(UserError) as failure:
        running.step(next(running.batches(case.data())))
    running.close()
    return str(failure.value)


@pytest.mark.parametrize(("beside", "what"), [(False, "the loss sums"), (True, "an auxiliary loss sums")])
def test_a_loss_that_reads_weights_of_which_ranks_have_parts_is_refused(beside, what):
    """Each rank reported a loss of its own."""
    said = run_ranks(penalised, 2, beside)
    assert said[0] == said[1] and what in said[0]
    assert "on ranks that share matrices: it reads weights, of which each has a part" in said[0]


def packed(case: str) -> list[dict[str, torch.Tensor]]:
    """Rows of three documents whose borders lie where no rank's tokens begin."""
    rows = []
    for number, row in enumerate(CASES[case].data()):
        border = 3 + number % 4
        lengths = [border, 12 - border - 1, 1]
        documents = torch.tensor([d for d, length in enumerate(lengths) for _ in range(length)])
        positions = torch.cat([torch.arange(length) for length in lengths])
        rows.append({**row, "document_ids": documents, "position_ids": positions})
    return rows


def on_documents(world, case: str, plan: dict[str, Any]) -> list[float]:
    running = engine(case, "fp64", 1, world=world, plan=Plan(**plan))
    return train(running, packed(case), 4).losses


@pytest.mark.parametrize("case", ["gpt", "bert", "llama"])
def test_tokens_of_shared_rows_see_their_own_document(case):
    """Llama knows documents by positions that begin again."""
    reference = run_ranks(on_documents, 1, case, {})[0]
    assert reference != short_rows_alone(12)
    for plan in ({"cp": 2}, {"cp": 2, "tp": 2}, {"cp": 2, "context": "ring"}, {"cp": 3, "context": "ring"}):
        for losses in run_ranks(on_documents, Plan(**plan).size, case, plan):
            assert losses == pytest.approx(reference, rel=1e-6 if case == "llama" else 1e-9)


def without_positions(model: nn.Module, mb: dict[str, torch.Tensor]) -> Any:
    return causal_lm(model, {key: value for key, value in mb.items() if key != "position_ids"})


class Mixing(nn.Module):
    """Tokens see each other by what `between` makes of [B, T, D]."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.words, self.between, self.head = nn.Embedding(61, 16), between, nn.Linear(16, 61)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.between(self.words(input_ids)))


class Averaging(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ x


class Scaled(Attention):
    """With a parameter that no rule knows."""

    def __init__(self) -> None:
        super().__init__(32, 4, 4, bias=True, causal=True, dropout=0.0)
        self.scale = nn.RMSNorm(8)


def with_a_norm_of_each_head() -> nn.Module:
    model = CASES["gpt"].factory()
    model.blocks[0].attention = Scaled()
    return model


def eager() -> nn.Module:
    model = from_config(LLAMA)()
    model.config._attn_implementation = "eager"
    return model


def with_a_loss_of_its_own(model: nn.Module, mb: dict[str, torch.Tensor]) -> Any:
    total, count = causal_lm(model, mb)
    return total, count, {"own": total * 0}


def with_an_embedding_by_frequency():
    model = CASES["gpt"].factory()
    model.token_embedding.scale_grad_by_freq = True
    return model


def with_a_buffer_of_its_weights():
    model = CASES["gpt"].factory()
    nn.utils.parametrizations.spectral_norm(model.blocks[0].mlp.down)
    return model


STRANGE = {
    "by-hand": lambda: Mixing(Averaging()),
    "convolution": lambda: Mixing(nn.Conv1d(12, 12, 3, padding=1)),
    "head-norm": with_a_norm_of_each_head,
    "eager": eager,
    "by-frequency": with_an_embedding_by_frequency,
    "spectral": with_a_buffer_of_its_weights,
}


def steps_refused(world, case: str, plan: dict[str, Any], more: dict[str, Any]) -> str:
    case, loss = ("gpt", with_a_loss_of_its_own) if case == "mixing-losses" else (case, None)
    factory = STRANGE.get(case)
    chosen = CASES["gpt" if factory else case]
    rows, more = more.get("rows", {}), {key: value for key, value in more.items() if key != "rows"}
    data = [{**row, **rows} for row in chosen.data()]
    with pytest.raises(UserError) as failure:
        options = {"global_batch": 4, "microbatch": 2, "loss": loss or chosen.loss, **more}
        running = Engine(
            factory or chosen.factory, options.pop("loss"), chosen.optimizer, Plan(**plan), world=world, **options
        )
        running.step(next(running.batches(data)))
    return str(failure.value)


@pytest.mark.parametrize(
    ("case", "plan", "more", "message"),
    [
        ("lstm", {"cp": 2}, {}, "takes no position_ids"),
        ("resnet-batchnorm", {"cp": 2}, {}, "BatchNorm would count them as samples"),
        ("by-frequency", {"cp": 2}, {}, "divide its gradients by how often a token is in that part"),
        ("spectral", {"cp": 2}, {}, 'Engine(buffers="averaged")'),
        ("mixing-losses", {"cp": 2}, {}, "auxiliary losses ('own',)"),
        ("gpt", {"cp": 2, "exchange": "diloco"}, {}, "lets ranks train apart that share each row"),
        ("llama", {"cp": 2}, {"rows": {"attention_mask": torch.tensor([1] * 9 + [0] * 3)}}, "takes no attention_mask"),
        ("gpt", {"cp": 3}, {}, "deals out 4 heads"),
        ("gpt-rotary-dropout", {"cp": 2, "context": "ring"}, {}, "has no dropout inside attention"),
        ("gpt", {"cp": 4, "context": "ring"}, {}, "do not come out even in 8 pieces; take rows of 16"),
        ("gpt", {"cp": 5}, {}, "do not come out even in 5 pieces; take rows of 15"),
        ("gpt", {"cp": 2}, {"rows": {"labels": torch.tensor(3)}}, "are not of tokens (2, 12)"),
        (
            "llama",
            {"cp": 2},
            {"rows": {"input_ids": torch.tensor([3, 4]), "labels": torch.tensor([4, 5])}},
            "rows of 2 tokens leave each rank one",
        ),
        ("gpt", {"cp": 2, "exchange": "adasum"}, {}, "attention mixes those of ranks that share a row"),
        ("eager", {"cp": 2}, {}, 'is computed as "eager"'),
        ("by-hand", {"cp": 2}, {}, "called no torch.nn.functional.scaled_dot_product_attention"),
        ("convolution", {"cp": 2}, {}, "looks at neighbouring tokens"),
        ("gpt", {"cp": 2}, {"sync_bn": True, "microbatch": None}, "does not go with sync_bn"),
        (
            "head-norm",
            {"tp": 2},
            {"tensor_rules": {"": "whole"}},
            "attention.scale lies inside attention that is cut, and no rule names it",
        ),
        ("gpt", {"dp": 2, "tp": 2, "exchange": "adasum"}, {}, "it weighs replicas by products of whole parameters"),
        ("gpt", {"dp": 2, "tp": 2, "exchange": "async_average"}, {}, "its rounds begin by the clock"),
    ],
    ids=str,
)
def test_plans_that_cannot_be_say_why(case, plan, more, message):
    answers = run_ranks(steps_refused, Plan(**plan).size, case, plan, more)
    assert all(message in answer for answer in answers), answers


def islands(world, plan: dict[str, Any]) -> list[float]:
    exchange = {"name": "islands", "ranks": 2, "across": {"name": "diloco", "every": 2}}
    running = engine("gpt", "fp64", 1, world=world, plan=Plan(**plan, exchange=exchange), microbatch=None)
    return [running.step(batch).loss for batch in running.batches(CASES["gpt"].data()[:36], steps=6)]


def test_islands_of_ranks_that_share_rows_train_apart():
    losses = run_ranks(islands, 4, {"dp": 2, "cp": 2})
    assert losses[0] == losses[1] != losses[2] == losses[3] and losses[0][-1] < losses[0][0]


def sent_in_a_step(world, plan: dict[str, Any], rules: dict[str, str] | None) -> dict[str, int]:
    """Bytes of payload in the second step, by purpose."""
    running = engine("gpt", "fp64", 1, world=world, plan=Plan(**plan), tensor_rules=rules)
    batches = running.batches(CASES["gpt"].data())
    running.step(next(batches))
    purposes = ("activations", "logits", "attention")
    before = {purpose: world.ledger.total(purpose=purpose).payload for purpose in purposes}
    running.step(next(batches))
    return {purpose: world.ledger.total(purpose=purpose).payload - before[purpose] for purpose in purposes}


@pytest.mark.parametrize(
    ("plan", "rules"),
    [({"tp": 2}, None), ({"tp": 2}, {"": "whole"}), ({"cp": 2}, None), ({"cp": 2, "context": "ring"}, None)],
    ids=str,
)
def test_bytes_are_those_of_the_formula(plan, rules):
    """A global batch of 12 rows of 12 tokens, 32 channels, 2 blocks, fp64; whole activations are S bytes, and a block
    is entered and left twice."""
    S, layers, tokens = 12 * 12 * 32 * 8, 2, 12 * 12
    for sent in run_ranks(sent_in_a_step, 2, plan, rules):
        if "tp" in plan:
            ways = 2 if rules is None else 1  # gathers and reduce-scatters; an all-reduce is both
            assert sent["activations"] == ways * (4 * layers + 2) * S and sent["logits"] == 3 * tokens * 8
        elif "context" in plan:  # half of keys and values forward; backward again, and twice their gradients
            assert sent["attention"] == layers * (1 + 1 + 2) * S
        else:  # a rank's queries, keys, values and results, forward and backward
            assert sent["attention"] == layers * 2 * 4 * S // 2


def with_positions_alone(world, plan: dict[str, Any]) -> list[float]:
    data = [{**row, "position_ids": torch.arange(12) // 2} for row in CASES["gpt"].data()]
    running = engine("gpt", "fp64", 1, world=world, plan=Plan(**plan))
    return train(running, data, 3).losses


def test_positions_alone_make_no_documents_where_a_model_masks_by_document_ids():
    reference = run_ranks(with_positions_alone, 1, {})[0]
    assert run_ranks(with_positions_alone, 2, {"cp": 2})[0] == pytest.approx(reference, rel=1e-9)


def untold(world, case: str, plan: dict[str, Any]) -> list[float]:
    chosen = CASES[case]
    options = {"global_batch": 12, "microbatch": 3, "precision": "fp64", "world": world}
    running = Engine(chosen.factory, without_positions, chosen.optimizer, Plan(**plan), **options)
    data = packed(case) if case == "llama" else chosen.data()  # documents that the loss does not speak of
    return train(running, data, 3).losses


@pytest.mark.parametrize("case", ["gpt", "llama"])
def test_a_loss_need_not_say_where_tokens_stand(case):
    reference = run_ranks(untold, 1, case, {})[0]
    for context in ("ulysses", "ring"):
        found = run_ranks(untold, 2, case, {"cp": 2, "context": context})[0]
        assert found == pytest.approx(reference, rel=1e-6 if case == "llama" else 1e-9)


def after_a_step(world) -> None:
    """A step that fails and an objective leave the model to whoever calls it: rows are whole again."""
    running = engine("gpt", "fp64", 1, world=world, plan=Plan(cp=2))
    batch = next(running.batches(CASES["gpt"].data()))
    ids = CASES["gpt"].data()[0]["input_ids"][None]
    whole = running.module(ids)
    running.objective(batch)({name: value.detach() for name, value in running.parameters.items()})
    torch.testing.assert_close(running.module(ids), whole)
    with pytest.raises(IndexError):
        bad = [{**row, "input_ids": row["input_ids"] + 1000} for row in CASES["gpt"].data()]
        running.step(next(running.batches(bad)))
    torch.testing.assert_close(running.module(ids), whole)


def test_outside_of_a_step_rows_are_whole():
    run_ranks(after_a_step, 2)


def out_of_range(world, key: str) -> str:
    running = engine("gpt", "fp64", 1, world=world, plan=Plan(tp=2))
    data = [{**row, key: row[key].clamp(min=0) + 61} for row in CASES["gpt"].data()]
    with pytest.raises(IndexError) as failure:
        running.step(next(running.batches(data)))
    return str(failure.value)


@pytest.mark.parametrize("key", ["input_ids", "labels"])
def test_ids_that_no_rank_has_are_errors(key):
    assert all("where there are 61" in message for message in run_ranks(out_of_range, 2, key))
