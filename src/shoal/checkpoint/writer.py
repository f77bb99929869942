"""Saves while training goes on: a snapshot into host memory at once, the files in a background thread."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.distributed import HashStore

from shoal.checkpoint.directory import clean, step_path
from shoal.checkpoint.meeting import Meeting, World
from shoal.checkpoint.pieces import BOX_BYTES, Piece, cut
from shoal.checkpoint.save import Job, save_together
from shoal.device import finish, is_accelerator
from shoal.errors import CheckpointError, LaunchError

_ABANDON_SECONDS = 10.0  # for the files that a rank was writing, or for a store whose host does not answer


class Writer:
    """Saves checkpoints of one run. Every rank makes one, and its methods are collective.

    directory: of the checkpoints, visible to all ranks
    world: the ranks
    keep: number of newest checkpoints that are kept
    timeout: seconds to wait for another rank's part of a save

    At most one save is in flight. Its failure is the same on every rank, and raised there as CheckpointError by the
    next `save`, `wait` or `close`; `last_error` shows it without raising. Earlier checkpoints are then unchanged, and a
    caller who catches the error may go on training and save again. A rank that loses the store, or notices that
    another one is gone, raises LaunchError, alone: the others cannot save without it.
    """

    def __init__(self, directory: Path | str, world: World, keep: int = 3, timeout: float = 1800.0) -> None:
        assert keep >= 1 and (world.store is not None or world.size == 1)
        self.directory = Path(directory).absolute()
        self.last_error: CheckpointError | LaunchError | None = None
        self._world, self._keep, self._timeout = world, keep, timeout
        self._store = HashStore() if world.store is None else world.store
        self._saves = 0
        self._thread: Thread | None = None
        self._meeting: Meeting | None = None  # of the last save
        self._given_up = False
        self._snapshot = _Snapshot()
        # Ranks make their writers in the same order, so counting them gives each a prefix that all ranks agree on.
        number = self._store.add(f"checkpoint/writers/{world.rank}", 1)
        self._prefix = f"checkpoint/{number}"
        try:
            self._prepare()
        except OSError as error:
            raise CheckpointError(f"checkpoints cannot be written to {self.directory}: {error}") from error

    def save(
        self,
        step: int,
        pieces: Iterable[Piece],
        extra: Mapping[str, Any],
        wait: bool,
        copy: bool = True,
        keep: int | None = None,
    ) -> None:
        """Saves the pieces of all ranks and `extra` as the checkpoint of `step`.

        pieces: of this rank
        extra: JSON state; that of rank 0 is saved
        wait: return when the checkpoint is complete on disk; else when the tensors may change again
        copy: copy the tensors in memory; False only with `wait`
        keep: number of newest checkpoints that are kept from here on; None: as before

        Waits first for the save before this one; if that failed, raises its error and saves nothing.
        """
        assert copy or wait
        self.wait()
        self._keep = keep or self._keep
        extra = json.loads(json.dumps(extra))  # a copy; what is not JSON raises here and not in the thread
        held = self._snapshot.take(pieces) if copy else [part for piece in pieces for part in cut(piece, BOX_BYTES)]
        job = Job(step_path(self.directory, step), step, held, extra, self._keep, self._timeout)
        self._saves += 1
        prefix = f"{self._prefix}/{self._saves}"
        world = self._world
        meeting = self._meeting = Meeting(self._store, prefix, world.rank, world.size, world.lost)
        meeting.given_up = self._given_up
        # A daemon: when training fails, a save that waits for a dead rank must not keep the process alive.
        self._thread = Thread(target=self._run, args=(job, meeting), name=f"checkpoint-{step}", daemon=True)
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Returns when no save is in flight. Raises CheckpointError if the last one failed, once; LaunchError if it was
        given up."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self.last_error = self.last_error, None
        if error is not None and self._given_up:
            raise LaunchError(f"a save was given up: {error}") from error
        if error is not None:
            raise error

    @property
    def under_way(self) -> bool:
        """Whether a save is in flight, as far as this rank knows."""
        return self._thread is not None and self._thread.is_alive()

    def give_up(self) -> None:
        """Waits for no rank any more, now and later: other ranks are gone. Any thread may call it."""
        self._given_up = True
        if self._meeting is not None:
            self._meeting.given_up = True

    def abandon(self) -> None:
        """Gives up a save in flight, where other ranks of it may be gone; raises nothing."""
        self.give_up()
        if self._thread is not None:
            self._thread.join(_ABANDON_SECONDS)
        self._thread = self.last_error = None

    def close(self) -> None:
        """Waits as `wait` does, and frees the host memory of the snapshot.

        A save in flight is lost if a process ends without it.
        """
        self._snapshot = _Snapshot()
        self.wait()

    def _run(self, job: Job, meeting: Meeting) -> None:
        try:
            save_together(job, meeting)
        except (CheckpointError, LaunchError) as error:
            self.last_error = error
        except Exception as error:  # only this rank notices, and it can take part in no further save
            self.last_error = LaunchError(f"the store is gone; the checkpoint of step {job.step} failed: {error}")

    def _prepare(self) -> None:
        """Makes the directory, on every rank, so that each notices a failure; the first rank cleans up after a
        crash."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._world.rank == 0:
            clean(self.directory)


class _Snapshot:
    """Copies of pieces in host memory, kept from save to save, since pinned memory is slow to allocate.

    Each box has storage of its own, because DCP copies tensors that are a part of a larger storage once more.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Returns the pieces, cut to the size of boxes on disk, with copies of their tensors."""
        parts = [part for piece in pieces for part in cut(piece, BOX_BYTES)]
        old, self._buffers = self._buffers, {}
        for part in parts:
            key = (part.name, part.box.offsets)
            buffer = old.pop(key, None)
            if buffer is None or buffer.shape != part.tensor.shape or buffer.dtype != part.tensor.dtype:
                pinned = is_accelerator(part.tensor.device)
                buffer = torch.empty(part.box.sizes, dtype=part.tensor.dtype, pin_memory=pinned)
            self._buffers[key] = buffer.copy_(part.tensor.detach(), non_blocking=True)
        for device in {part.tensor.device for part in parts}:
            finish(device)
        return [Piece(part.name, part.shape, part.box, self._buffers[part.name, part.box.offsets]) for part in parts]
