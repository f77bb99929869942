"""Keeps the state of a run beyond its process: save, load under any plan, recovery after a kill, export."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint import exchange_state, optimizer_state, state, version_state
from shoal.checkpoint.given import as_json
from shoal.checkpoint.handover import Handover
from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.reader import checkpoint_at, require_sound
from shoal.checkpoint.role import WriterRole
from shoal.checkpoint.run import Members, Progress, State, Steps
from shoal.checkpoint.source import OnDisk, Source
from shoal.checkpoint.survivors import survivors, what_is_left, why_not
from shoal.checkpoint.user_state import UserState, values_in
from shoal.checkpoint.whole import exported, of_all_stages, whole_parameters
from shoal.checkpoint.writer import Writer
from shoal.comm import World
from shoal.data import IterableSource
from shoal.exchange.kept import from_older
from shoal.exchange.mean import mean_of_optimizers, mean_of_replicas
from shoal.plan import Plan


@dataclass(frozen=True)
class Session:
    """Saves and loads the `state` of a run. All methods are collective, and called between steps.

    `settings`: global batch, seed and precision, as a checkpoint records them. `role`: the role of this rank in
    writing. `closing`: closed at the end of the run, with the `writers` of checkpoints. `user`: the caller's own.
    """

    plan: Plan
    world: World
    settings: Mapping[str, Any]
    members: Members
    role: WriterRole
    state: State
    steps: Steps
    closing: ExitStack
    user: UserState
    progress: Progress = field(default_factory=Progress)
    writers: dict[Path, Writer] = field(default_factory=dict)

    def drifted(self) -> bool:
        """Returns whether the replicas differ now; stops the exchange's background work for the moment."""
        exchange = self.state.exchange
        exchange.settle()
        return self.members.replicas.size > 1 and exchange.drifts(self.progress.step)

    def as_one(self) -> AbstractContextManager[None]:
        """Replaces replicas that have drifted apart by their mean, inside the context."""
        if not self.drifted():
            return nullcontext()
        return mean_of_replicas(self.state.module, self.state.chunks, self.members.replicas)

    def save(self, directory: str | Path, wait: bool, keep: int, user: Mapping[str, Any] | None) -> None:
        """Writes a checkpoint of the step that comes next (see Engine.save)."""
        self._pause()
        path = Path(directory).resolve()
        if path not in self.writers:
            self.writers[path] = Writer(path, self.world, keep)
            self.closing.callback(self.writers[path].close)
        pager = self.state.pager
        copy = pager is None or pager.disk is None
        extra = {**self._extra(), "user": dict(user or {})}
        self._warn(self.user.told_apart(self.members.everyone))
        self.writers[path].save(self.progress.step, self._pieces(self.role), extra, wait or not copy, copy, keep)

    def _pause(self) -> None:
        """Ends what steps, exchange and updates do in the background."""
        self.steps.flush()
        self.steps.settle()
        self.state.optimizer.settle()

    @contextmanager
    def handed_over(self) -> Iterator[Handover]:
        """Gives, inside the context, the state of all ranks from their memory, to be read under another plan (see
        `take_over`); a disk of `plan.memory` can meanwhile be another's. Raises CheckpointError if a save under way
        fails."""
        self._pause()
        for writer in self.writers.values():
            writer.wait()
        pieces = self._pieces(self.role.with_copies)
        with self._disk_aside():
            yield Handover(self.members.everyone, pieces, as_json(self._extra()), self.world.host_id, self.world.device)

    def give_up_saves(self) -> None:
        """Has saves wait for no other rank, since some are gone. Any thread may call it."""
        for writer in list(self.writers.values()):
            writer.give_up()

    def abandon_saves(self) -> None:
        """Gives up saves under way, where other ranks may be gone; raises nothing."""
        for writer in self.writers.values():
            writer.abandon()

    def why_not_left_behind(self) -> str:
        """Returns why `left_behind` would not be enough, whoever fails; "" if it may be."""
        return why_not(self.plan, self.state, self.progress)

    @contextmanager
    def left_behind(self, world: World) -> Iterator[Handover]:
        """Gives, inside the context, what the ranks of `world` have left after others have failed (see survivors).
        Raises CheckpointError where that is not enough. A save under way is given up."""
        self.abandon_saves()
        given = (self.plan, self.world, self.state, self.steps, self.progress, self.place, self.role.with_copies)
        left = what_is_left(*given, self.user)
        with self._disk_aside(), survivors(world, left) as source:
            yield source

    def take_over(self, source: Handover, old: Session | None) -> dict[str, Any]:
        """Goes on with what the session `old` hands over as `source`; None where others do. An iterable that the same
        ranks read goes on; of other ranks it is opened anew, where it was. Returns values for `put_back`."""
        self._read(source)
        theirs = values_in(source)
        source.finish()
        self.progress.made = source.made
        if old is None:
            self.progress.run = source.extra["run"]
            return theirs
        if old.world is not self.world:
            old.progress.source = self.progress.source
        self.progress.source, self.progress.run = old.progress.source, old.progress.run
        return theirs

    def put_back(self, theirs: dict[str, Any], name: str) -> None:
        """Gives the caller's own objects the values that were read from the source of that `name`."""
        self._warn(self.user.take(theirs, self.progress.step, name))

    def _disk_aside(self) -> AbstractContextManager[None]:
        disk = None if self.state.pager is None else self.state.pager.disk
        return nullcontext() if disk is None else disk.aside()

    def _pieces(self, role: WriterRole) -> list[Piece]:
        """Returns the pieces of this rank, as `role` says: its share of the common state (or of the mean), or all
        that it holds of it, and what only it has."""
        mine = self.state
        own = exchange_state.exchange_pieces(
            {name: kept.tensors for name, kept in mine.exchange.state().items()}, self.role
        )
        if (versions := mine.versions) is not None:
            kept = {versions.newest - each: versions.tensors(each) for each in versions.kept}
            own += version_state.version_pieces(kept, role)
        own += self.user.pieces(self.progress.step) if self.members.everyone.rank == 0 else []
        if not self.drifted():
            return own + state.pieces(mine.module, mine.chunks, mine.optimizer, role)
        scale = None if mine.loss_scale is None else torch.tensor(mine.loss_scale.state(), dtype=torch.float64)
        drifted = state.replica_pieces(mine.module, mine.chunks, mine.optimizer, self.role, scale)
        own += [piece.copied() for piece in drifted]
        means = mean_of_optimizers(mine.optimizer, self.members.replicas)
        with mean_of_replicas(mine.module, mine.chunks, self.members.replicas):
            pieces = state.pieces(mine.module, mine.chunks, mine.optimizer, role, means)
            return own + [piece.copied() for piece in pieces]

    def _extra(self) -> dict[str, Any]:
        members, owners = self.members, self.members.replicas if self.plan.zero else None
        return {
            "replicas": members.replicas.size if self.drifted() else None,
            **self._place(),
            **optimizer_state.optimizer_extra(self.state.optimizer, owners, members.across),
        }

    def _place(self) -> dict[str, Any]:
        """Returns the position of the run and its settings, without tensors and the optimizer."""
        mine, source = self.state, self.progress.source
        return {
            "step": self.progress.step,
            **self.settings,
            "plan": self.plan.to_dict(),
            "per_sample": self.steps.per_sample,
            "kept_of_mean": True,  # residuals are in the unit of the mean, not of a sum
            "loss_scale": mine.loss_scale.state() if mine.loss_scale else None,
            "scheduler": optimizer_state.plain_numbers(mine.scheduler.state_dict()) if mine.scheduler else None,
            "source": source.state_dict(self.progress.step) if isinstance(source, IterableSource) else source,
            "given": mine.given.record,
        }

    def place(self) -> dict[str, Any]:
        """Returns what `recover` needs of a step besides tensors."""
        return {**self._place(), "run": self.progress.run}

    def recover(self, after: int) -> bool:
        """Continues from the last update that the disk holds (see Engine.recover)."""
        pager = self.state.pager
        if pager is None or not pager.durable or self.progress.step or self.user:
            return False
        generation = pager.generation - 1
        if generation == 0:
            return False
        extra, tensors = pager.read(generation)
        if extra["step"] <= after or extra["run"] != self.progress.run:
            return False
        state.restore_small(self.state.module, self.state.optimizer, tensors, extra)
        pager.recall(generation)
        self._go_on(extra)
        return True

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Reads a checkpoint (see Engine.load)."""
        everyone = self.members.everyone
        path = checkpoint_at(Path(directory), everyone)
        require_sound(path, everyone)
        extra = self._read(source := OnDisk(path))
        self.put_back(values_in(source), source.name)
        return extra["user"]

    def _read(self, source: Source) -> dict[str, Any]:
        """Replaces the state by that of `source`; returns its JSON state."""
        mine, role = self.state, self.role
        if mine.buddy is not None:
            mine.buddy.forget()
        self.steps.flush()
        mine.exchange.settle()
        mine.optimizer.settle()
        if mine.pager is not None:
            mine.pager.uncommit()
        rank, size = self.members.replicas.rank, self.members.replicas.size
        # Replicas that had drifted apart keep their own values if their number is the same and they may still differ;
        # else all of them start from the mean.
        saved = source.extra
        own = f"replica.{rank}." if saved.get("replicas") == size and mine.exchange.drifts(saved["step"]) else ""
        extra = state.restore(source, mine.module, mine.chunks, mine.optimizer, role, own)
        if own:
            extra = {**extra, "loss_scale": state.scale_of_replica(source, own) or extra.get("loss_scale")}
        if (versions := mine.versions) is not None:
            ago, step = version_state.versions_saved(source, versions.names, versions.keep - 1), extra["step"]
            versions.restart(step, [step - each for each in ago])
            version_state.restore_versions(source, {each: versions.tensors(step - each) for each in ago}, role)
        self._restore_exchange(source, extra)
        self._go_on(extra)
        return extra

    def _restore_exchange(self, source: Source, extra: Mapping[str, Any]) -> None:
        exchange = self.state.exchange
        exchange.begin_anew()
        kept = {name: (part.tensors, part.on_resize) for name, part in exchange.state().items()}
        complete = exchange_state.restore_exchange(source, kept, self.role)
        if not extra.get("kept_of_mean"):
            from_older(exchange.state(), extra, not exchange.keeps_back)
        self._warn(exchange_state.warnings_of(source, kept, self.role, self.plan.exchange, complete))
        exchange.restored()

    def _go_on(self, extra: Mapping[str, Any]) -> None:
        """Continues from the position that `_place` recorded; warns of settings given differently now, which win."""
        mine, saved = self.state, extra["scheduler"]
        if mine.scheduler is not None and saved is not None:
            saved = optimizer_state.in_the_form_of(mine.scheduler.state_dict(), saved)
        changes = mine.given.go_on(extra, saved)
        self._warn([*changes, extra["anew"]] if extra.get("anew") else changes)
        self.progress.source, self.steps.per_sample = extra["source"], extra["per_sample"]
        if mine.loss_scale is not None and extra.get("loss_scale") is not None:
            mine.loss_scale.load(extra["loss_scale"])
        self.progress.step = extra["step"]

    def _warn(self, lines: Sequence[str]) -> None:
        for line in lines if self.members.everyone.rank == 0 else ():
            warnings.warn(line, stacklevel=5)

    def export(self, directory: str | Path) -> Path:
        """Writes the weights as one model (see Engine.export)."""
        everyone = self.members.everyone
        self._pause()
        with self.as_one():
            weights = self.whole_weights()
            failure = exported(self.state.module, weights, Path(directory)) if everyone.rank == 0 else None
            if (failure := everyone.broadcast_object(failure)) is not None:
                raise failure
        return Path(directory)

    def whole_weights(self) -> dict[str, Tensor]:
        """Returns all weights and persistent buffers by name, complete on the first rank."""
        self._pause()
        members, layouts, module = self.members, self.role.layouts, self.state.module
        weights: dict[str, Tensor] = {}
        for chunk in self.state.chunks:  # masters on a disk are read as they lie there
            if (master := chunk.whole_master()) is not None:
                weights.update({slot.name: slot.view(master) for slot in chunk.slots})
        of_experts = {name: value for name, value in weights.items() if layouts[name].of_experts}
        if members.replicas.rank == 0 and members.parts.size > 1:
            rest = {name: value for name, value in weights.items() if name not in of_experts}
            weights.update(whole_parameters(rest, layouts, members.parts))
        if members.experts is not None and members.experts.rank == 0:
            weights.update(whole_parameters(of_experts, layouts, members.expert_parts))
        if members.stage.rank == 0:
            saved = module.state_dict().keys() - {each.removeprefix("buffer.") for each in self.role.silent}
            weights.update({name: buffer for name, buffer in module.named_buffers() if name in saved})
            if members.across is not None:
                weights = of_all_stages(weights, members.across)
        return weights
