"""Steps of the engine itself, on fake tensors and in a world whose other ranks are not there: what a step sends, and
the most memory that it has at a time, to the byte. Nothing is computed, and nothing allocated.

The phases of the assembly run as in `Engine`, and so do steps: whatever they come to allocate or to send, a rehearsal
has it too. Four things stand in for what fake tensors lack: a number that is read is 1 (all of a mask is True, any
other truth False: nothing overflows, no ranks differ), an address is made up, kernels in C do nothing, and nothing goes
to a disk. What depends on values beyond that cannot be rehearsed: which layers run, how many tokens each expert is
given, whether two ranks have the same rows. What runs beside the computation runs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.assembly.assembled import Assembled, closing
from shoal.assembly.compatibility import check
from shoal.assembly.memory import Memory, lay_out
from shoal.assembly.model import built_alike, localize, whole_model
from shoal.assembly.ranks import ranks
from shoal.assembly.rebuild import Rebuild
from shoal.assembly.recipe import Recipe
from shoal.assembly.trainer import Trainer, trainer
from shoal.comm import Link
from shoal.comm.ledger import Flow, Traffic
from shoal.comm.links import assume
from shoal.comm.silent import Heard, OfManyHosts, OfOneHost, SilentWorld
from shoal.data import Cursor, map_batches
from shoal.errors import UserError
from shoal.mesh import Mesh
from shoal.module.kept_outside import nothing_kept_outside
from shoal.native import pretending
from shoal.pipeline import schedule_of
from shoal.plan import Plan
from shoal.planner.made_up import Values, addresses, as_if_real
from shoal.planner.made_up_disk import MadeUpDisk
from shoal.planner.prepare import in_one_line, making
from shoal.training.microbatches import choose_microbatch

CPU = torch.device("cpu")
USUAL = ((2**10, 1e-4), (2**24, 1e-2))
"""Bytes and seconds of all-reduces, where nobody has measured them."""
STEADY = 3
"""Steps until one is as all that follow: the first agrees on names and records uses, the second has the optimizer's
state from its beginning."""


@dataclass(frozen=True)
class Step:
    """What one step sends, by flow, and bytes of tensors: `held` before it (weights, gradients, masters, optimizer
    state, buffers, loans that stay), `most` at any moment of it."""

    traffic: Mapping[Flow, Traffic]
    held: int
    most: int


def rehearse(
    model: nn.Module | Callable[[], nn.Module],
    recipe: Recipe,
    plan: Plan,
    dataset: Any,
    rank: int = 0,
    steps: int = STEADY,
    one_host: bool = True,
    link: Link | None = None,
) -> list[Step]:
    """Rehearses the first steps of `rank` on the samples of `dataset`, a map-style one whose shapes alone count.

    `one_host`: ranks share memory; else each is on a host of its own. `link`: what an engine would measure of them, for
    the size of chunks. Raises UserError, in one line, for what the engine refuses, for a model that asks for values,
    and for a factory that fails.
    """
    _check(plan, model)

    def run(rank: int, heard: Heard | None, rehearsed: Callable[[Assembled, Callable[[], Any]], Any]) -> list[Any]:
        with ExitStack() as stack:
            world = SilentWorld(rank, plan.size, OfOneHost if one_host else OfManyHosts, heard)
            assembled = stack.enter_context(assembled_for(model, recipe, plan, world, link))
            rebuild = Rebuild(assembled.local, assembled.memory, assembled.trainer)

            def step(batch: Any) -> None:
                assembled.trainer.runner.run(batch)
                rebuild.after_step(dict)

            order = Cursor(len(dataset), recipe.global_batch, recipe.seed)
            batches = islice(map_batches(dataset, order, 0, recipe.collate), steps)
            return [rehearsed(assembled, partial(step, batch)) for batch in batches]

    with torch.random.fork_rng(devices=[]), in_one_line():
        return run(rank, _heard(plan, rank, run), _rehearsed)


def _heard(plan: Plan, rank: int, run: Callable[..., Any]) -> Heard | None:
    """What ranks tell each other that differ from `rank`, from a run of one of each kind: of a pipeline one of each
    stage (what travels between them), and for one that may have no microbatch one that has (names of losses). None
    where all say the same."""
    mesh = Mesh(plan, rank, plan.size)
    shares = list(plan.shares) or [1.0] * plan.sample_ranks
    full = shares.index(max(shares)) if shares[mesh.replica] < max(shares) else mesh.replica
    if not plan.pipelined and full == mesh.replica:
        return None
    speaker = partial(mesh.standing_for, replica=full)
    heard = Heard(speaker)
    heard.run(lambda other: run(other, heard, lambda _, step: step()), sorted(set(map(speaker, range(plan.size)))))
    return heard


def _check(plan: Plan, model: nn.Module | Callable[[], nn.Module]) -> None:
    """Raises UserError for plans of which a part runs elsewhere than on the caller's thread."""
    reasons = {
        "each stage needs a model of its own: give a factory": plan.pipelined and isinstance(model, nn.Module),
        "without a flush results are told beside the computation": plan.pipelined and not schedule_of(plan, 1).flushes,
        "a buddy's snapshots travel beside the step": bool(plan.buddy) and plan.size > 1,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise UserError(f"the steps of this plan cannot be rehearsed: {reason}")


@contextmanager
def assembled_for(
    model: nn.Module | Callable[[], nn.Module], recipe: Recipe, plan: Plan, world: SilentWorld, link: Link | None
) -> Iterator[Assembled]:
    """What an engine would be made of, on fake tensors, inside the modes in which it can run."""
    with ExitStack() as stack:
        among = ranks(plan, world)
        assume(among.replicas, CPU, link or Link(among.replicas.name, among.replicas.size, "nothing", USUAL))
        with making():
            built = built_alike(model, recipe, among)
        whole = whole_model(built, recipe.param_groups)
        module = whole.built.module
        stack.enter_context(nothing_kept_outside(module))
        check(plan, recipe, module, whole.groups.options)
        rows = choose_microbatch(recipe.microbatch, recipe.global_batch, plan, module, recipe.sync_bn)
        local = localize(
            whole, among, recipe.precision, seed=recipe.seed, rules=recipe.tensor_rules, sync_bn=recipe.sync_bn,
            dropout=recipe.dropout,
        )  # fmt: skip
        fakes = (each.fake_mode for each in (*module.parameters(), *module.buffers()) if isinstance(each, FakeTensor))
        mode = next(fakes, None) or FakeTensorMode()
        mode.allow_non_fake_inputs = True
        for each in (mode, Values(), addresses(), pretending(), as_if_real()):
            stack.enter_context(each)
        memory = lay_out(local, recipe, rows, stack, fill=False, disk=MadeUpDisk)
        assembled = Assembled(recipe, rows, local, memory, trainer(local, memory, recipe, rows))
        stack.enter_context(closing(assembled))
        yield assembled


def _rehearsed(assembled: Assembled, step: Callable[[], Any]) -> Step:
    ledger = assembled.local.ranks.world.ledger
    before, seen = ledger.traffic, Seen(tensors_of(assembled.memory, assembled.trainer, assembled.local.module))
    with seen:
        step()
    return Step(more_than(before, ledger.traffic), seen.held, seen.most)


def more_than(before: Mapping[Flow, Traffic], after: Mapping[Flow, Traffic]) -> dict[Flow, Traffic]:
    """What a ledger has booked between two moments."""
    none, found = Traffic(), dict[Flow, Traffic]()
    for flow, now in after.items():
        was = before.get(flow, none)
        if now != was:
            found[flow] = Traffic(now.calls - was.calls, now.payload - was.payload, now.wire - was.wire)
    return found


def tensors_of(memory: Memory, trainer: Trainer, module: nn.Module) -> list[Tensor]:
    """All that an engine keeps from step to step."""
    found: list[Any] = [*memory.parameters.values(), *module.buffers()]
    for chunk in memory.chunks:
        owned = chunk.owned
        found += [chunk.data, owned.data, chunk.grad, owned.grad, *vars(owned.masters or owned).values()]
    optimizer = trainer.optimizer.torch
    for each in (optimizer, getattr(optimizer, "inner", optimizer)):
        found += (value for state in each.state.values() for value in state.values())
    if memory.pager is not None:
        found += memory.pager.buffers
    if trainer.gradient_pool is not None:
        found += trainer.gradient_pool.buffers
    return [each for each in found if isinstance(each, Tensor)]


class Seen(MemTracker):
    """Bytes of the storages of `held` and of all that operations on this thread make inside, at any moment, as torch's
    MemTracker counts them: also of storages whose memory comes and goes. Without its hooks on modules and parameters,
    which an engine would take for the user's, and with the parts of sparse tensors."""

    def __init__(self, held: Sequence[Tensor]) -> None:
        super().__init__()
        for tensor in held:
            self._update_and_maybe_create_winfos(tensor, _MemRefType.OTH)
        self.held = self._bytes("current")

    @property
    def most(self) -> int:
        """The most so far."""
        return max(self.held, self._bytes("peak"))

    def _bytes(self, when: str) -> int:
        return int(self.get_tracker_snapshot(when).get(CPU, {}).get("Total", 0))

    def __enter__(self) -> Seen:
        self._fake_mode_on_entry = active_fake_mode()
        self._track_resize()
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *raised: Any) -> None:
        TorchDispatchMode.__exit__(self, *raised)
        self._restore_resize()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # more than half of all calls: autograd asks each fake tensor for it
            return args[0].device
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _track(self, reftype: Any, t: Tensor) -> None:
        for part in (t._indices(), t._values()) if t.layout is torch.sparse_coo else (t,):
            super()._track(reftype, part)
