"""torch's module for the simulated device: `torch.cuda`, whose own functions need a build with CUDA, or a new one."""

from __future__ import annotations

import types
from types import SimpleNamespace
from typing import Any

import torch

_simulator = torch.ops.sim


def install(name: str) -> None:
    """Puts the functions below in the place of `torch.cuda`'s, or makes the device `name` known to torch."""
    if name != "cuda":
        torch.utils.rename_privateuse1_backend(name)
    functions = _functions(name)
    if name == "cuda":
        for key, value in functions.items():
            setattr(torch.cuda, key, value)
        torch.UntypedStorage.resize_ = _resizing_on_device(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
    else:
        made = types.ModuleType(f"torch.{name}")
        made.__dict__.update(functions)
        torch._register_device_module(name, made)
        torch.utils.generate_methods_for_privateuse1_backend()


def _resizing_on_device(before: Any) -> Any:
    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type == "cpu":
            return before(self, size)
        _simulator.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self, 0, (0,)), size)
        return self

    return resize_


def _functions(name: str) -> dict[str, Any]:
    accelerator = torch.accelerator

    def named(device: Any = None) -> torch.device:
        found = torch.device(name, device) if isinstance(device, int) else torch.device(device or name)
        return found if found.index is not None else torch.device(name, accelerator.current_device_index())

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **of_another: int) -> Any:
            if of_another:
                return super().__new__(cls, **of_another)
            return super().__new__(cls, device=named(device), priority=priority)

    class Event:
        """Makes plain events: torch asks for the time between such alone."""

        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
            return torch.Event(named(), enable_timing=enable_timing)

    def generator(device: Any) -> torch.Generator:
        return _simulator.default_generator(named(device).index)

    def total(device: Any = None) -> int:
        return accelerator.get_memory_info(named(device))[1]

    def each(do: Any) -> None:
        for index in range(_simulator.device_count()):
            do(index)

    of = lambda function: lambda device=None: function(named(device))  # noqa: E731
    return {
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": lambda stream: StreamContext(stream),
        "current_stream": of(accelerator.current_stream),
        "default_stream": lambda device=None: Stream(
            stream_id=0, device_index=named(device).index, device_type=accelerator.current_stream().device_type
        ),
        "set_stream": accelerator.set_stream,
        "synchronize": of(accelerator.synchronize),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": _simulator.device_count,
        "current_device": accelerator.current_device_index,
        "set_device": lambda device: accelerator.set_device_index(named(device).index),
        "default_generators": Generators(generator),
        "manual_seed": lambda seed: generator(None).manual_seed(seed),
        "manual_seed_all": lambda seed: each(lambda index: generator(index).manual_seed(seed)),
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
        "memory_allocated": of(accelerator.memory_allocated),
        "max_memory_allocated": of(accelerator.max_memory_allocated),
        "memory_stats": of(accelerator.memory_stats),
        "memory_reserved": of(accelerator.memory_reserved),
        "reset_peak_memory_stats": of(accelerator.reset_peak_memory_stats),
        "mem_get_info": of(accelerator.get_memory_info),
        "empty_cache": accelerator.empty_cache,
        "_sleep": lambda cycles: None,  # streams are late enough
        "get_device_name": lambda device=None: "simulated",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="simulated", major=9, minor=0, total_memory=total(device), multi_processor_count=1
        ),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda including_emulation=True: True,
    }


class StreamContext:
    """Makes a stream the current one inside; None leaves it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before = torch.accelerator.current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self._before)


class Generators:
    """The device's default generators, by index."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def __len__(self) -> int:
        return int(_simulator.device_count())

    def __getitem__(self, index: int) -> torch.Generator:
        return self._generator(index)
