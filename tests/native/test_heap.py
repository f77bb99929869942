"""Freed memory is kept: later steps cost few page faults. Tensors lie apart from all else. Large memory has large
pages."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.native.heap import in_large_pages

FAULTS = """
import resource, sys, torch
from shoal.native.heap import LARGE, keep_freed_memory
if sys.argv[1] != "given back":
    assert keep_freed_memory()
def step(sizes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**20 * size) for size in sizes]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for sizes in (3 * LARGE // 2**22,), (1, 3, 7, 2, 5, 7, 1, 4) * 4:  # in holes of steps the large one would fit
    print(sum([step(sizes) for _ in range(4)][1:]))
"""
PAGES = 2**20 // mmap.PAGESIZE
"""Pages in a MiB."""


def run(code: str, *arguments: str, before: str = "") -> str:
    """What a fresh process prints."""
    command = f'{before}exec "$0" -c "$@"'
    done = subprocess.run(["sh", "-c", command, sys.executable, code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def faults(how: str) -> list[int]:
    """Page faults of three steps, after one to warm up, that take one block of 96 MiB each; and of three that take 480
    MiB in blocks up to 28 MiB. `how`: freed memory is kept, of tensors "apart" or in the C "heap", or "given back" as
    glibc does."""
    return [int(line) for line in run(FAULTS, how, before="SHOAL_NATIVE=0 " if how == "heap" else "").split()]


def test_later_steps_fault_in_few_pages():
    """All three together not a quarter of what one step takes; glibc as it stands faults in the second step anew, and
    maybe the others. In the heap the largest blocks come fresh each time, lest they leave holes."""
    for how in ("apart", "heap"):
        large, steps = faults(how)
        assert steps < 480 * PAGES / 4, how
        assert large > 0.9 * 3 * 96 * PAGES if how == "heap" else large < 96 * PAGES / 4
    assert faults("given back")[1] > 0.9 * 480 * PAGES


APART = """
import ctypes, gc, os, random, threading, torch
from shoal.native.heap import _tensors, give_back_memory, keep_freed_memory
torch.set_num_threads(1)  # a fork has none of the threads of OpenMP
before = torch.full((2**18,), 7.0)
assert keep_freed_memory() and _tensors() is not None
assert before.eq(7).all()
del before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")

# whatever is taken and freed, by whichever thread, nobody writes where another one's tensor lies
wrong = []
def work(seed):
    draw, held = random.Random(seed), {}
    for number in range(1000):
        if held and draw.random() < 0.5:
            value = draw.choice(list(held))
            tensor = held.pop(value)
            if not tensor.eq(value).all():
                wrong.append(value)
        else:
            value = float(seed * 10000 + number)
            held[value] = torch.full((int(2 ** draw.uniform(0, 19)),), value)
            if held[value].data_ptr() % 64 and held[value].nbytes >= 64:
                wrong.append("address")
        while sum(each.nbytes for each in held.values()) > 2**24:
            held.pop(next(iter(held)))
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
[each.start() for each in threads]
while any(each.is_alive() for each in threads):  # a fork finds no lock held
    child = os.fork()
    if child == 0:
        kept = [torch.full((2**16,), float(number)) for number in range(64)]
        os._exit(0 if all(each.eq(number).all() for number, each in enumerate(kept)) else 1)
    assert os.waitpid(child, 0)[1] == 0
assert not wrong, wrong

# objects that stay between the tensors leave no holes that cost memory, nor do tensors of other sizes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
give_back_memory()
start = resident()
for step in range(6):
    for sizes in ((3, 5, 2, 8, 1, 6) * 4, (9, 4, 7) * 5):
        tensors = []
        for size in sizes:
            tensors.append(torch.ones(size * 2**18))
            libc.malloc(4000)
        tensors = tensors[::-1]
        tensors.clear()
assert resident() - start < 1.1 * 100 * 2**20, (resident() - start) / 2**20

# what torch promises of tensors
big = torch.ones(2**25)
held = resident()
del big
assert resident() > held - 2**20
give_back_memory()
assert resident() < held - 4 * 2**25 + 2**22
for size in (2**50, 2**60):
    try:
        torch.empty(size, dtype=torch.uint8)
        raise SystemExit("there is no such memory")
    except RuntimeError as error:
        assert "can't allocate memory" in str(error), error
grown = torch.arange(2**14).resize_(2**15)
assert grown[: 2**14].eq(torch.arange(2**14)).all()
shared = torch.arange(2**14).share_memory_()
assert shared.is_shared() and shared.sum() == (2**14 - 1) * 2**13
assert torch.empty(0).numel() == 0 and torch.zeros(2**20).sum() == 0
with torch.profiler.profile(profile_memory=True) as seen:
    torch.ones(2**20)
assert any(each.self_cpu_memory_usage >= 2**22 for each in seen.key_averages())
"""


def test_tensors_lie_apart():
    run(APART)


BEGUN = """
import os, torch
from shoal import Engine
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
loss = lambda module, rows: (module(rows["x"]).pow(2).sum(), len(rows["x"]))
engine = Engine(torch.nn.Linear(4, 4), loss, optimizer=torch.optim.SGD, global_batch=2)
for batch in engine.batches([{"x": torch.ones(4)}] * 8, steps=3):
    before = resident()
    torch.ones(2**24)  # 64 MiB that are free when the step begins
    engine.step(batch)
    print(resident() - before > 2**25)
engine.close()
"""


def test_what_an_engine_needed_to_begin_is_given_back_after_its_first_step():
    """It was kept: up to 29 MiB of a rank of 880, with weights in bf16 and their masters on a disk."""
    assert run(BEGUN).split() == ["False", "True", "False"]  # the third step finds what the second one has left


def test_a_limit_of_addresses_is_left_to_the_job():
    code = """
import torch
from shoal.native.heap import _tensors, keep_freed_memory
assert keep_freed_memory()
size = lambda: int(open("/proc/self/statm").read().split()[0]) * 4096
before = size()
assert _tensors() is not None and not _tensors().shoal_tensors_apart()
assert size() == before and torch.ones(2**22).sum() == 2**22
"""
    run(code, before="ulimit -v 16000000; ")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no large pages")
def test_the_kernel_is_asked_for_large_pages():
    tensor = in_large_pages(torch.empty(2**24))
    middle, flags, inside = tensor.data_ptr() + tensor.nbytes // 2, list[str](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            start, stop = (int(each, 16) for each in first.split("-"))
            inside = start <= middle < stop
        elif inside and first == "VmFlags:":
            flags = rest
    assert "hg" in flags
    small = torch.arange(5)
    assert in_large_pages(small) is small and small.tolist() == [0, 1, 2, 3, 4]
