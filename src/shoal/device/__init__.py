"""The devices that a rank computes on. No other room knows which kinds there are, or asks torch for one of them by
name.

Functions here take a `torch.device`. On the CPU, where an operation has ended when its call returns, they do nothing or
the plain thing, so that callers need no branch; what is known of accelerators alone is None there.
"""

from shoal.device.backend import Backend, Event, Stream, backend, is_accelerator, stand_in
from shoal.device.function import applied
from shoal.device.generators import keep_generators, seed_generators
from shoal.device.kernels import (
    allow_tf32,
    attention_kernel,
    compute_capability,
    has_flash_attention,
    has_grouped_products,
    tf32,
)
from shoal.device.kinds import (
    CPU,
    WITHOUT_ACCELERATORS,
    accelerators,
    any_device,
    group_backend,
    hardware_id,
    hardware_name,
    is_own_failure,
    kind_of,
    moving_calls,
    own_device,
    processor_name,
    why_no_accelerator,
)
from shoal.device.memory import (
    allocated,
    asked_for,
    begin_most_asked_for,
    forget_most_allocated,
    free_memory,
    most_allocated,
    to_device,
    to_host,
    total_memory,
)
from shoal.device.operations import OnceMore, measure_cold, measure_operations, measure_shortest
from shoal.device.peak import measure_peak_flops
from shoal.device.products import measure_products
from shoal.device.settings import allocator
from shoal.device.streams import (
    aside,
    current_stream,
    finish,
    finish_all,
    new_stream,
    on_stream,
    record_event,
    record_use,
    synchronize,
    timed_event,
)
from shoal.device.timing import quickest

__all__ = [
    "CPU",
    "WITHOUT_ACCELERATORS",
    "Backend",
    "Event",
    "OnceMore",
    "Stream",
    "accelerators",
    "allocated",
    "allocator",
    "allow_tf32",
    "any_device",
    "applied",
    "aside",
    "asked_for",
    "attention_kernel",
    "backend",
    "begin_most_asked_for",
    "compute_capability",
    "current_stream",
    "finish",
    "finish_all",
    "forget_most_allocated",
    "free_memory",
    "group_backend",
    "hardware_id",
    "hardware_name",
    "has_flash_attention",
    "has_grouped_products",
    "is_accelerator",
    "is_own_failure",
    "keep_generators",
    "kind_of",
    "measure_cold",
    "measure_operations",
    "measure_peak_flops",
    "measure_products",
    "measure_shortest",
    "most_allocated",
    "moving_calls",
    "new_stream",
    "on_stream",
    "own_device",
    "processor_name",
    "quickest",
    "record_event",
    "record_use",
    "seed_generators",
    "stand_in",
    "synchronize",
    "tf32",
    "timed_event",
    "to_device",
    "to_host",
    "total_memory",
    "why_no_accelerator",
]
