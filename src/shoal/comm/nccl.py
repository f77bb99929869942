"""The transport of GPUs: NCCL's process group."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from shoal.comm.device_group import DeviceGroup


class Nccl(DeviceGroup):
    """A `transport.Transport` over a `ProcessGroupNCCL`."""

    @property
    def carrier(self) -> str:
        """NCCL with its version and what the environment sets of it."""
        version = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
        given = ", ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NCCL_"))
        return " ".join(filter(None, ("NCCL", ".".join(map(str, version)), given and f"({given})")))
