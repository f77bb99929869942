"""Pages of masters and optimizer state: read, updated and written one after the other, all three at once.

    disk    read 1 | read 2 | read 3  | write 1 ...
    update         | page 1 | page 2  | page 3

Where all chunks have a page and the disk has room for two of each, updates are crash-safe: the one that makes
generation g reads the pages of g - 1 and writes those of g to other files. A record (`generations`) commits g; until
then g - 1 is what there is.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.chunks import Buffer
from shoal.comm.ledger import Ledger
from shoal.optim.tiers.disk import Disk, wait
from shoal.optim.tiers.generations import SLOTS, Records, slot_of
from shoal.optim.tiers.host import HostStore
from shoal.optim.tiers.page import File, Page

BUFFERS = 3
"""Buffers: one page is read, one updated, one written."""
CAUSE = "disk"
"""Cause of the trainer's waits for it, in the ledger."""


def in_turn(keys: Sequence[str], master: torch.dtype) -> int:
    """Bytes of the buffers for each element of the largest page: its master, and the state under `keys`."""
    return BUFFERS * master.itemsize * (1 + len(keys))


class Turn(NamedTuple):
    """Bytes of one turn, as expected and as done: expected are those of the pages on the disk at its beginning, and of
    all pages."""

    to_read: int
    read: int
    to_write: int
    written: int


