"""`shoal demo` keeps what it promises: a worker is killed, another one joins, and the run comes to its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from shoal.report.metrics import read_metrics


@pytest.mark.matrix
def test_the_demo_kills_a_worker_lets_one_join_and_tells_how_long_it_took(tmp_path):
    command = [sys.executable, "-m", "shoal.cli", "demo", "--dir", "demo"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"a worker is killed \(SIGKILL of process \d+\)", done.stdout)
    assert re.search(r"noticed after .*s, the next step was committed after .*s", done.stdout)
    assert re.search(r"it trains after .*s; the others stood still for .*s", done.stdout)
    records = read_metrics(tmp_path / "demo" / "metrics.jsonl")
    assert [each.world for each in records.memberships][-1] == 3
    assert records.end is not None and records.steps[-1].loss < records.steps[0].loss - 1.5
    assert (tmp_path / "demo" / "report.html").exists() and not (tmp_path / "demo" / "nodes" / "tmp").exists()
