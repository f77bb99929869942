"""What a rehearsal says of a step is what the engine does: calls and bytes by its ledger, and the most memory by
torch's MemTracker, to the byte, for rows of the parity matrix.

The rows are those that cover its pairs; a handful run in every suite. MemTracker sees what operations on the calling
thread make, and storages whose memory comes and goes (weights that pass, masters that are closed); so the engine's
lanes run in that thread here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from shoal import Engine, Plan, UserError
from shoal.assembly.recipe import Recipe
from shoal.comm import Link, World
from shoal.comm.lane import EXCHANGE, Lane, Ticket
from shoal.comm.outside import outside_checkpoints
from shoal.comm.silent import AtOnce
from shoal.models import build
from shoal.pipeline.p2p import Mail, Message
from shoal.planner import Subject
from shoal.planner.ask import numbers_of
from shoal.planner.degrees import Spread
from shoal.planner.prepare import Untraced
from shoal.planner.profile import profile
from shoal.planner.rehearsal import STEADY, Seen, Step, more_than, rehearse, tensors_of
from shoal.planner.search import Search
from shoal.planner.task import Choice, Task
from shoal.precision import precision
from tests.parity import test_experts, test_mesh, test_stages
from tests.parity.cases import CASES, arguments, engine
from tests.parity.covering import thinned
from tests.parity.test_parity import COVERING, options_of
from tests.planner.models import cluster
from tests.pool import apart, run_ranks

ALWAYS = [
    ("mlp-dropout", 2, "bf16", 3, "zero2"),
    ("auxiliary", 2, "fp32", 1, "offload"),
    ("gpt-rotary-dropout", 2, "fp64", 1, "deferred"),
    ("gpt", 2, "bf16", 1, "disk"),
    ("gpt", 2, "fp32", 1, "budget-hosts"),
]
BY_VALUES = ("moe", "mixtral", "unused-frozen")
"""Models of which values decide what is allocated: how many tokens an expert is given, whether a layer runs."""
ROWS = sorted({*ALWAYS, *COVERING})
DEEP = {"name": "gpt", "layers": 4, "d_model": 64, "heads": 4, "vocab_size": 64, "sequence": 8, "tied": False}
DEFAULTS = {name: each.default for name, each in inspect.signature(Engine.__init__).parameters.items()}
CUTS = {"mesh": test_mesh.PLANS, "experts": test_experts.PLANS, "stages": test_stages.PLANS}
"""Plans that cut the model."""
BY_ROUTES = ("moe", "moe-capacity", "moe-top1", "moe-deep", "mixtral")
"""Cases whose tokens go to experts by their values."""
TIED = ("gpt-deep", "llama-deep")
"""Cases with weights that the first and the last stage share."""
REFUSES = ("mixtral", "experts", "tp4")
"""A case and plan that asks which experts have tokens, and cannot be rehearsed."""
CUT_ALWAYS = [
    ("gpt-rotary-dropout", "mesh", "dp2-tp2", "fp32", 3),
    ("mlp-dropout", "stages", "pp2-zb1p", "bf16", 3),
    ("lstm-deep", "stages", "recompute", "fp32", 1),
]
CUT_ROWS = sorted(
    {
        *CUT_ALWAYS,
        *((case, "mesh", *row) for case, *row in test_mesh.COVERING),
        *((case, "stages", *row) for case, *row in test_stages.COVERING),
        *((case, "experts", *row) for case, *row in test_experts.COVERING),
    }
)


def unseen(case: str, plan: dict[str, Any]) -> bool:
    """Whether MemTracker cannot see what ranks of an engine take. Of weights that stages share one sums the gradients
    while another waits for its messages: in the caller's thread each would wait for the other, unless it sums when it
    has to, and until then it keeps what zero 3 has gathered. There the lanes stay threads, which it does not see."""
    return case in TIED and plan.get("pp", 1) > 1 and plan.get("zero") == 3


def of_routes(step: Step) -> tuple[int, dict[Any, Any]]:
    """What of a step does not depend on how many tokens an expert is given: what is held, how often ranks meet, and
    the bytes of all but tokens."""
    calls = {flow: each if flow.purpose != "experts" else each.calls for flow, each in step.traffic.items()}
    return step.held, calls


def rules_of(plan: str) -> dict[str, Any]:
    """How layers are cut beside those that are known, as in the matrix of these plans."""
    found = "whole" if plan == "all-tokens" else "overlap" if plan.startswith("overlap") else None
    return {} if found is None else {"tensor_rules": {"": found}}


class Patient(Lane):
    """A lane that runs what it is given when it is awaited, in the caller's thread: in a pipeline ranks that ran it at
    once could wait for each other in a circle."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._works: list[tuple[Callable[[], None], Ticket]] = []

    def another(self) -> Lane:
        return Patient(self._device, self.ledger)

    def submit(self, work: Callable[[], None], name: str = "") -> Ticket:
        self._works.append((work, Ticket(self)))
        return self._works[-1][1]

    def wait(self, ticket: Ticket | None = None, cause: str = EXCHANGE) -> None:
        while self._works and (ticket is None or not ticket.done):
            work, own = self._works.pop(0)
            with outside_checkpoints():
                work()
            own.done = True

    def drain(self) -> None:
        self.wait()

    close = drain