class Pager:
    """Brings the pages of `chunks` (owned ones) from `store`, a disk or the host, and takes them back.

    - `keys`: of the optimizer's state, those with one value an element
    - `durable`: generations are kept on the disk
    - `makes`: the plan and model that a generation is of
    - `ledger`: told how long updates wait for the disk
    - `records`: the generations that an earlier run of the same has committed here, by number, with their slots
    """

    def __init__(
        self,
        chunks: Sequence[Buffer],
        keys: Sequence[str],
        store: Disk | HostStore,
        durable: bool,
        makes: Mapping[str, Any],
        ledger: Ledger,
    ) -> None:
        self._ledger = ledger
        self._store, self.durable, self._makes = store, durable, dict(makes)
        self.pages = [
            Page(chunk, keys, durable, partial(self._file, chunk), store.buffer, store.first, self.uncommit)
            for chunk in chunks
        ]
        self._index = {id(chunk): index for index, chunk in enumerate(chunks)}
        self._makes["pages"] = [_described(page) for page in self.pages]
        slots = SLOTS if durable else SLOTS[0]
        self.records = dict(self._find()) if durable else {}
        sizes = {f"{index:05}.{slot}": page.nbytes_whole for index, page in enumerate(self.pages) for slot in slots}
        if self.disk is not None and not (durable and self.disk.keeps_all(sizes)):
            self._forget_others()
        self._files: Mapping[str, File] = store.files(sizes)
        self.generation, self.is_new = 1, False
        self.buffers: list[Tensor] = []
        self.bytes_read = self.bytes_written = 0
        self.last_turn: Turn | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers for pages in their turn."""
        return min(BUFFERS, len(self.pages)) * max((page.nbytes_whole for page in self.pages), default=0)

    def reserve(self) -> None:
        """Allocates these buffers, which stay. The first turn does so, if nobody has before."""
        if not self.buffers:
            largest = max((page.nbytes_whole for page in self.pages), default=0)
            self.buffers = [self._store.buffer(largest) for _ in range(min(BUFFERS, len(self.pages)))]

    def begin_after(self, generation: int) -> None:
        """Keeps `generation` on the disk until the next update, since it may still be wanted. 0: there is none."""
        self.generation = generation + 1
        self.uncommit()

    def _file(self, chunk: Buffer) -> File:
        return self._files[self._name(self._index[id(chunk)], self.generation)]

    def _name(self, index: int, generation: int) -> str:
        return f"{index:05}.{slot_of(generation) if self.durable else SLOTS[0]}"

    def turn(self, backwards: bool = False) -> Iterator[Page]:
        """Yields one page after the other, in memory; at the end all are on the disk, as the next generation."""
        self.reserve()
        to_read = sum(page.moving for page in self.pages if page.on_disk and not page.is_open)
        read, written = self.bytes_read, self.bytes_written
        if self.durable:
            self._records.withdraw(slot_of(self.generation + 1))  # an older one, whose files are about to be written
        free, queue = list(self.buffers), deque(enumerate(self.pages))
        if backwards:
            queue.reverse()
        coming: deque[tuple[int, Page, Tensor, list[Future[None]]]] = deque()
        leaving: deque[tuple[Tensor, list[Future[None]]]] = deque()
        try:
            while queue or coming:
                while queue and (free or not coming):
                    if not free:
                        memory, work = leaving.popleft()
                        self._wait(work)
                        free.append(memory)
                    index, page = queue.popleft()
                    memory = free.pop()
                    coming.append((index, page, memory, self._fetch(index, page, memory[: page.moving])))
                index, page, memory, reads = coming.popleft()
                self._wait(reads)
                page.show(memory)
                yield page
                page.hide()
                size = page.nbytes_whole
                leaving.append((memory, self._files[self._name(index, self.generation + 1)].write(memory[:size])))
                self.bytes_written += size
                while leaving and all(each.done() for each in leaving[0][1]):
                    memory, work = leaving.popleft()
                    wait(work)
                    free.append(memory)
        finally:
            self._wait(
                [each for _, work in leaving for each in work] + [each for *_, reads in coming for each in reads]
            )
        for page in self.pages:
            page.on_disk = True
        to_write = sum(page.nbytes_whole for page in self.pages)
        self.last_turn = Turn(to_read, self.bytes_read - read, to_write, self.bytes_written - written)
        self.generation, self.is_new = self.generation + 1, self.durable

    def _wait(self, work: Sequence[Future[None]]) -> None:
        with self._ledger.stall(CAUSE):
            wait(work)

    def _fetch(self, index: int, page: Page, memory: Tensor) -> list[Future[None]]:
        if page.is_open:  # somebody has looked at the masters, and may have changed them
            memory.copy_(page.hide()[: page.moving])
            return []
        if not page.on_disk:
            return []
        self.bytes_read += page.moving
        return self._files[self._name(index, self.generation)].read(memory)

    @property
    def disk(self) -> Disk | None:
        """Disk of the pages; None if they lie on the host."""
        return self._store if isinstance(self._store, Disk) else None

    def held(self) -> dict[str, int]:
        """Bytes of its files by role."""
        now: dict[str, int] = {}
        for page in self.pages:
            for role, size in page.roles.items():
                now[role] = now.get(role, 0) + size
        return now | ({"the update before": sum(now.values())} if self.durable else {})

    # generations

    @property
    def _records(self) -> Records:
        assert self.disk is not None
        return self.disk.records

    def _find(self) -> Iterator[tuple[int, str]]:
        """Finds the generations that are committed here and are of the same model and plan."""
        mine = json.loads(json.dumps(self._makes))
        for about, slot in self._records.find():
            if about["makes"] == mine:
                yield int(about["generation"]), slot

    def _forget_others(self) -> None:
        """Withdraws what is committed here of other plans and models, whose files are about to be changed."""
        for slot in SLOTS:
            if slot not in self.records.values():
                self._records.withdraw(slot)

    def read(self, generation: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Reads what was committed beside the pages of `generation`, one of `records`."""
        about, tensors = self._records.read(self.records[generation])
        return about["user"], tensors

    def recall(self, generation: int) -> None:
        """Goes on with the pages of `generation`, one of `records`."""
        self.generation = generation
        about, _ = self._records.read(self.records[generation])
        for page, known in zip(self.pages, about["states"], strict=True):
            page.recall(known)

    def commit(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Makes the present generation the one to go on from, with small `tensors` and `about` (JSON) beside the
        pages."""
        for index in range(len(self.pages)):
            self._files[self._name(index, self.generation)].sync()
        states = [page.known() for page in self.pages]
        record = {"generation": self.generation, "makes": self._makes, "states": states, "user": dict(about)}
        self._records.write(slot_of(self.generation), record, tensors)
        self.is_new = False

    def uncommit(self) -> None:
        """Withdraws the present generation: its pages are about to change beside any update."""
        if self.durable:
            self._records.withdraw(slot_of(self.generation))

    def close(self) -> None:
        self._store.close()


def _described(page: Page) -> list[Any]:
    """Describes what must be the same for its file to be read."""
    slots = [[slot.name, slot.offset, slot.start, slot.numel, list(slot.full)] for slot in page.chunk.slots]
    return [page.chunk.size, str(page.chunk.data.dtype), str(page.chunk.master_like.dtype), page.nbytes_whole, slots]
