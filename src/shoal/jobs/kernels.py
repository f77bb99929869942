"""What computes and carries on this machine, by name: the choices of a run that no job file makes."""

from __future__ import annotations

from shoal.device import allocator, attention_kernel, hardware_name
from shoal.engine import Engine


def kernels(engine: Engine) -> str:
    """Says it in a line, for people."""
    device, optimizer, world = engine.device, engine.optimizer, engine.world
    said = [f"{optimizer.kind} by {optimizer.kernel}"]
    if attention := attention_kernel(device, engine.precision.model):
        said.append(f"attention by {attention} where no mask forbids it")
    if settings := allocator(device):
        said.append(f"allocator: {settings}")
    if world.size > 1:
        said.append(f"collectives over {world.everyone.transports[device.type].carrier}")
    return f"on {hardware_name(device) or 'the CPU'}: {'; '.join(said)}"
