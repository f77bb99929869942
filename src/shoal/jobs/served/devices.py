"""Which accelerators of their host the servers and workers of a job have."""

from __future__ import annotations

import torch

from shoal.device import CPU, accelerators, own_device
from shoal.errors import in_section
from shoal.jobs.config import Job
from shoal.launch.identity import Identity


def device_of_worker(place: Identity) -> torch.device | None:
    """Returns the accelerator of worker `place.rank`; more workers than there are accelerators share them."""
    found = accelerators()
    return found[place.rank % len(found)] if found else None


def device_of_server(job: Job, place: Identity) -> torch.device:
    """Returns where the server `place.serves` has its weights: `server.device`; without it, an accelerator that is left
    when each worker has one, or the CPU. It becomes the thread's current one. Raises UserError where there is none."""
    assert place.serves is not None
    if job.server.device is not None:
        with in_section("server"):
            return own_device(job.server.device, place.serves, len(place.servers))
    left = accelerators()[place.size + place.serves :]
    return own_device(left[0] if left else CPU, 0, 1)
