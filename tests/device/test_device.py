"""What the room of devices asks of an accelerator, on a stand-in that records it; and that on a CPU it does nothing."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shoal import device as room
from shoal.comm.backend_group import OrderedProcessGroup
from shoal.device import CPU, stand_in
from shoal.errors import UserError
from tests.device.recorder import Recorder

GPU = torch.device("cuda", 0)


@pytest.fixture
def cuda():
    recorder = Recorder()
    with stand_in("cuda", recorder):
        yield recorder


def test_a_stand_in_is_taken_out_again():
    before = room.backend(GPU)
    with stand_in("cuda", Recorder()) as _:
        assert room.backend(GPU) is not before
    assert room.backend(GPU) is before


@pytest.mark.parametrize("device", [CPU, torch.device("meta")])
def test_a_cpu_has_nothing_to_wait_for_and_no_figures(device):
    assert not room.is_accelerator(device) and room.new_stream(device) is room.current_stream(device) is None
    assert room.record_event(device) is None and room.hardware_name(device) is None
    figures = (room.allocated, room.most_allocated, room.free_memory, room.total_memory)
    assert [figure(device) for figure in figures] == [None] * 4
    with room.on_stream(None), room.aside(device, None):
        tensor = torch.ones(2)
    room.record_use(tensor)
    room.finish(device), room.finish_all(), room.synchronize(device), room.forget_most_allocated(device)
    assert room.to_device(tensor, device).device == device and room.to_device(tensor, CPU) is tensor


def test_the_backend_of_hosts_refuses_tensors_of_a_device():
    group = OrderedProcessGroup(dist.HashStore(), 0, 1, None)
    assert group._get_backend(CPU) is group
    with pytest.raises(RuntimeError, match='"shm" has no collectives for tensors on cuda'):
        group._get_backend(GPU)


def test_a_process_without_accelerators_has_the_cpu(cuda):
    cuda.is_there = False
    assert room.accelerators() == [] and room.any_device() == CPU == room.own_device(None, 3, 4)


@pytest.mark.parametrize(
    ("asked", "local_rank", "size", "found"),
    [
        (None, 1, 2, "cuda:1"),
        ("cuda", 0, 2, "cuda:0"),  # of several ranks each has its own
        ("cuda", 0, 1, "cuda:1"),  # alone: the current one
        ("cuda:0", 1, 2, "cuda:0"),
    ],
)
def test_a_rank_has_one_accelerator_which_becomes_the_current_one(cuda, asked, local_rank, size, found):
    assert room.own_device(asked, local_rank, size) == torch.device(found)
    assert cuda.calls == [f"set {found}"]
    assert room.accelerators() == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert room.any_device() == torch.device("cuda") and room.hardware_name(GPU) == "Recorder"


def test_a_rank_without_an_accelerator_of_its_own_is_refused(cuda):
    with pytest.raises(
        UserError,
        match=r"rank 2 of this host has no GPU of its own: there are 2. Start at most one rank a GPU, or hide",
    ):
        room.own_device(None, 2, 3)
    assert room.own_device("cpu", 2, 3) == CPU and cuda.calls == []


def test_the_only_accelerator_that_a_rank_was_left_is_its_own(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "device_count", lambda: 1, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    assert room.own_device(None, 3, 4) == room.own_device("cuda", 3, 4) == GPU
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UserError, match=r"rank 3 of this host has no GPU of its own: there are 1. Start"):
        room.own_device(None, 3, 4)


def test_a_device_that_is_not_there_is_refused(cuda, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with pytest.raises(UserError, match=r"there is no cuda:2: there are 2 \(CUDA_VISIBLE_DEVICES=4,6\). Start"):
        room.own_device("cuda:2", 0, 1)
    with pytest.raises(UserError, match=r"rank 2 of this host has no GPU of its own: there are 2 \(CUDA"):
        room.own_device("cuda", 2, 3)
    cuda.is_there = False
    with pytest.raises(UserError, match=r'device = "cuda": torch (is built|finds).*Train on the CPU: device = "cpu"'):
        room.own_device("cuda", 0, 1)
    with pytest.raises(UserError, match=r'device = "gpu": Expected one of cpu, cuda'):
        room.own_device("gpu", 0, 1)
    assert cuda.calls == []


def test_work_aside_comes_behind_an_event_and_is_waited_for(cuda):
    event = room.record_event(GPU)
    with room.aside(GPU, event):
        cuda.calls.append(f"work on {room.current_stream(GPU).name}")
    assert cuda.calls == [
        "event 0 on main",
        "set cuda:0",
        "stream 1 waits for event 0",
        "work on stream 1",
        "host waits for stream 1",
    ]
    assert room.current_stream(GPU).name == "main"


def test_a_tensor_is_kept_for_the_stream_that_is_current(cuda):
    used = []
    tensor = SimpleNamespace(device=GPU, record_stream=lambda stream: used.append(stream.name))
    with room.on_stream(room.new_stream(GPU)):
        room.record_use(tensor, torch.ones(1), tensor)
    room.record_use(tensor)
    assert used == ["stream 1", "stream 1", "main"]


def test_the_host_waits_for_a_stream_or_for_all_of_a_device(cuda):
    room.finish(GPU), room.synchronize(GPU), room.finish_all()
    assert cuda.calls == ["host waits for main", "host waits for cuda:0", "host waits for main"]
    cuda.is_there = False
    room.finish_all()
    assert len(cuda.calls) == 3, "what was never used has no streams"


def test_figures_of_memory_are_the_allocators(cuda):
    assert (room.allocated(GPU), room.most_allocated(GPU), room.free_memory(GPU)) == (100, 200, 300)
    assert room.total_memory(GPU) == 8_000_000_000
    room.forget_most_allocated(GPU)
    assert cuda.calls == ["peak of cuda:0 forgotten"]


def test_what_was_asked_for_is_without_what_the_allocator_rounds_up(cuda):
    assert room.asked_for(GPU) == (0, 0), "nothing was allocated yet"
    rounded = cuda.stats = {"allocated_bytes.all.current": 512, "allocated_bytes.all.peak": 1024}
    assert room.asked_for(GPU) == (512, 1024), "of a module that does not tell"
    cuda.stats = rounded | {"requested_bytes.all.current": 400, "requested_bytes.all.peak": 700}
    assert room.asked_for(GPU) == (400, 700)
    assert room.asked_for(room.CPU) is None


def test_what_goes_to_an_accelerator_is_pinned_first(cuda):
    """So that `to` with non_blocking leaves the host free."""
    went = []
    pinned = SimpleNamespace(to=lambda device, non_blocking: went.append((device, non_blocking)) or "there")
    assert room.to_device(SimpleNamespace(is_cpu=True, pin_memory=lambda: pinned), GPU) == "there"
    assert went == [(GPU, True)]


def test_what_is_on_an_accelerator_already_is_not_pinned(cuda):
    there = SimpleNamespace(is_cpu=False, to=lambda device, non_blocking: there)
    assert room.to_device(there, GPU) is there


def test_what_comes_to_the_host_arrives_at_an_event(monkeypatch):
    """In pinned memory, behind the work that the device has by then; the host goes on."""
    meta, recorder, copies = torch.device("meta"), Recorder(), []
    here = SimpleNamespace(copy_=lambda tensor, non_blocking: copies.append((tensor, non_blocking)) or here)
    monkeypatch.setattr(torch, "empty_like", lambda _, device, pin_memory: here if pin_memory else None)
    away, one = torch.ones(2, device=meta), torch.ones(1)
    with stand_in("meta", recorder):
        tensors, events = room.to_host(away, one, away)
    assert tensors[0] is tensors[2] is here and tensors[1] is one and copies == [(away, True)] * 2
    assert recorder.calls == ["event 0 on main"] and events == recorder.events
    assert room.to_host(one) == ([one], [])


def test_both_generators_are_seeded(cuda):
    with room.keep_generators([]):
        room.seed_generators(torch.device("cuda", 1), 7)
        assert torch.initial_seed() == cuda.default_generators[1].initial_seed() == 7
    assert cuda.default_generators[0].initial_seed() != 7


def test_generators_are_kept():
    torch.manual_seed(3)
    with room.keep_generators([CPU, CPU]):
        first = torch.rand(2)
    assert torch.equal(first, torch.rand(2))


def test_kernels_are_known_by_the_capability(cuda, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)

    def queries(width: int) -> dict[torch.dtype, SimpleNamespace]:
        kinds = (torch.bfloat16, torch.float32)
        return {dtype: SimpleNamespace(is_cuda=True, device=GPU, dtype=dtype, shape=(2, width)) for dtype in kinds}

    rows = queries(64)
    assert [room.has_grouped_products(each) for each in rows.values()] == [True, False]
    assert [room.has_flash_attention(each) for each in rows.values()] == [True, False]
    assert [room.has_flash_attention(queries(width)[torch.bfloat16]) for width in (12, 256, 264)] == [
        False,
        True,
        False,
    ]
    cuda.get_device_capability = lambda device: (7, 5)
    assert not room.has_grouped_products(rows[torch.bfloat16]) and not room.has_flash_attention(rows[torch.bfloat16])
    assert room.compute_capability(GPU) == (7, 5)
    on_host = torch.ones(1, dtype=torch.bfloat16)
    assert room.has_grouped_products(on_host) and not room.has_flash_attention(on_host)
    assert room.compute_capability(CPU) is None


def test_tf32_is_as_before_after_the_block():
    before = torch.backends.cuda.matmul.allow_tf32
    with room.tf32(not before):
        assert torch.backends.cuda.matmul.allow_tf32 is not before
    room.allow_tf32(CPU)
    assert torch.backends.cuda.matmul.allow_tf32 is before


def test_groups_have_torchs_backend_for_the_device():
    assert room.group_backend(CPU) == "gloo" and room.group_backend(GPU) == "nccl"


def test_no_product_is_faster_than_the_measured_peak():
    # Generous bounds: another process may take the cores at any moment, and no core does 100 TFLOP/s.
    peak = room.measure_peak_flops(CPU, torch.float32)
    assert 1e8 < peak < 1e14


def test_the_allocator_is_set_where_nobody_has_and_it_is_not_too_late(cuda, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    room.own_device("cuda:0", 0, 1)
    assert room.allocator(GPU) == "torch's own settings", "something was allocated before"
    cuda.is_initialized = lambda: False
    room.own_device("cuda:0", 0, 1)
    assert room.allocator(GPU) == "expandable_segments:True" and room.allocator(CPU) is None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert room.allocator(GPU) == "max_split_size_mb:64", "the older name counts first"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    room.own_device("cuda:0", 0, 1)
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_attention_is_named(cuda, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert room.attention_kernel(GPU, torch.bfloat16) == "FlashAttention"
    assert room.attention_kernel(GPU, torch.float32) == "memory-efficient attention"
    cuda.get_device_capability = lambda device: (7, 5)
    assert room.attention_kernel(GPU, torch.float16) == "memory-efficient attention"
    assert room.attention_kernel(CPU, torch.bfloat16) is None
