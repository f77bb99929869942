"""torch._dynamo comes when it is needed, and then does what it would have done from the start."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest

from shoal.comm import World
from tests.pool import run_ranks

PLAIN = """
import json, sys
from shoal.jobs import lazy_dynamo
lazy_dynamo.later()
import torch
"""
FAKE = """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    torch.nn.Linear(3, 4)(torch.empty(2, 3)).sum().backward()
weight = torch.nn.Parameter(torch.ones(3))
weight.grad = torch.ones(3)
torch.optim.AdamW([weight]).step()
print(json.dumps([lazy_dynamo.is_later(), "torch._dynamo.eval_frame" in sys.modules]))
"""
COMPILED = """
@torch.compiler.disable
def apart(x):
    return x + 1

@torch._dynamo.allow_in_graph
def inside(x):
    return x - 1

apart(torch.ones(1)), inside(torch.ones(1))
before, graphs = lazy_dynamo.is_later(), []

def backend(graph, inputs):
    graphs.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
    return graph

value = torch.compile(lambda x: inside(apart(x * 3) * 2), backend=backend)(torch.ones(2))
import torch._dynamo.eval_frame
same = torch._dynamo.eval_frame.__spec__.origin.endswith("eval_frame.py") and torch._dynamo.config.cache_size_limit > 0
print(json.dumps([before, lazy_dynamo.is_later(), value.tolist(), graphs, same]))
"""
SIZES = """
from shoal.report.memory import read_memory
import shoal.jobs.plan
before, coming = read_memory(torch.device("cpu")).bytes, lazy_dynamo.bytes_to_come()
torch._dynamo.eval_frame
print(json.dumps([before + coming, read_memory(torch.device("cpu")).bytes, lazy_dynamo.bytes_to_come()]))
"""


def said(*programs: str) -> list:
    """What each of `programs` says, one after the other in a new process in which torch._dynamo comes later."""
    code = PLAIN + "".join(programs)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def said_by_a_rank(world: World, program: str) -> list:
    """What it says where torch._dynamo has been imported as other modules are."""
    with redirect_stdout(StringIO()) as out:
        exec("import json, sys, torch\nfrom shoal.jobs import lazy_dynamo\n" + program, {"__name__": __name__})
    return json.loads(out.getvalue())


def test_fake_tensors_and_optimizers_do_without_it_and_what_is_compiled_is_as_if_it_had_always_been_there():
    without, later = said(FAKE, COMPILED)
    (now,) = run_ranks(said_by_a_rank, 1, COMPILED)
    assert without == [True, False]
    assert (later[0], now[0]) == (True, False) and later[1:] == now[1:]
    assert later[2] == [7.0, 7.0] and later[3] == [["mul"], ["mul", "inside"]]


def test_the_memory_of_a_process_is_told_as_with_it():
    ((told, found, more),) = said(SIZES)
    assert told == pytest.approx(found, rel=0.05) and more == 0
