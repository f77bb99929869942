"""The transport of GPUs: NCCL's process group."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

from shoal.comm.device_group import DeviceGroup

ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Variable by which torch decides, for each group as it is made, what its watchdog does when NCCL reports an error: by
default it ends the process (torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, ErrorHandlingMode)."""
_NOTHING = "0"

_making = threading.Lock()


class Nccl(DeviceGroup):
    """A `transport.Transport` over a `ProcessGroupNCCL`."""

    @classmethod
    def of_two(cls, store: dist.Store, rank: int, device: torch.device, timeout: timedelta) -> Self:
        with _making:
            before = os.environ.get(ERRORS)
            os.environ[ERRORS] = _NOTHING
            try:
                return super().of_two(store, rank, device, timeout)
            finally:
                if before is None:
                    del os.environ[ERRORS]
                else:
                    os.environ[ERRORS] = before

    @property
    def carrier(self) -> str:
        """NCCL with its version and what the environment sets of it."""
        version = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
        given = ", ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NCCL_"))
        return " ".join(filter(None, ("NCCL", ".".join(map(str, version)), given and f"({given})")))
