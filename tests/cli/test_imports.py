"""What a command imports: it is all that it costs before it begins, so each takes no more than it needs."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from functools import cache

import pytest

from shoal.jobs.imports import MANY, imports

LARGE = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "transformers",
    "tokenizers",
    "datasets",
    "pyarrow",
    "PIL",
    "shoal.engine",
)
"""Packages, and the module with all of Shoal, that take a tenth of a second or more."""


@cache
def after(module: str) -> tuple[list[str], bool, int]:
    """Returns which of LARGE and torch a new process has once it has imported `module`, whether it collects garbage,
    and how many objects it never collects."""
    there = f"[each for each in {('torch', *LARGE)} if each in sys.modules]"
    look = f"import gc, json, sys, {module}; print(json.dumps([{there}, gc.isenabled(), gc.get_freeze_count()]))"
    answer = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout
    found, collects, kept = json.loads(answer)
    return found, collects, kept


def imported(module: str) -> list[str]:
    return after(module)[0]


@pytest.mark.parametrize("module", ["shoal", "shoal.cli.app"])
def test_help_and_errors_of_a_job_file_need_no_torch(module):
    assert imported(module) == []


@pytest.mark.parametrize("module", ["shoal.cli.start", "shoal.cli.mesh_table", "shoal.cli.doctor"])
def test_what_starts_ranks_or_looks_at_the_machine_needs_torch_alone(module):
    assert imported(module) == ["torch"]


def test_the_planner_needs_fake_tensors_and_no_engine():
    """Fake tensors import torch._dynamo by themselves."""
    assert imported("shoal.cli.memory_table") == ["torch", "torch._dynamo"]


def test_a_rank_imports_no_library_of_others():
    assert set(imported("shoal.jobs.__main__")) == {
        "torch", "torch._dynamo", "torch.distributed.checkpoint", "shoal.engine",
    }  # fmt: skip


def test_the_collector_rests_during_imports_alone():
    before = gc.get_freeze_count()
    with pytest.raises(ImportError), imports():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() == before  # what is there is not of these imports


def test_what_a_rank_imports_is_never_collected():
    _, collects, kept = after("shoal.jobs.__main__")
    assert collects and kept > 100 * MANY
