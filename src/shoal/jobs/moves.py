"""Compares the bytes that a rank moved between tiers in a step with those that were planned."""

from __future__ import annotations

from shoal.chunks.movement import Planned
from shoal.data import Batch
from shoal.engine import Engine
from shoal.exchange.rounds import Round
from shoal.report.metrics import MovesRecord

WEIGHTS, GRADIENTS, READ, WRITTEN = "weights to the device", "gradients home", "pages read", "pages written"


class Moves:
    """Makes a MovesRecord for each recorded step, and for the first step of each new plan of moves."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[int, tuple[Planned, dict[str, int]]] = {}  # by id; the plan, and the bytes under other rules
        self._before = self._counted()

    def before(self) -> None:
        """Marks the beginning of a step."""
        self._before = self._counted()

    def after(self, batch: Batch) -> MovesRecord | None:
        """Returns the record of the step on `batch` that has just ended; None for a step that is not recorded, or where
        nothing moves between tiers."""
        engine, gather = self._engine, self._engine.parts.gather
        if engine.parts.tier is None and gather is None:
            return None
        plan = gather.executor.followed if gather is not None else None
        is_new = plan is not None and id(plan) not in self._known
        if not (is_new or engine.ledger.recording):
            return None
        if plan is not None and is_new:
            self._known[id(plan)] = plan, plan.fetched_otherwise()
        moved = {name: now - self._before[name] for name, now in self._counted().items()}
        planned: dict[str, int | None] = {WEIGHTS: plan.fetched() if plan is not None else None}
        if engine.parts.tier is not None:
            planned[GRADIENTS] = sum(map(self._gradients_of, engine.parts.rounds()))
        if engine.parts.pager is not None and (turn := engine.parts.pager.last_turn) is not None:
            planned |= {READ: turn.to_read, WRITTEN: turn.to_write}
            moved |= {READ: turn.read, WRITTEN: turn.written}
        return MovesRecord(
            step=batch.step + 1,
            planned=planned,
            moved={name: moved[name] for name in planned},
            otherwise=self._known[id(plan)][1] if plan is not None else {},
        )

    def _counted(self) -> dict[str, int]:
        gather, gradient_pool = self._engine.parts.gather, self._engine.parts.gradient_pool
        return {
            WEIGHTS: gather.executor.bytes_in if gather is not None else 0,
            GRADIENTS: gradient_pool.bytes_home if gradient_pool is not None else 0,
        }

    def _gradients_of(self, round_: Round) -> int:
        """Returns the bytes that a round sends home: this rank's range of each gradient chunk of the host."""
        trainable = [chunk for chunk in self._engine.parts.chunks if chunk.trainable]
        return sum(
            chunk.size // (chunk.group.size if chunk.group is not None else 1) * chunk.grad_dtype.itemsize
            for chunk in map(trainable.__getitem__, round_.order)
            if chunk.passes
        )
