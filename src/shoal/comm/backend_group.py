"""What torch asks of a process group written in Python: name, store, devices, and the order of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.backend_work import Line

ANY = -1
"""Stands for the peer of a receive that takes a message from any rank."""

# Its stubs declare overloads of which torch calls one: the one with lists and options.
_ProcessGroup: Any = dist.ProcessGroup


class OrderedProcessGroup(_ProcessGroup):
    """Runs collectives in the order of the calls: at once if the caller waits anyway, else in a thread of the group.

    Messages have a thread for each peer and direction, so that ranks which all send first and receive later do not
    deadlock.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, transport: Any) -> None:
        super().__init__(rank, size)
        self._store, self._transport = store, transport
        self._collectives = Line("shm-collectives")
        self._messages: dict[tuple[str, int], Line] = {}

    def getBackendName(self) -> str:
        return "shm"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> OrderedProcessGroup:
        """Returns the backend that serves a device, which torch asks for: this group itself, for the CPU."""
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f'the backend "shm" has no collectives for tensors on {device}, only for those on the CPU'
            )
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Tells FSDP2 not to allocate here: its allocations are not collective, as those of shared memory must be."""
        return False

    def shutdown(self) -> None:
        """Finishes the collectives under way and breaks off the messages under way."""
        self._collectives.close()
        self.abort()

    def abort(self) -> None:
        self._transport.close()
        for line in (self._collectives, *self._messages.values()):
            line.close()

    def _collective(self, opts: Any, result: Any, run: Callable[[], object]) -> dist.Work:
        return self._collectives.run(run, result, wait=not getattr(opts, "asyncOp", True))

    def _message(
        self, direction: str, peer: int, result: Any, run: Callable[[], object], source: Callable[[], int] | None = None
    ) -> dist.Work:
        line = self._messages.setdefault((direction, peer), Line(f"shm-{direction}-{peer}"))
        work = line.run(run, result, wait=False)
        work.source = source or (lambda: peer)
        return work