@contextmanager
def copies_sent() -> Iterator[None]:
    """What is sent to another stage is copied unseen, and not held until it has left."""
    send = Mail.send

    def sent(self: Mail, message: Message, to: int, tensors: Sequence[Tensor]) -> None:
        with _disable_current_modes():
            copies = [each.detach().clone() for each in tensors]
        send(self, message, to, copies)

    Mail.send = sent  # type: ignore[method-assign]
    try:
        yield
    finally:
        Mail.send = send  # type: ignore[method-assign]


def real(
    world: World, case: str, precision: str, accumulation: int, plan: dict[str, Any], name: str, more: dict[str, Any]
) -> tuple[Step, Link | None]:
    """A steady step of an engine, and the link that it has measured."""
    with TemporaryDirectory() as directory:
        shared = world.everyone.broadcast_object(directory)
        own = {**plan, "memory": {**plan["memory"], "disk": shared}} if "disk" in (plan.get("memory") or {}) else plan
        try:
            return stepped(world, case, precision, accumulation, own, name, more)
        finally:
            world.everyone.barrier()


def stepped(
    world: World, case: str, precision: str, accumulation: int, plan: dict[str, Any], name: str, more: dict[str, Any]
) -> tuple[Step, Link | None]:
    """What `real` does, with the plan as it is."""
    if name.endswith("hosts"):
        world = apart(world)
    threads = world.lane
    if not unseen(case, plan):
        kind = Patient if plan.get("pp", 1) > 1 else AtOnce
        world.lane = lambda: kind(world.device, world.ledger)  # type: ignore[method-assign]
        world.host_lane = lambda: AtOnce(world.device, world.ledger)  # type: ignore[method-assign]
    running = engine(case, precision, accumulation, world=world, plan=Plan(**plan), **more)
    world.lane = threads  # type: ignore[method-assign]  # of the pipeline, which is connected in the first step
    try:
        with copies_sent():
            for batch in running.batches(CASES[case].data(), steps=STEADY):
                before = running.ledger.traffic
                seen = Seen(tensors_of(running._memory, running._trainer, running.module))
                with seen:
                    running.step(batch)
        return Step(more_than(before, running.ledger.traffic), seen.held, seen.most), running.parts.link
    finally:
        running.close()


def recipe(case: str, precision: str, accumulation: int, **more: Any) -> Recipe:
    own: dict[str, Any] = {"loss": CASES[case].loss, "optimizer": CASES[case].optimizer}
    return Recipe.taken_from({**DEFAULTS, **own, **arguments(precision, accumulation), **more})


def both(
    case: str, precision: str, accumulation: int, plan: dict[str, Any], name: str, **more: Any
) -> Iterator[tuple[Step, Step]]:
    """What the first and the last rank were rehearsed to do, and what they did."""
    own, whole = recipe(case, precision, accumulation, **more), Plan(**plan)
    steps = run_ranks(real, whole.size, case, precision, accumulation, plan, name, more)
    for rank in sorted({0, whole.size - 1}):
        step, link = steps[rank]
        one_host = not name.endswith("hosts")
        found = rehearse(CASES[case].factory, own, whole, CASES[case].data(), rank, one_host=one_host, link=link)
        yield found[-1], step


@pytest.mark.parametrize(("case", "size", "precision", "accumulation", "plan"), thinned(ROWS, ALWAYS))
def test_a_step_is_as_it_was_rehearsed(case, size, precision, accumulation, plan):
    options = {"dp": size, **options_of(plan, size)}
    for found, step in both(case, precision, accumulation, options, plan):
        assert found.traffic == step.traffic
        assert (found.held, found.most) == (step.held, step.most) or case in BY_VALUES


