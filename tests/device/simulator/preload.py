"""Makes this process see the simulated accelerator. To be called before torch is imported: torch looks for CUDA's
hooks once, then."""

from __future__ import annotations

import ctypes
import os
import sys

from tests.device.simulator.build import library, torch_folder


def preload(name: str) -> None:
    """Loads the simulator as device `name`: "cuda" in place of torch's own, or another name, a PrivateUse1 device."""
    assert "torch" not in sys.modules, "the simulator is loaded before torch"
    os.environ["SIM_DEVICE"] = name
    for file in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / file), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)

    from tests.device.simulator import group, module

    module.install(name)
    group.install(name)
