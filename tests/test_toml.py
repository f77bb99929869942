"""Values as a job file has them."""

from __future__ import annotations

import tomllib

import pytest

from shoal.toml import plan_text, toml_fields


@pytest.mark.fast
@pytest.mark.parametrize("written", [toml_fields, plan_text])
def test_a_plan_in_a_message_is_one_that_a_job_file_takes(written):
    plan = {
        "dp": 4,
        "recompute": {"name": "blocks", "full": "0-2"},
        "memory": {"disk": "/tmp/ein Ort", "host": 1 << 30, "activations": 0.5},
        "stages": [2, 2],
        "compile": True,
    }
    assert tomllib.loads(f"plan = {{{written(plan)}}}")["plan"] == plan


@pytest.mark.fast
def test_no_budget_is_written_as_it_is_pinned():
    assert plan_text({"tp": 3, "memory": None}) == "tp = 3, memory = none"
