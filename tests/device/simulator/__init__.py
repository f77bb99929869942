"""A simulated accelerator, with which programs for GPUs are tried on a host without one: `simulate` runs a function
on it and says what went wrong.

    def program():
        x = torch.ones(4, device="cuda")
        ...
        return x.sum().item()

    run = simulate(program, mode="lazy")
    assert run.result == 4 and run.trace.defects == []

The device is made of host memory and CPU kernels (the C++ files of this folder, compiled once); each of its streams is
a queue that is run late, and vector clocks find accesses that nothing orders. docs/devices.md says what this shows and
what only a real device can show.
"""

from tests.device.simulator.run import LAZY_EAGER_AND_SEEDS, Rank, Run, simulate, simulate_ranks, why_not
from tests.device.simulator.trace import Report, Trace, Wait

__all__ = ["LAZY_EAGER_AND_SEEDS", "Rank", "Report", "Run", "Trace", "Wait", "simulate", "simulate_ranks", "why_not"]
