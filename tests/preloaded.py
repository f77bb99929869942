"""Imports what most ranks of tests do: the server that they are forked from does so once (tests/pool.py)."""

from __future__ import annotations

from importlib import import_module

from shoal.jobs.imports import imports

NAMES = (
    "hypothesis",
    "pytest",
    "tests.parity.cases",
    "torch._decomp.decompositions_for_jvp",
    "torch._inductor.compile_fx",  # which torch.compile imports, whatever the backend
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "shoal.jobs.train",
    "shoal.report.page",
)

with imports():
    for name in NAMES:
        import_module(name)
