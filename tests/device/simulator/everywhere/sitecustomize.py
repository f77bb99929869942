"""Python imports this as it starts where its folder is on the path: the process then sees the simulated accelerator."""

from tests.device.simulator.command import begin

begin()