@pytest.mark.parametrize(("case", "table", "plan", "precision", "accumulation"), thinned(CUT_ROWS, CUT_ALWAYS))
def test_a_step_of_a_cut_model_is_as_it_was_rehearsed(case, table, plan, precision, accumulation):
    if (case, table, plan) == REFUSES:
        with pytest.raises(UserError, match="decides by values how the model goes on"):
            list(both(case, precision, accumulation, CUTS[table][plan], plan))
        return
    for found, step in both(case, precision, accumulation, CUTS[table][plan], plan, **rules_of(plan)):
        if case in BY_ROUTES:
            assert of_routes(found) == of_routes(step)
        else:
            assert found.traffic == step.traffic
            assert (found.held, found.most) == (step.held, step.most) or unseen(case, CUTS[table][plan])


def test_weights_that_ranks_divide_and_gather_for_a_block_that_runs_again():
    options = {"dp": 2, "tp": 2, "zero": 3, "recompute": "full"}
    for found, step in both("gpt", "fp32", 1, options, "recompute-hosts"):
        assert found == step


def test_pages_on_a_disk_that_are_updated_during_the_next_forward_beside_activations_on_the_host():
    options = {"dp": 2, "zero": 1, "memory": {"disk": "a directory", "update": "deferred", "activations": 0.5}}
    for found, step in both("gpt", "bf16", 1, options, "disk"):
        assert found == step


@pytest.mark.fast
@pytest.mark.parametrize(
    "options", [{"pp": 2, "schedule": "2bw"}, {"pp": 2, "schedule": "pipedream"}, {"dp": 2, "buddy": 1}], ids=str
)
def test_plans_that_cannot_be_rehearsed_say_why(options):
    with pytest.raises(UserError, match="cannot be rehearsed: "):
        rehearse(CASES["mlp-dropout"].factory, recipe("mlp-dropout", "fp32", 1), Plan(**options), [])


@pytest.mark.fast
@pytest.mark.parametrize("plan", [Plan(), Plan(dp=2), Plan(pp=2)], ids=str)
def test_a_factory_that_fails_is_told_by_its_own_line(plan):
    """It was said that the model cannot be run without computing it."""

    def factory():
        return nn.Linear({"d": 4}["dim"], 4)

    own = f"{__file__}:{factory.__code__.co_firstlineno + 1}: "
    with pytest.raises(UserError, match="the model cannot be made: its factory raises KeyError at ") as error:
        rehearse(factory, recipe("mlp-dropout", "fp32", 2), plan, [])
    assert own in str(error.value) and not isinstance(error.value, Untraced)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("case", "plan", "rows", "more"),
    [
        ("mlp-dropout", {"dp": 2}, 6, {}),
        ("mlp-dropout", {"pp": 2}, 1, {}),
        ("resnet-batchnorm", {"dp": 2}, 6, {"sync_bn": True}),
    ],
)
def test_a_microbatch_that_nobody_gives_is_that_of_the_engine(case, plan, rows, more):
    """It was as many rows as there are ranks."""

    def step(microbatch: int | None) -> Step:
        own = recipe(case, "fp32", 1, microbatch=microbatch, **more)
        return rehearse(CASES[case].factory, own, Plan(**plan), CASES[case].data(), steps=1)[-1]

    assert step(None) == step(rows)


def test_a_rank_of_several_stages_sends_what_the_closed_form_counts():
    """Of each stage once a microbatch."""
    made, plan = build(DEEP), Plan(pp=2, dp=2, zero=2, schedule="interleaved")
    kind, adam = precision("fp32"), partial(torch.optim.AdamW, lr=1e-3)
    rows = [{key: torch.zeros(8, dtype=torch.int64) for key in ("input_ids", "labels")}] * 8
    traced = profile(Subject(made.factory, made.loss, rows[0], 1, kind, Plan()), {})
    numbers = replace(numbers_of(kind, adam), dtype=torch.bfloat16)  # of which there is a peak
    asked = Search(Task(traced, cluster(hosts=4, count=1), 8, numbers, 2, pins={"recompute": "none"}))
    counted = asked.estimate(Choice(Spread.of(plan), 2, zero=2, schedule="interleaved", chunks=2)).wire["copies"]
    own = {"loss": made.loss, "optimizer": adam, "global_batch": 8, "microbatch": 2}
    (step,) = rehearse(made.factory, Recipe.taken_from({**DEFAULTS, **own}), plan, rows, 0, steps=1, one_host=False)
    sent = [each.payload for flow, each in step.traffic.items() if flow.purpose in ("gradients", "weights")]
    assert counted == pytest.approx(sum(sent), rel=0.01)
