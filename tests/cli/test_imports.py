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
def after(*modules: str) -> tuple[list[list[str]], bool, int]:
    """Returns which of LARGE and torch a new process has after it has imported each of `modules`, one after the other,
    whether it collects garbage in the end, and how many objects it never collects."""
    look = f"""
import gc, importlib, json, sys
found = []
for module in {modules}:
    importlib.import_module(module)
    found.append([each for each in {("torch", *LARGE)} if each in sys.modules])
print(json.dumps([found, gc.isenabled(), gc.get_freeze_count()]))
"""
    answer = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout
    found, collects, kept = json.loads(answer)
    return found, collects, kept


def test_help_and_errors_of_a_job_file_need_no_torch():
    assert after("shoal", "shoal.cli.app")[0] == [[], []]


def test_the_command_line_needs_torch_alone_and_the_planner_fake_tensors_and_no_engine():
    """Fake tensors import torch._dynamo by themselves."""
    found, _, _ = after("shoal.cli.start", "shoal.cli.mesh_table", "shoal.cli.doctor", "shoal.cli.memory_table")
    assert found == [["torch"], ["torch"], ["torch"], ["torch", "torch._dynamo"]]


def test_a_rank_imports_no_library_of_others():
    assert set(after("shoal.jobs.__main__")[0][0]) == {
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
